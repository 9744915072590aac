"""One iteration of training, top to bottom: the data path. Grading, logging and clocks come in as callables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.config import Config
from oarjax.credit.probe import ProbeMode, probe_mode
from oarjax.models.lora import all_params
from oarjax.rl.loss import without_truncated
from oarjax.rollout.sampler import rollout_key
from oarjax.step.fused import FusedRows
from oarjax.step.host_callbacks import HostCallbacks, PhaseRecord
from oarjax.step.loss import Sums, sampler_logps
from oarjax.step.metrics import NONFINITE, rollout_metrics, unsound_rows
from oarjax.step.minibatches import (
    MinibatchPlan,
    Piece,
    informative_first,
    join,
    join_grades,
    padding_share,
    sizes_of,
    take,
    widen,
    widest_prompt,
)
from oarjax.step.programs import Steps
from oarjax.types import (
    AnswerSpan,
    Evidence,
    Grades,
    Hints,
    Mean,
    Params,
    Rollout,
    Scores,
    TrainBatch,
    TrainState,
)

NOISE, ORDER = 2**31 - 1, 2**31 - 2
"""Batch numbers that no rollout has: the keys of OAR-G's noise and of the order of permuted weights."""

WAITING = "grade_wait"
"""The phase in which the device has nothing to do until the grades are there."""


class Iteration(NamedTuple):
    """Results of an iteration for the reports, row by row as drawn."""

    metrics: dict[str, float]
    rollout: Rollout
    span: AnswerSpan
    grades: Grades
    problems: np.ndarray  # [P]
    advantages: np.ndarray  # [B]
    weights: np.ndarray  # [B, T], 1 in rows that were left out


