"""W9 of ``oarjax bench``: time update and log-probs of completions that differ in length.

The run's own programs process the same rows sorted by length into microbatches that are each padded to their own
bucket, as in training, with two sizes of buckets, and with every microbatch padded to the bucket of the longest row.
``--against torch`` adds torch by length and to the longest, with microbatches padded to their longest row, no bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from oarjax.config.schema import Config
from oarjax.costs import RowTokens, scoring_flops, update_flops
from oarjax.data.hf import load_params, read_config
from oarjax.models.weights import decoder_of
from oarjax.run.run import Run
from oarjax.step.minibatches import MinibatchPlan, padding_share, sizes_of
from oarjax.system.mesh import make_mesh
from oarjax.tools.bench.measure import Compilations, Peak, seconds_of, warm
from oarjax.tools.bench.ragged import Ragged, TorchSettings, draw_prompts, ragged_config, shape_text
from oarjax.tools.bench.sides import TimedDraw, compare
from oarjax.tools.bench.work import PAD
from oarjax.types import AnswerSpan, Rollout, SampledRows, TrainBatch

if TYPE_CHECKING:
    from oarjax.tools.bench.ragged_against import RaggedTorch

OURS, FINER, PADDED = "by length", "by length, finer", "to the longest"
TORCH = {"torch, by length": True, "torch, to the longest": False}
Works = dict[str, Callable[[], Any]]
"""Side -> work."""


class Draw(NamedTuple):
    """Rows of one measurement."""

    ids: Int[np.ndarray, "B N"]
    lengths: Int[np.ndarray, "B"]
    advantages: Float[np.ndarray, "B T"]

    @property
    def completion(self) -> np.ndarray:
        return np.arange(self.advantages.shape[1]) < self.lengths[:, None]


def draw_rows(vocab: int, shapes: Ragged, *, seed: int) -> Draw:
    """Draw random tokens, completions of geometric lengths and advantages."""
    s, draw = shapes, np.random.default_rng(seed)
    lengths = draw.geometric(s.stops / vocab, s.rows).clip(max=s.max_new).astype(np.int32)
    completions = draw.integers(s.stops, vocab, (s.rows, s.max_new)).astype(np.int32)
    ids = np.concatenate([draw_prompts(vocab, s, count=s.rows), completions], 1)
    rows = Draw(ids, lengths, draw.standard_normal((s.rows, s.max_new)).astype(np.float32))
    ids[:, s.prompt_tokens :][~rows.completion] = PAD
    return rows


class RaggedUpdates:
    """Run update and log-probs of one draw after another, with programs compiled once per bucket."""

    def __init__(self, folder: Path, shapes: Ragged):
        self.shapes = shapes
        self.model, source = read_config(folder)
        self.params = load_params(source, self.model)
        self.mesh = make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
        self.run = self.run_of(ragged_config(shapes, credit={"method": "uniform"}))
        # Training needs old log-probs only with several epochs per rollout.
        self.scores = self.run_of(ragged_config(shapes, credit={"method": "uniform"}, update={"epochs": 2}))
        self.state = self.run.new_state(self.params)

    def run_of(self, cfg: Config) -> Run:
        return Run(cfg, model=self.model, mesh=self.mesh, stop_ids=(), pad_id=PAD)

    def plans(self, draw: Draw) -> dict[str, tuple[MinibatchPlan, Rollout]]:
        """Return each side's division of the rows into microbatches."""
        s, cfg, mask = self.shapes, self.run.cfg, draw.completion
        valid = np.concatenate([np.ones((s.rows, s.prompt_tokens), bool), mask], 1)
        zeros = np.zeros(mask.shape, np.float32)
        rollout: Any = Rollout(draw.ids, valid, mask, zeros, zeros, np.ones(s.rows, bool))  # type: ignore[arg-type]
        sizes, finer = (
            sizes_of(rollout, prompt_bucket=s.prompt_tokens, completion_bucket=step) for step in (s.bucket, s.finer)
        )
        rows, b = np.arange(s.rows), cfg.update.microbatch
        return {
            name: (MinibatchPlan(rows, 1, b, s.rows, row_sizes), rollout)
            for name, row_sizes in ((OURS, sizes), (FINER, finer), (PADDED, np.tile(sizes.max(0), (s.rows, 1))))
        }

    def works(self, draw: Draw) -> tuple[dict[str, Works], dict[str, float]]:
        """Return the works of each row of the table by side, and the padding of each side."""
        out: dict[str, Works] = {"update": {}, "log-probs": {}}
        padding = {}
        for name, (plan, rollout) in self.plans(draw).items():
            out["update"][name] = self.update(draw, plan, rollout)
            out["log-probs"][name] = self.log_probs(plan, rollout)
            padding[name] = padding_share(plan, rollout, [1])
        return out, padding

    def update(self, draw: Draw, plan: MinibatchPlan, rollout: Rollout) -> Callable[[], Any]:
        steps = self.run.steps
        batch: Any = TrainBatch(
            tokens=rollout.tokens,
            valid=rollout.valid,
            completion=rollout.completion,
            advantages=draw.advantages,  # type: ignore[arg-type]
            old_logps=None,
            ref_logps=None,
            behaviour_logps=None,
        )
        (rows,) = (self.run.place(minibatch, "microbatches") for minibatch in plan.split(batch))
        denominator = steps.denominator(jnp.asarray(rollout.completion))

        def work() -> None:
            self.state, _ = steps.updates.update(self.state, rows, plan.pieces[0], denominator)
            jax.block_until_ready(self.state)

        return work

    def log_probs(self, plan: MinibatchPlan, rollout: Rollout) -> Callable[[], Any]:
        steps, none = self.scores.steps, np.zeros(rollout.completion.shape, bool)
        span: Any = AnswerSpan(none, none, np.ones(len(none), bool))  # type: ignore[arg-type]
        tree = SampledRows(rollout, span, np.arange(len(none), dtype=np.int32))  # type: ignore[arg-type]
        (arrays,) = (self.scores.place(minibatch, "microbatches") for minibatch in plan.split(tree))
        key, probe = jax.random.key(0), self.scores.cfg.credit.probe.mode
        return lambda: jax.block_until_ready(steps.scores(self.params, None, arrays, plan.pieces[0], key, probe=probe))


