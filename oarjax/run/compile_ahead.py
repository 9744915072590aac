"""Compile every device program that a run may use, or read it from the cache, before its first iteration.

Prompts of such a run are padded to one width, so that only the number of decoded rows, the slots of their cache, and
the completion positions of a microbatch vary. A run whose programs are known compiles nothing after its first
iteration, and a program that does not fit fails at once: the largest come first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from oarjax.credit.probe import ProbeMode
from oarjax.models.lora import all_params
from oarjax.rl.advantages import PastRewards
from oarjax.rollout.sampler import rollout_key
from oarjax.run.run import Run
from oarjax.run.shapes import PhaseProgram, ProgramShapes
from oarjax.step.minibatches import Bucket, buckets
from oarjax.types import PromptBatch, TrainState


def compile_known(run: Run, state: TrainState, console: Console) -> int:
    """Compile every program; return their number.

    Several are compiled at once if there are cores for it: the compiler works outside Python's lock, and takes 1 to 2
    GiB each for a large policy. Those of rollouts are then called on prompts of padding, and decode nothing.
    """
    shapes = ProgramShapes(run)
    known = sorted(by_length(shapes), key=lambda program: -program.static["bucket"].completion)
    known += [program for program in shapes.programs() if program.phase in ("credit", "apply")]
    with console.status("compiling every program of the run, or reading it from the cache"):
        compile_all([program.lower() for program in known])
        count = len(known) + _call_samplers(run, state) + _call_small(shapes)
    console.print(f"{count} programs are compiled; none will be later")
    return count


def compiled_at_once(cores: int) -> int:
    """Return the programs that a process on so many cores compiles at a time: a quarter of them, 1 to 8."""
    return max(1, min(8, cores // 4))


def compile_all(lowered: Sequence[Any]) -> None:
    """Compile lowered programs in threads."""
    with ThreadPoolExecutor(compiled_at_once(os.cpu_count() or 1)) as pool:
        for waiting in [pool.submit(each.compile) for each in lowered]:
            waiting.result()


def by_length(shapes: ProgramShapes) -> Iterator[PhaseProgram]:
    """List the programs of scores and updates, or of both in one, for every number of completion positions."""
    cfg = shapes.cfg.credit.probe
    modes: set[ProbeMode] = {cfg.mode, cfg.warmup_mode} if cfg.warmup_iterations > 0 else {cfg.mode}
    for program in shapes.learning_programs():
        if "bucket" not in program.static:
            continue
        largest: Bucket = program.static["bucket"]
        for probe in [{"probe": mode} for mode in sorted(modes)] if "probe" in program.static else [{}]:
            for length in buckets(shapes.cfg.rollout.completion_bucket, largest.completion):
                yield program._replace(static=probe | {"bucket": Bucket(largest.prompt, length)})


def _call_samplers(run: Run, state: TrainState) -> int:
    """Call every program of rollouts and, with data.eval, of evaluations."""
    params, key = run.steps.rollout_params(all_params(state)), rollout_key(state.key, step=0, batch=0)
    samplers: list[tuple[Any, int, Any]] = [(run.steps.sample, run.cfg.rollout.prompts, key)]
    if run.cfg.data.eval is not None:
        samplers.append((run.steps.evaluate, run.cfg.eval.batch, jax.random.key(run.cfg.seed)))
    width, called = run.prompt_step, 0
    for sampler, count, own in samplers:
        prompts = run.place(_padding(count, width, pad_id=run.pad_id), "prompts")
        called += sampler.warm_up(params, prompts, own, compile_all=compile_all)
    return called


def _padding(count: int, width: int, *, pad_id: int) -> PromptBatch:
    """Return prompts of one token behind padding."""
    tokens: Any = np.full((count, width), pad_id, np.int32)
    valid: Any = np.broadcast_to(np.arange(width) == width - 1, tokens.shape).copy()
    numbers: Any = np.arange(count, dtype=np.int32)
    return PromptBatch(tokens, valid, numbers)


def _call_small(shapes: ProgramShapes) -> int:
    """Call the small programs: advantages, denominators, and the sum of scores of several buckets."""
    steps, cfg = shapes.steps, shapes.cfg
    rows = cfg.rollout.prompts * cfg.rollout.group_size
    rewards = jnp.zeros((rows,), jnp.float32)
    names = [*(reward.name for reward in cfg.grading.rewards), *(["overlong"] if cfg.grading.overlong_window else [])]
    zeros = np.zeros(rows, np.float32)
    past: Any = PastRewards(zeros > 0, zeros, zeros) if cfg.advantage.method == "problem" else None  # pyright: ignore[reportArgumentType]
    steps.advantages(rewards, dict.fromkeys(names, zeros), past)
    steps.equal_groups(rewards, past)
    steps.denominator(jnp.zeros((rows, cfg.rollout.max_new), bool))
    *others, last = shapes.learning_programs()
    if steps.fused_zeros is None:
        steps.zeros.lower(*last.args[1:3]).compile()
    else:
        steps.fused_zeros.lower(*last.args[1:4]).compile()
    for shape in jax.tree.leaves([program.args[0] for program in others if program.phase == "credit"]):
        empty = jax.jit(lambda s=shape: jnp.zeros(s.shape, s.dtype), out_shardings=shape.sharding)()
        jnp.add(empty, empty)
    return 4
