"""Prepare the work that ``oarjax bench`` times: the programs and the iteration of training, on random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.costs import RowTokens, Work, clean_flops, iteration_flops, pass_flops
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of
from oarjax.run.run import Run
from oarjax.step.host_callbacks import GradedAtOnce, HostCallbacks
from oarjax.step.iteration import iterate
from oarjax.step.minibatches import Piece
from oarjax.step.steps import Steps
from oarjax.system.mesh import make_mesh
from oarjax.types import AnswerSpan, Grades, Params, PromptBatch, Rollout, SampledRows, TrainBatch

PAD = 0


@dataclass(frozen=True)
class WorkloadSizes:
    """Sizes of the four workloads."""

    prompts: int = 32  # W1 and W2
    prompt_tokens: int = 64
    new_tokens: int = 128
    credit_rows: int = 8  # W3
    reasoning: int = 96
    cue: int = 4
    answer: int = 4
    groups: int = 8  # W4
    group_size: int = 4


@dataclass(frozen=True)
class BenchRow:
    """One line of the table: the work and its unit."""

    workload: str
    name: str
    what: str
    unit: str
    amount: int  # tokens or sequences of one run; 1 if the unit is a run
    flops: float  # of one run by the plain method; sharing the prompt's pass needs fewer


@dataclass(frozen=True)
class Tokens:
    """The random tokens that both sides run on."""

    prompts: np.ndarray  # [P, S], W1
    rows: np.ndarray  # [P, S + T], W2
    credit: np.ndarray  # [R, S + reasoning + cue + answer], W3
    groups: np.ndarray  # [Q, S], W4


def draw_tokens(vocab: int, shapes: WorkloadSizes, *, seed: int) -> Tokens:
    """Draw uniform ids."""
    draw = np.random.default_rng(seed)
    s = shapes
    length = s.prompt_tokens + s.reasoning + s.cue + s.answer

    def ids(*shape: int) -> np.ndarray:
        return draw.integers(1, vocab, shape).astype(np.int32)

    return Tokens(
        prompts=ids(s.prompts, s.prompt_tokens),
        rows=ids(s.prompts, s.prompt_tokens + s.new_tokens),
        credit=ids(s.credit_rows, length),
        groups=ids(s.groups, s.prompt_tokens),
    )


def make_rows(model: QwenConfig, shapes: WorkloadSizes) -> list[BenchRow]:
    """Return the rows of the table, in order."""
    s = shapes

    d, full = decoder_of(model), s.prompt_tokens + s.new_tokens
    many = f"{s.prompts} x ({s.prompt_tokens}+{s.new_tokens})"
    spans = f"{s.credit_rows} x ({s.prompt_tokens}+{s.reasoning}+{s.cue}+{s.answer})"
    forward = pass_flops(d, tokens=s.prompts * full, context=full / 2, read=s.prompts * full)
    row_count = s.groups * s.group_size
    work = Work(RowTokens(s.prompt_tokens, s.new_tokens), prompts=s.groups, rows=row_count, used=row_count)
    iteration = sum(iteration_flops(d, work, resolve_method(CreditSettings(method="oar_g"))).values())

    def scores(method: str) -> float:
        row = RowTokens(s.prompt_tokens, s.reasoning + s.cue + s.answer, s.reasoning)
        return s.credit_rows * clean_flops(d, row) * resolve_method(CreditSettings(method=method)).forwards(row, d)

    return [
        BenchRow("W1", "rollout", many, "tokens/s", s.prompts * s.new_tokens, forward),
        BenchRow("W2", "update", many, "s", 1, 3 * forward),
        BenchRow("W2", "log-probs", many, "s", 1, forward),
        BenchRow("W3", "OAR-G linearised", spans, "s/sequence", s.credit_rows, scores("oar_g")),
        BenchRow("W3", "OAR-G noisy", spans, "s/sequence", s.credit_rows, scores("oar_g")),
        BenchRow("W3", "OAR-P", spans, "s/sequence", s.credit_rows, scores("oar_p")),
        BenchRow(
            "W4", "iteration", f"{s.groups} x {s.group_size} ({s.prompt_tokens}+{s.new_tokens})", "s", 1, iteration
        ),
    ]


def settings(shapes: WorkloadSizes) -> dict[str, Any]:
    """Return the fields of the workloads' config that differ from a run's defaults.

    Few rows at a time stay in a CPU's cache, and keep so little for the backward pass that remat is not needed.
    """
    rows = shapes.groups * shapes.group_size
    return {
        "run_dir": "unused",
        "policy": {"path": "unused", "compute_dtype": "float32", "remat": "none", "attention": "xla"},
        "data": {"train": {"source": "unused"}},
        "rollout": {
            "prompts": shapes.groups,
            "group_size": shapes.group_size,
            "max_new": shapes.new_tokens,
        },
        "eval": {"temperature": 1.0, "samples": 1},
        "update": {"microbatch": _microbatch(rows, 4 if jax.devices()[0].platform == "cpu" else 32)},
    }


def _microbatch(rows: int, most: int) -> int:
    """Return the largest number of rows, at most ``most``, that divides ``rows``."""
    return next(b for b in range(min(rows, most), 0, -1) if rows % b == 0)


def spans(rows: int, length: int, shapes: WorkloadSizes, *, outcome: bool = False) -> AnswerSpan:
    """Return the same reasoning and answer for every row; random tokens contain no answer.

    ``outcome``: the answer stands for the reference, whose probability is read.
    """
    positions = np.broadcast_to(np.arange(length), (rows, length))
    start = shapes.reasoning + shapes.cue
    answer: Any = (positions >= start) & (positions < start + shapes.answer)
    return AnswerSpan(
        reasoning=positions < shapes.reasoning,  # type: ignore[arg-type]
        answer=answer,
        has_answer=np.ones(rows, bool),  # type: ignore[arg-type]
        outcome=answer if outcome else None,
    )


def half_right(rows: int, group_size: int) -> Grades:
    """Grade half of every group as right, so that no group is skipped."""
    rewards = (np.arange(rows) % group_size < (group_size + 1) // 2).astype(np.float32)
    return Grades(rewards, {"half": rewards}, ["graded"] * rows, [None] * rows, [""] * rows)


def half_constant(rows: int, group_size: int) -> Grades:
    """Grade all of every second group as right, so that it is skipped, and half of the other groups."""
    half = half_right(rows, group_size).rewards
    rewards = np.where(np.arange(rows) // group_size % 2 == 1, np.float32(1), half)
    return Grades(rewards, {"half": rewards}, ["graded"] * rows, [None] * rows, [""] * rows)


Rewards = Callable[[int, int], Grades]
"""(rows, group size) -> grades."""
Watch = Callable[[Steps], Steps]
"""(programs) -> programs that do the same and are observed."""


def watched(names: Iterable[str], around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Watch:
    """Replace each program of these names, where there is one, by ``around`` of its name and itself."""

    def replaced(steps: Steps) -> Steps:
        programs = steps._asdict()
        return steps._replace(**{name: around(name, programs[name]) for name in names if programs[name] is not None})

    return replaced


def host_of(
    run: Run, prompts: PromptBatch, *, rewards: Rewards, find: Callable[[Rollout], AnswerSpan]
) -> HostCallbacks:
    """Supply every iteration with the same prompts and with rewards that need no grading."""
    size = run.cfg.rollout.group_size
    return HostCallbacks(
        next_prompts=lambda: prompts,
        submit=lambda batch: GradedAtOnce(lambda rollout: lambda: rewards(len(rollout.ended), size)),
        find_answers=find,
        fetch=run.fetch,
        place=run.place,
        phase=lambda name: nullcontext(),
    )


class Ours:
    """The work of every row of the table with oarjax, by the row's name; programs are compiled at the first call."""

    def __init__(self, folder: Path, shapes: WorkloadSizes, tokens: Tokens):
        self.shapes, self.tokens = shapes, tokens
        self.cfg = parse_config(settings(shapes))
        self.model, source = read_config(folder)
        self.mesh = make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
        self.params: Params = load_params(source, self.model)
        self.works: dict[str, Callable[[], Any]] = {
            "rollout": self.rollout(),
            "update": self.update(),
            "log-probs": self.log_probs(),
            "OAR-G linearised": self.importance(method="oar_g", estimator="linearised"),
            "OAR-G noisy": self.importance(method="oar_g", estimator="noisy"),
            "OAR-P": self.importance(method="oar_p"),
            "iteration": self.iteration(),
        }

    def rollout(self) -> Callable[[], Any]:
        steps, keys = self.run_of(self.cfg).steps, _Keys()
        ids = jnp.asarray(self.tokens.prompts)
        prompts = PromptBatch(ids, jnp.ones(ids.shape, bool), jnp.arange(len(ids), dtype=jnp.int32))
        # The evaluation's program draws one completion per prompt.
        return lambda: jax.block_until_ready(steps.evaluate(self.params, prompts, keys.next()))

    def update(self) -> Callable[[], Any]:
        run = self.run_of(self.cfg)
        steps, state = run.steps, run.new_state(self.params)
        rows, b = len(self.tokens.rows), _microbatch(len(self.tokens.rows), self.cfg.update.microbatch)
        draw = np.random.default_rng(1)
        completion = np.ones((rows, self.shapes.new_tokens), bool)
        advantages = draw.standard_normal(completion.shape).astype(np.float32)
        batch = jax.tree.map(
            lambda x: jnp.asarray(x).reshape(-1, b, *x.shape[1:]),
            TrainBatch(
                tokens=self.tokens.rows,  # type: ignore[arg-type]
                valid=np.ones(self.tokens.rows.shape, bool),  # type: ignore[arg-type]
                completion=completion,  # type: ignore[arg-type]
                advantages=advantages,  # type: ignore[arg-type]
                old_logps=None,
                ref_logps=None,
                behaviour_logps=None,
            ),
        )
        pieces = (Piece(None, np.int32(0), np.int32(rows // b)),)
        denominator = steps.denominator(jnp.asarray(completion))

        def work() -> None:
            nonlocal state
            state, _ = steps.updates.update(state, batch, pieces, denominator)
            jax.block_until_ready(state)

        return work

    def log_probs(self) -> Callable[[], Any]:
        # Training needs old log-probs only with several epochs per rollout.
        cfg = self.changed(credit={"method": "uniform"}, update={"epochs": 2})
        return self._score(cfg, self.tokens.rows, self.shapes.new_tokens)

    def importance(self, **credit: Any) -> Callable[[], Any]:
        s = self.shapes
        return self._score(self.changed(credit=credit), self.tokens.credit, s.reasoning + s.cue + s.answer)

    def iteration(
        self, cfg: Config | None = None, *, rewards: Rewards = half_right, watch: Watch = lambda steps: steps
    ) -> Callable[[], Any]:
        s, cfg = self.shapes, cfg or self.cfg
        run = self.run_of(cfg)
        steps, state = watch(run.steps), run.new_state(self.params)
        ids = self.tokens.groups
        prompts = PromptBatch(ids, np.ones(ids.shape, bool), np.arange(len(ids), dtype=np.int32))  # type: ignore[arg-type]
        find = partial(spans, length=s.new_tokens, shapes=s, outcome=run.wants_outcome)
        host = host_of(run, prompts, rewards=rewards, find=lambda rollout: find(len(rollout.ended)))
        number = 0

        def work() -> None:
            nonlocal state, number
            number += 1
            state, _ = iterate(state, None, number, steps=steps, host=host, cfg=cfg)
            jax.block_until_ready(state)

        return work

    def _score(self, cfg: Config, ids: np.ndarray, length: int) -> Callable[[], Any]:
        steps, keys = self.run_of(cfg).steps, _Keys()
        rows, b = len(ids), _microbatch(len(ids), cfg.update.microbatch)
        completion = np.ones((rows, length), bool)
        zeros = np.zeros(completion.shape, np.float32)
        rollout = Rollout(ids, np.ones(ids.shape, bool), completion, zeros, zeros, np.ones(rows, bool))  # type: ignore[arg-type]
        numbers = np.arange(rows, dtype=np.int32)
        arrays = jax.tree.map(
            lambda x: jnp.asarray(x).reshape(-1, b, *x.shape[1:]),
            SampledRows(rollout, spans(rows, length, self.shapes), numbers),  # type: ignore[arg-type]
        )
        count, probe = jnp.int32(rows // b), cfg.credit.probe.mode
        return lambda: jax.block_until_ready(steps.score(self.params, None, arrays, keys.next(), 0, count, probe=probe))

    def changed(self, **sections: dict[str, Any]) -> Config:
        """Return the workloads' config with other fields."""
        tree = settings(self.shapes)
        return parse_config(tree | {name: tree.get(name, {}) | fields for name, fields in sections.items()})

    def run_of(self, cfg: Config) -> Run:
        return Run(cfg, model=self.model, mesh=self.mesh, stop_ids=(), pad_id=PAD)


class _Keys:
    """Draw a fresh key for every run, outside the programs."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> jax.Array:
        self.drawn += 1
        return jax.random.key(self.drawn)