def iterate(
    state: TrainState, ref_params: Params | None, iteration: int, *, steps: Steps, host: HostCallbacks, cfg: Config
) -> tuple[TrainState, Iteration]:
    """Run one iteration: prompts -> rollouts -> rewards -> group advantages -> credit per token -> updated policy."""
    group = cfg.rollout.group_size
    capacity = cfg.rollout.prompts * group
    probe = probe_mode(
        iteration - 1,
        mode=cfg.credit.probe.mode,
        warmup_mode=cfg.credit.probe.warmup_mode,
        warmup_iterations=cfg.credit.probe.warmup_iterations,
    )
    noise_key, order_key = (rollout_key(state.key, step=iteration, batch=b) for b in (NOISE, ORDER))

    problems, rollout, grading, everything = draw(state, iteration, steps=steps, host=host, cfg=cfg)
    with host.phase("spans"):
        span = host.find_answers(rollout)
        probed = host.probed(rollout, span, problems) if host.probed else None
        if probed:
            length = rollout.completion.shape[1]
            span = replace(span, reasoning=probed[1].reasoning[:, :length], has_answer=probed[1].has_answer)
        hints = host.hints(rollout, problems) if host.hints else None

    # Which rows are worth scoring. Without skipping that needs no reward, so workers grade while the device scores.
    rows = np.arange(capacity)
    if cfg.update.skip_zero_variance:
        with host.phase(WAITING):
            rewards = grading().rewards
        constant = np.asarray(steps.equal_groups(jnp.asarray(rewards)))
        rows = np.flatnonzero(~np.repeat(constant, group))
    width = widest_prompt(cfg)
    step = host.prompt_step or cfg.rollout.prompt_bucket
    sizes = sizes_of(rollout, prompt_bucket=step, completion_bucket=cfg.rollout.completion_bucket)
    plan = MinibatchPlan(rows, cfg.update.minibatches, cfg.update.microbatch, capacity, sizes)
    numbers = np.arange(capacity, dtype=np.int32)
    arrays = widen(rollout, width), span, numbers, probed and (widen(probed[0], width), probed[1]), hints
    minibatches = [host.place(minibatch, "microbatches") for minibatch in plan.split(arrays)]
    if host.watch and (unsound := unsound_rows(rollout)).any():
        everyone = MinibatchPlan(numbers, 1, cfg.update.microbatch, capacity)
        ((r, s, n, instead, h),) = everyone.split((rollout, span, numbers, probed, hints))
        count = {f"{NONFINITE}behaviour_logps": Mean(jnp.float32(unsound.sum()), jnp.float32(capacity))}
        host.watch(
            PhaseRecord(
                "sample",
                iteration,
                0,
                count,
                state,
                probe,
                Evidence(r, s, n, jnp.asarray(everyone.used[0]), instead, hints=h),
            )
        )

    scores: list[Scores] = []
    if steps.fused_add is None:
        with host.phase("score"):
            reference = None if ref_params is None else host.load_reference(ref_params)
            scores = [
                score(steps, all_params(state), reference, *minibatch, pieces=pieces, key=noise_key, probe=probe)
                for minibatch, pieces in zip(minibatches, plan.pieces)
            ]
            jax.block_until_ready(scores)
            del reference  # the update needs the memory

    with host.phase(WAITING):
        grades = grading()
    graded = np.isfinite(grades.rewards)
    rewards = jnp.asarray(np.where(graded, grades.rewards, np.nan))
    if cfg.loss.kl_in == "reward":
        reference = plan.collect(
            host.fetch([each.ref_logps for each in scores]), np.zeros(rollout.completion.shape, np.float32)
        )
        rewards = steps.after_kl(rewards, rollout, reference)
    advantages = np.asarray(steps.advantages(rewards, grades.per_reward))
    # Ungraded rows teach nothing, and neither do truncated ones where the config says so.
    trained = rollout.completion & graded[:, None]
    if cfg.loss.mask_truncated:
        trained = np.asarray(without_truncated(jnp.asarray(trained), jnp.asarray(rollout.ended)))
    trains = [bool(trained[chosen].any()) for chosen in plan.chosen]
    # The mean is over all graded rows, trained on or not: leaving rows out changes the work, not the loss.
    denominator = steps.denominator(jnp.asarray(trained))
    gradients: list[Callable[[TrainState], Sums]] = []
    row_weights, records, metrics = [], [], {}
    with host.phase("credit" if scores else "update"):
        for k, arrays in enumerate(plan.split((advantages, trained))):
            a, completion = host.place(arrays, "microbatches")
            (r, s, n, instead, h), pieces = minibatches[k], plan.pieces[k]
            once = steps.fused(state, FusedRows(r, s, n, a, completion), pieces, (noise_key, order_key), probe=probe)
            if once is None:
                row_scores = scores[k]
                credit, measured = steps.credit(row_scores, r, s, a, completion, order_key, n, h, np.int32(iteration))
                weights, returned = credit.weights, credit.weights if credit.returned is None else credit.returned
                batch = TrainBatch(
                    tokens=r.tokens,
                    valid=r.valid,
                    completion=completion,
                    advantages=credit.advantages,
                    old_logps=row_scores.old_logps,
                    ref_logps=row_scores.ref_logps,
                    behaviour_logps=sampler_logps(cfg.loss, r),
                    teacher=h and h.teacher,
                    experts=r.experts,
                )
                gradients.append(partial(steps.sums, batch=batch, pieces=pieces))
            else:
                row_scores, weights, measured = Scores(importance=once.importance), once.weights, once.metrics
                returned = weights
                gradients.append(lambda _, sums=once.sums: sums)
            metrics = add_metrics(metrics, measured)
            row_weights.append(weights)
            used = jnp.asarray(plan.used[k])
            evidence = Evidence(r, s, n, used, instead, row_scores, a, completion, returned, denominator, h)
            records.append(PhaseRecord("credit", iteration, k, measured, state, probe, evidence))
            if host.watch:
                host.watch(records[k])

    updates = [0] * cfg.update.minibatches
    with host.phase("update"):
        for epoch in range(cfg.update.epochs):
            for k in np.random.default_rng((cfg.seed, iteration, epoch)).permutation(cfg.update.minibatches):
                if trains[k]:  # an update without a trained token would still move the weights
                    state, measured = steps.apply(state, gradients[k](state), denominator)
                    updates[k] += 1
                    metrics = add_metrics(metrics, measured)
                    if host.watch:
                        host.watch(records[k]._replace(phase="update", metrics=measured, state=state))
        jax.block_until_ready(state)

    weights = plan.collect(host.fetch(row_weights), np.ones(rollout.completion.shape, np.float32))
    measured = {name: float(mean.value) for name, mean in host.fetch(metrics).items() if mean.count > 0}
    measured |= rollout_metrics(*everything(), group_size=group) | steps.decoding()
    measured |= {"rows_used": float(len(rows)), "reasoning_length": float(span.reasoning.sum(1).mean())}
    scored = [int(bool(jax.tree.leaves(each))) for each in scores]
    for phase, times in (("score", scored), ("update", updates)):
        measured |= {f"padding_share/{phase}": padding_share(plan, rollout, times)} if any(times) else {}
    return state, Iteration(measured, rollout, span, grades, problems, advantages, weights)


