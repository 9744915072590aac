"""Compile every device program that a run may use, or read it from the cache, while its first iterations run.

Prompts of such a run are padded to one width, so that only the number of decoded rows, the slots of their cache, and
the completion positions of a microbatch vary. What the first iteration needs comes first; a call waits for its program.
A run whose programs are known compiles nothing later, and a program that does not fit is an error at the next phase.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.credit.probe import ProbeMode
from oarjax.rl.advantages import PastRewards
from oarjax.run.memory import fitting
from oarjax.run.run import Run
from oarjax.run.shapes import PhaseProgram, ProgramShapes
from oarjax.step.minibatches import Bucket, completion_buckets
from oarjax.system.background import Background, awaited

LEARNING = ("zeros", "accumulate", "apply", "score", "credit", "fused_zeros", "fused_add")
"""Device programs of ``Steps`` that wait for their compilation."""
MOST_THREADS = 16
"""Programs compiled at a time, at most."""


@contextmanager
def compiled_ahead(run: Run, *, evaluates_first: bool, warm_start: bool = False) -> Iterator[Background | None]:
    """Compile every program of a run while the block lasts, if the config asks for it.

    As many at once as a quarter of the cores: each takes 1 to 2 GiB for a large policy. Of several processes with GPUs
    none does: they tune a program together, which takes all of them in one order.

    Args:
        evaluates_first: the run begins with an evaluation.
        warm_start: a warm start comes first. With fewer than 8 cores nothing is begun until whoever runs it calls
            ``start``, after its first step: its own programs would be compiled half as fast.
    """
    gpu_processes = jax.process_count() > 1 and run.mesh.devices.flat[0].platform == "gpu"
    if not run.compiles_ahead or gpu_processes:
        yield None
        return
    threads = compiled_at_once(os.cpu_count() or 1)
    with Background(threads=threads) as background:
        _collect(run, background, evaluates_first=evaluates_first)
        if threads > 1 or not warm_start:
            background.start()
        yield background


def _collect(run: Run, background: Background, *, evaluates_first: bool) -> None:
    steps = run.steps
    wrapped = {name: awaited(jitted) for name in LEARNING if (jitted := getattr(steps, name)) is not None}
    vars(run)["steps"] = steps._replace(**wrapped)
    plays = run.cfg.rollout.environment is not None
    draws = steps.sample if run.apart is None else run.apart.sample
    for sampler in (draws, steps.evaluate, *((steps.sample_on, steps.evaluate_on) if plays else ())):
        if sampler is not None:
            sampler.wrap_programs(awaited)
    shapes = ProgramShapes(run)
    for program in in_order(shapes, evaluates_first=evaluates_first):
        guard = partial(fitting, shapes, program.phase)
        background.add(program.jitted, program.args, program.static, guard)
    _call_small(shapes)
    run.console.print(f"{len(background)} programs are compiled, or read from the cache, while the run begins")


def compiled_at_once(cores: int) -> int:
    """Return the programs that a process on so many cores compiles at a time: a quarter of them, 1 to 16."""
    return max(1, min(MOST_THREADS, cores // 4))


def in_order(shapes: ProgramShapes, *, evaluates_first: bool) -> Iterator[PhaseProgram]:
    """List the programs as a run needs them, but first the longest of the update: no other takes as long to compile."""
    learning = sorted(by_length(shapes), key=lambda program: -program.static["bucket"].completion)
    longest = learning[0].static["bucket"].completion
    *scoring, update = shapes.learning_programs()
    evaluation = [] if shapes.cfg.data.eval is None else shapes.every_sampling_program("evaluate")
    yield from (program for program in learning if program.static["bucket"].completion == longest)
    yield from (program for program, _ in evaluation if evaluates_first)
    if not shapes.cfg.rollout.outside:
        yield from (program for program, _ in shapes.every_sampling_program("sample"))
    steps = shapes.steps
    if steps.fused_zeros is None:
        yield update._replace(jitted=steps.zeros, args=update.args[1:3], static={})
    else:
        yield update._replace(jitted=steps.fused_zeros, args=update.args[1:4], static={})
    yield from (program for program in scoring if program.phase == "credit")
    yield shapes.apply_program()
    yield from (program for program in learning if program.static["bucket"].completion < longest)
    yield from (program for program, _ in evaluation if not evaluates_first)


def by_length(shapes: ProgramShapes) -> Iterator[PhaseProgram]:
    """List the programs of scores and updates, or of both in one, for every number of completion positions."""
    cfg = shapes.cfg.credit.probe
    modes: set[ProbeMode] = {cfg.mode, cfg.warmup_mode} if cfg.warmup_iterations > 0 else {cfg.mode}
    for program in shapes.learning_programs():
        if "bucket" not in program.static:
            continue
        largest: Bucket = program.static["bucket"]
        for probe in [{"probe": mode} for mode in sorted(modes)] if "probe" in program.static else [{}]:
            for length in completion_buckets(shapes.cfg.rollout.completion_bucket, largest.completion):
                yield program._replace(static=probe | {"bucket": largest._replace(completion=length)})


def _call_small(shapes: ProgramShapes) -> None:
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
    programs = shapes.learning_programs()[:-1]
    for shape in jax.tree.leaves([program.args[0] for program in programs if program.phase == "credit"]):
        scores = jax.jit(lambda s=shape: jnp.zeros(s.shape, s.dtype), out_shardings=shape.sharding)()
        jnp.add(scores, scores)