def torch_works(draw: Draw, torch_side: RaggedTorch, shapes: Ragged) -> tuple[dict[str, Works], dict[str, float]]:
    """Return torch's works on the same rows, and their padding."""
    ids = torch_side.placed(draw.ids)[:, : shapes.prompt_tokens + int(draw.lengths.max())]
    advantages = torch_side.placed(draw.advantages)
    out: dict[str, Works] = {"update": {}, "log-probs": {}}
    padding = {}
    for name, sorts in TORCH.items():
        update = partial(torch_side.update, ids, draw.lengths, advantages, by_length=sorts)
        log_probs = partial(torch_side.log_probs, ids, draw.lengths, by_length=sorts)
        out["update"][name], out["log-probs"][name] = torch_side.waited(update), torch_side.waited(log_probs)
        padding[name] = torch_side.padding(draw.lengths, shapes.prompt_tokens, by_length=sorts)
    return out, padding


def bench_ragged_update(
    folder: Path,
    vocab: int,
    shapes: Ragged,
    *,
    repeats: int,
    compiled: Compilations,
    peak: Peak,
    against: TorchSettings | None,
) -> dict[str, Any]:
    """Measure every side in turn on ``repeats`` draws."""
    updates, torch_side = RaggedUpdates(folder, shapes), None
    if against is not None:
        from oarjax.tools.bench.ragged_against import RaggedTorch

        torch_side = RaggedTorch(folder, updates.run.cfg, **against._asdict())
    sizes, microbatch = decoder_of(updates.model), updates.run.cfg.update.microbatch
    occupancy = shapes.rows / (-(-shapes.rows // microbatch) * microbatch)

    def draw(number: int) -> dict[str, dict[str, TimedDraw]]:
        batch = draw_rows(vocab, shapes, seed=number)
        works, padding = updates.works(batch)
        if torch_side is not None:
            torch_sides, torch_padding = torch_works(batch, torch_side, shapes)
            works, padding = {name: works[name] | torch_sides[name] for name in works}, padding | torch_padding
        rows = [RowTokens(shapes.prompt_tokens, int(n)) for n in batch.lengths]
        flops = {
            "update": sum(update_flops(sizes, row) for row in rows),
            "log-probs": sum(scoring_flops(sizes, row) for row in rows),
        }

        def timed(name: str, side: str) -> TimedDraw:
            work = works[name][side]
            if number == 1:
                work()  # warm
            seconds = warm(partial(seconds_of, work), compiled)
            return TimedDraw(seconds, batch.lengths, flops[name], occupancy, padding[side])

        return {name: {side: timed(name, side) for side in sides} for name, sides in works.items()}

    name, shape = "ragged update and log-probs", shape_text(shapes)
    return compare(draw, "W9", name, shape, repeats=repeats, compiled=compiled, peak=peak)