def draw(
    state: TrainState, iteration: int, *, steps: Steps, host: HostCallbacks, cfg: Config
) -> tuple[np.ndarray, Rollout, Callable[[], Grades], Callable[[], tuple[Rollout, Grades]]]:
    """Sample groups and grade them as they end; refill groups of equal rewards from fresh prompts if asked to.

    Returns the problems [P], the rollout [P * G], the grades to wait for, and all that was drawn, for the log: groups
    picked for their unequal rewards would give a reward that no policy has.
    """
    group, wanted = cfg.rollout.group_size, cfg.rollout.prompts
    constant = np.ones(0, bool)
    drawn: list[tuple[np.ndarray, Rollout, Callable[[], Grades]]] = []
    with host.phase("sample"):
        params = steps.rollout_params(all_params(state))  # freed on return: scores and updates need the memory
    for attempt in range(1 + cfg.update.refills):
        with host.phase("sample"):
            prompts = host.next_prompts()
            submission = host.submit(prompts)
            early = {"report": submission.report} if submission.report else {}
            key = rollout_key(state.key, step=iteration, batch=attempt)
            rollout = host.fetch(steps.sample(params, host.place(prompts, "prompts"), key, **early))
        drawn.append((np.asarray(prompts.problem), rollout, submission.rest(rollout)))
        if cfg.update.refills == 0:
            return *drawn[0], lambda: (drawn[0][1], drawn[0][2]())
        with host.phase(WAITING):
            rewards = np.concatenate([grades().rewards for *_, grades in drawn])
        constant = np.asarray(steps.equal_groups(jnp.asarray(rewards)))
        if (~constant).sum() >= wanted:
            break
    rows = informative_first(constant, prompts=wanted, group_size=group)
    problems = np.concatenate([p for p, *_ in drawn])[rows[::group] // group]
    rollouts, parts = join([r for _, r, _ in drawn]), [g() for *_, g in drawn]
    grades, all_grades = join_grades(parts, rows), join_grades(parts, np.arange(len(rollouts.ended)))
    return problems, take(rollouts, rows), lambda: grades, lambda: (rollouts, all_grades)


def score(
    steps: Steps,
    params: Params,
    reference: Params | None,
    rollout: Rollout,
    span: AnswerSpan,
    numbers: Any,
    probed: tuple[Rollout, AnswerSpan] | None = None,
    hints: Hints | None = None,
    *,
    pieces: Sequence[Piece],
    key: Any,
    probe: ProbeMode,
) -> Scores:
    """Score a minibatch [M, b, ...] piece by piece, each padded to its own bucket."""
    parts = [
        steps.score(
            params,
            reference,
            rollout,
            span,
            numbers,
            p.stop,
            key,
            probed,
            p.start,
            hints,
            probe=probe,
            bucket=p.bucket,
        )
        for p in pieces
    ]
    return reduce(partial(jax.tree.map, jnp.add), parts)  # each is zero where the others are not


def add_metrics(a: dict[str, Mean], b: dict[str, Mean]) -> dict[str, Mean]:
    """Add the sums and counts of both, name by name."""
    return a | {name: a[name] + mean if name in a else mean for name, mean in b.items()}
