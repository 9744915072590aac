"""The programs of a run for chips that are not here: a ``Run`` of a model and a mesh alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from oarjax.config.changes import changed
from oarjax.config.learning import RolloutConfig, UpdateConfig
from oarjax.config.loading import parse_config
from oarjax.config.outputs import EvalConfig
from oarjax.config.schema import Config
from oarjax.kernels.decode_attention import DecodeKind, padded_slots
from oarjax.models.qwen_config import QwenConfig
from oarjax.rollout.row_schedule import DecodePlan, cache_step, fewest_decoded, make_plan
from oarjax.run.checks import check_lengths
from oarjax.run.custom import find_credit
from oarjax.run.layout import check_layouts
from oarjax.run.run import Run
from oarjax.run.shapes import PhaseProgram, ProgramShapes
from oarjax.step.fused import fuses
from oarjax.step.minibatches import widest_prompt
from oarjax.step.sampling import fewest_evaluated

STOPS, PAD = (151645, 151643), 151643
"""Qwen's. They are constants of a program, which costs the same whatever they are."""

PROGRAMS: dict[str, Callable[[ProgramShapes], tuple[PhaseProgram, ...]]] = {
    "reshard": lambda shapes: (shapes.reshard_program(),),
    "sample": lambda shapes: shapes.sampling_programs("sample", counted=True),
    "score": lambda shapes: (shapes.score_program(),),
    "fused": lambda shapes: (shapes.fused_program(),),
    "update": lambda shapes: (shapes.update_program(),),
    "apply": lambda shapes: (shapes.apply_program(),),
}
"""Phases in the order of a step. An update adds up gradients (``update``, or with the scores in ``fused``) and changes
the weights (``apply``)."""

LEARNING = ("score", "update", "fused")
"""Phases that go through the policy as it learns, some forward and some backward too."""


def phases_of_step(cfg: Config, *, experts: bool = False) -> tuple[str, ...]:
    """Return the phases that an iteration runs: score and update, or both in one pass; of a policy with ``experts``."""
    fused = fuses(cfg.update, find_credit(cfg.credit), kl_beta=cfg.loss.kl_beta, experts=experts)
    learning = ("fused",) if fused else ("score", "update")
    return ("reshard", "sample", *learning, "apply")


def times_of(update: UpdateConfig) -> dict[str, int]:
    """Return how often an iteration runs each phase, were it among those of its step."""
    updates = update.minibatches * update.epochs
    return {"reshard": 1, "sample": 1, "score": update.minibatches} | dict.fromkeys(
        ("fused", "update", "apply"), updates
    )


class LargestShapes(NamedTuple):
    """The largest shapes of a run."""

    prompts: int
    rows: int
    prompt: int  # positions
    completion: int
    microbatches: int  # of an update
    microbatch: int  # rows


def shapes_of(cfg: Config) -> LargestShapes:
    """Return the shapes with prompts and completions at their longest, every row used."""
    rows = cfg.rollout.prompts * cfg.rollout.group_size
    return LargestShapes(
        prompts=cfg.rollout.prompts,
        rows=rows,
        prompt=widest_prompt(cfg.data, cfg.rollout),
        completion=cfg.rollout.max_new,
        microbatches=rows // cfg.update.minibatches // cfg.update.microbatch,
        microbatch=cfg.update.microbatch,
    )


def planned_prompt_rows(update: UpdateConfig) -> int:
    """Return the rows of a group that share the pass over their prompt; auto is 1 on accelerators."""
    return 1 if update.prompt_rows == "auto" else update.prompt_rows


def rollout_plan(s: LargestShapes, rollout: RolloutConfig, *, blocks: int) -> DecodePlan:
    """Return the sizes of the programs of a rollout whose prompts are at their longest, on ``blocks`` of devices."""
    return make_plan(
        prompts=s.prompts,
        width=s.prompt,
        group=rollout.group_size,
        max_new=s.completion,
        cache_bucket=cache_step(s.completion, rollout.cache_bucket),
        slots=rollout.slots,
        blocks=blocks,
        fewest=fewest_decoded(s.prompts * rollout.group_size, s.completion),
    )


def evaluation_plan(s: LargestShapes, rollout: RolloutConfig, evaluation: EvalConfig, *, blocks: int) -> DecodePlan:
    """Return the sizes of the programs of an evaluation whose prompts are as long as those of a rollout may be."""
    return make_plan(
        prompts=evaluation.batch,
        width=s.prompt,
        group=evaluation.samples,
        max_new=s.completion,
        cache_bucket=cache_step(s.completion, rollout.cache_bucket),
        slots=rollout.slots,
        blocks=blocks,
        fewest=fewest_evaluated(evaluation, rollout),
    )


def mean_slots(rows: DecodePlan, attention: DecodeKind) -> float:
    """Return the slots that a decode step reads of a row's cache, on average where all rows go to max_new."""
    if attention == "kernel":
        return sum(map(padded_slots, range(rows.max_new - 1))) / max(rows.max_new - 1, 1)
    steps = rows.full_steps()
    return sum(slots * count for slots, count in steps.items()) / max(sum(steps.values()), 1)


def with_method(cfg: Config, method: str | None) -> Config:
    """Return the config with another credit method, if one is named.

    A method that reads keywords needs a tokenizer for its weights alone, which are no program of a plan: it scores as
    uniform does.
    """
    result = parse_config(cfg.model_dump() | {"credit": changed(cfg.credit, {"method": method or cfg.credit.method})})
    if "keyword_table" not in find_credit(result.credit).signals:
        return result
    return parse_config(cfg.model_dump() | {"credit": changed(cfg.credit, {"method": "uniform"})})


def planned(cfg: Config, model: QwenConfig, mesh: Mesh) -> Run:
    """Make a run for a mesh whose devices may be elsewhere.

    Raises:
        ConfigError, ShardingError: sizes that the mesh does not divide, or lengths beyond the model's.
    """
    check_lengths(cfg, model)
    check_layouts(cfg, model, mesh)
    return Run(cfg, model=model, mesh=mesh, stop_ids=STOPS, pad_id=PAD)
