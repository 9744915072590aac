"""W10 and W11 of ``oarjax bench``: time a whole iteration of GRPO and of OAR-G whose completions differ in length.

The side *before* is the same iteration without savings on padding: one program decodes every row until the last one
ends, in a cache of max_new slots from the first token on; score and update are two passes, and both pad every row to
the longest of the iteration. Both sides begin every draw with the same weights and noise and draw the same
completions. W11 has prompts as long as completions: beside it stands *prompt per row*, the same iteration that computes
every row's prompt anew in scores and updates (``update.prompt_rows``).

``--against torch``: ``generate`` completions of the same lengths, OAR-G one row at a time, and updates in both ways of
W9. Rewards need no grading on either side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from oarjax.config.schema import Config
from oarjax.costs import RowTokens, Work, iteration_flops
from oarjax.credit.resolved import resolve_method
from oarjax.data.hf import load_params, read_config
from oarjax.models.weights import decoder_of
from oarjax.rollout.source import Spent
from oarjax.run.run import Run
from oarjax.step.iteration import Iteration, iterate
from oarjax.step.minibatches import Bucket, bucket
from oarjax.step.steps import Steps
from oarjax.system.mesh import make_mesh
from oarjax.tools.bench.measure import Compilations, Peak, seconds_of, warm
from oarjax.tools.bench.ragged import ALONE, BEFORE, Ragged, TorchSettings, draw_prompts, ragged_config, shape_text
from oarjax.tools.bench.ragged_update import TORCH
from oarjax.tools.bench.sides import TimedDraw, compare, share_in_use
from oarjax.tools.bench.work import PAD, half_right, host_of
from oarjax.types import AnswerSpan, PromptBatch, Rollout

if TYPE_CHECKING:
    from oarjax.tools.bench.ragged_against import RaggedTorch

CREDIT = {"GRPO": "uniform", "OAR-G": "oar_g"}
OURS = "now"


def last_tokens(rollout: Rollout, answer: int) -> AnswerSpan:
    """Mark the last tokens of every completion as its answer, and all before as its reasoning."""
    positions, length = np.arange(rollout.completion.shape[1]), rollout.completion.sum(1)[:, None]
    has_answer = length > answer
    return AnswerSpan(
        reasoning=(positions < length - answer) & has_answer,  # type: ignore[arg-type]
        answer=(positions >= length - answer) & (positions < length) & has_answer,  # type: ignore[arg-type]
        has_answer=has_answer[:, 0],  # type: ignore[arg-type]
    )


def as_before(steps: Steps, cfg: Config) -> Steps:
    """Return programs that decode all rows until the last one ends, and pad to the longest in two passes."""
    sampler: Any = steps.sample
    longest = Bucket(0, 0)

    def sample(*args: Any) -> Rollout:
        nonlocal longest
        rollout = sampler.whole(*args)
        tokens = int(np.asarray(rollout.completion).sum(1).max())
        roll = cfg.rollout
        longest = Bucket(cfg.data.max_prompt, bucket(tokens, roll.completion_bucket, roll.max_new))
        return rollout

    def padded(program: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, bucket, **static: program(*args, bucket=longest, **static)

    programs = {name: padded(getattr(steps, name)) for name in ("score", "accumulate")}
    return steps._replace(sample=sample, decoding=Spent, fused_zeros=None, fused_add=None, **programs)


class RaggedIterations:
    """Run iterations that all begin with the same weights; the draw is the iteration's number."""

    def __init__(self, folder: Path, vocab: int, shapes: Ragged, method: str):
        self.shapes = s = shapes
        self.model, source = read_config(folder)
        self.cfg = ragged_config(s, credit={"method": method})
        mesh = make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
        self.run = Run(self.cfg, model=self.model, mesh=mesh, stop_ids=tuple(range(s.stops)), pad_id=PAD)
        self.ids = draw_prompts(vocab, s, count=s.rows // s.group_size)
        steps = self.run.steps
        rival = {BEFORE: as_before(steps, self.cfg)} if s.compared == BEFORE else {ALONE: steps._replace(prompt_rows=1)}
        self.sides = {OURS: steps} | rival
        numbers = np.arange(len(self.ids), dtype=np.int32)
        prompts = PromptBatch(self.ids, np.ones(self.ids.shape, bool), numbers)  # type: ignore[arg-type]
        self.host = host_of(self.run, prompts, rewards=half_right, find=lambda rollout: last_tokens(rollout, s.answer))
        self.start = self.run.new_state(load_params(source, self.model))
        self.copy = jax.jit(partial(jax.tree.map, jnp.copy))

    def __call__(self, side: str, number: int) -> TimedDraw:
        state = jax.block_until_ready(self.copy(self.start))
        start = time.perf_counter()
        state, iteration = iterate(state, None, number, steps=self.sides[side], host=self.host, cfg=self.cfg)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        lengths = np.asarray(iteration.rollout.completion).sum(1).astype(np.int32)
        occupancy = iteration.metrics.get("decode_occupancy", share_in_use(lengths))  # without segments there is none
        return TimedDraw(seconds, lengths, self.flops(lengths), occupancy, self.padding(side, iteration, lengths))

    def padding(self, side: str, done: Iteration, lengths: Int[np.ndarray, "B"]) -> float:
        """Return the share of the update's positions without a token."""
        if side != BEFORE:
            return done.metrics["padding_share/update"]
        s = self.shapes
        wide = s.prompt_tokens + bucket(int(lengths.max()), s.bucket, s.max_new)
        return 1 - float((s.prompt_tokens + lengths).sum()) / (s.rows * wide)

    def flops(self, lengths: Int[np.ndarray, "B"]) -> float:
        """Count the model FLOPs of an iteration with completions of these lengths."""
        s, mean = self.shapes, float(lengths.mean())
        reasoning = float((lengths - s.answer).clip(min=0).mean())
        row = RowTokens(s.prompt_tokens, mean, reasoning, self.run.steps.prompt_rows)
        work = Work(row, prompts=len(self.ids), rows=s.rows, used=s.rows)
        return sum(iteration_flops(decoder_of(self.model), work, resolve_method(self.cfg.credit)).values())


class TorchIterations:
    """Run the iterations in torch; one rollout and its credit serve both ways of the update."""

    def __init__(self, torch_side: RaggedTorch, ids: Int[np.ndarray, "P S"], shapes: Ragged, method: str):
        self.torch, self.shapes, self.method = torch_side, shapes, method
        self.ids = np.repeat(ids, shapes.group_size, axis=0)
        rewards = half_right(shapes.rows, shapes.group_size).rewards.reshape(-1, shapes.group_size)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
        self.advantages = torch_side.placed(advantages.reshape(-1, 1))

    def __call__(self, ours: TimedDraw) -> dict[str, TimedDraw]:
        t, s, lengths = self.torch, self.shapes, ours.lengths
        ids: list[Any] = []
        weights: list[Any] = [self.advantages.new_ones(len(lengths), int(lengths.max()))]
        shared_seconds = seconds_of(t.waited(lambda: ids.append(t.complete(self.ids, lengths))))
        if self.method != "uniform":
            shared_seconds += seconds_of(t.waited(lambda: weights.append(t.weights(ids[0], lengths, answer=s.answer))))
        sides = {}
        for side, sorts in TORCH.items():
            update = partial(t.update, ids[0], lengths, weights[-1] * self.advantages, by_length=sorts)
            seconds = shared_seconds + seconds_of(t.waited(update))
            padding = t.padding(lengths, s.prompt_tokens, by_length=sorts)
            sides[side] = ours._replace(seconds=seconds, occupancy=share_in_use(lengths), padding=padding)
        return sides


def bench_ragged_step(
    folder: Path,
    vocab: int,
    shapes: Ragged,
    *,
    repeats: int,
    compiled: Compilations,
    peak: Peak,
    against: TorchSettings | None,
) -> dict[str, Any]:
    """Measure every side in turn on ``repeats`` draws, for each credit method."""
    works = {name: RaggedIterations(folder, vocab, shapes, method) for name, method in CREDIT.items()}
    torch: dict[str, TorchIterations] = {}
    if against is not None:
        from oarjax.tools.bench.ragged_against import RaggedTorch

        short = np.full(shapes.rows, min(shapes.max_new, shapes.answer + 8), np.int32)
        for name, work in works.items():
            torch_side = RaggedTorch(folder, work.cfg, **against._asdict())
            torch[name] = TorchIterations(torch_side, work.ids, shapes, CREDIT[name])
            torch[name](TimedDraw(0.0, short, 0.0, 0.0, None))  # warm

    def draw(number: int) -> dict[str, dict[str, TimedDraw]]:
        draws = {}
        for name, work in works.items():
            draws[name] = {side: warm(partial(work, side, number), compiled) for side in work.sides}
            if name in torch:
                draws[name] |= torch[name](draws[name][OURS])
        return draws

    workload = "W10" if shapes.compared == BEFORE else "W11"
    name, shape = "ragged iteration", shape_text(shapes)
    return compare(draw, workload, name, shape, repeats=repeats, compiled=compiled, peak=peak)
