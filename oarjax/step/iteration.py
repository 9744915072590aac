"""One iteration of training, top to bottom: the data path. Grading, logging and clocks come in as callables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.config.learning import OffPolicyConfig, RolloutConfig, UpdateConfig
from oarjax.config.schema import Config
from oarjax.credit.probe import probe_mode
from oarjax.credit.settings import ProbeSettings
from oarjax.models.lora import all_params
from oarjax.rl.advantages import PastRewards, group_std
from oarjax.rl.loss import without_truncated
from oarjax.rollout.sampler import rollout_key
from oarjax.rollout.source import Batch, SamplerSource, Source, Spent, requested, rollout_of
from oarjax.step.host_callbacks import HostCallbacks
from oarjax.step.learning import Credited, Minibatch, OnePass, Purpose, TwoPasses, Watched
from oarjax.step.loss import GAP_COUNTS, Metrics, gap_metrics
from oarjax.step.metrics import lag_of, rollout_metrics, span_metrics
from oarjax.step.minibatches import (
    MinibatchPlan,
    informative_first,
    join,
    join_grades,
    padding_share,
    sizes_of,
    take,
    widest_prompt,
)
from oarjax.step.sampling import batch_of_iteration
from oarjax.step.steps import Steps
from oarjax.types import (
    AnswerSpan,
    GradedRows,
    Grades,
    Mean,
    Params,
    PromptBatch,
    Rollout,
    SampledRows,
    Scores,
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
    drawn: DrawnGroups  # refilled groups too


def iterate(
    state: TrainState, reference: Params | None, iteration: int, *, steps: Steps, host: HostCallbacks, cfg: Config
) -> tuple[TrainState, Iteration]:
    """Run one iteration: prompts -> rollouts -> rewards -> group advantages -> credit per token -> updated policy.

    Args:
        state: of training; its memory is taken.
        reference: its params; None where no KL needs them.
        iteration: number, from 1.
        steps: the programs, from ``make_steps``.
        host: prompts, grades and clocks.
        cfg: of the run.
    """
    learner = learner_of(state, iteration, steps, host, probe=cfg.credit.probe, off_policy=cfg.loss.off_policy)

    # Prompts -> rollouts, which are being graded -> what a credit method reads of them.
    draws = draw(state, iteration, steps=steps, host=host, rollout=cfg.rollout, refills=cfg.update.refills)
    with host.phase("spans"):
        rows = read_rows(draws, host)

    # Rollouts -> minibatches of the rows that are worth it -> their scores, while workers grade.
    plan = plan_minibatches(
        rows.rollout,
        unequal_rows(draws, steps, host) if cfg.update.skip_zero_variance else every_row(draws),
        cfg.update,
        cfg.rollout,
        prompt_step=host.prompt_step,
        prompt_rows=steps.prompt_rows,
    )
    minibatches = learner.divide(state, rows, plan, width=widest_prompt(cfg.data, cfg.rollout))
    scores = learner.score(state, reference, minibatches)

    # Grades -> rewards -> group advantages.
    with host.phase(WAITING):
        grades = draws.grades()
    rewards = reward_rows(grades, scores, rows.rollout, plan, steps, host, cfg.loss.kl_in, cfg.advantage.soft)
    graded = grade_rows(
        steps.advantages(rewards.compared, grades.per_reward, past_of(draws, host)),
        rows.rollout,
        grades,
        mask_truncated=cfg.loss.mask_truncated,
        scale=reward_std(rewards.compared, cfg.advantage.ddof) if steps.values else None,
        late=rewards.graded - rewards.compared if cfg.advantage.soft == "split" else None,
    )

    # Group advantages -> credit of every token. The loss is a mean over all graded rows, chosen or not: leaving rows
    # out changes the work, not the loss.
    denominator = steps.denominator(jnp.asarray(graded.completion))
    with host.phase(learner.credit_phase):
        credited = [
            learner.credit(state, minibatch, row_scores, its_grades, denominator)
            for minibatch, row_scores, its_grades in zip(minibatches, scores, plan.split(graded), strict=True)
        ]

    # Credit -> updated policy.
    order = update_order(credited, epochs=cfg.update.epochs, seed=(cfg.seed, iteration))
    with host.phase("update"):
        state, updates = update_policy(state, learner, [(minibatches[k], credited[k]) for k in order])

    metrics = measure_learning([*(c.metrics for c in credited), *updates], host)
    metrics |= measure_rollouts(draws, iteration if cfg.update.lag else None)
    metrics |= {"rows_used": float(len(plan.rows))} | span_metrics(rows.span)
    metrics |= soft_metrics(rewards, cfg.advantage.soft) | padding_shares(plan, rows.rollout, scores, order)
    return state, Iteration(
        metrics=metrics,
        rollout=draws.rollout,
        span=rows.span,
        grades=grades,
        problems=draws.problems,
        advantages=np.asarray(graded.advantages),
        weights=collect_weights(credited, rows.rollout, plan, host),
        drawn=draws.all_drawn(),
    )


def learner_of(
    state: TrainState,
    iteration: int,
    steps: Steps,
    host: HostCallbacks,
    *,
    probe: ProbeSettings,
    off_policy: OffPolicyConfig,
) -> TwoPasses:
    """Return how an iteration learns: in one pass or two, and watched if the host asks."""
    mode = probe_mode(
        iteration - 1, mode=probe.mode, warmup_mode=probe.warmup_mode, warmup_iterations=probe.warmup_iterations
    )
    noise_key, order_key = (rollout_key(state.key, step=iteration, batch=batch) for batch in (NOISE, ORDER))
    kind = TwoPasses if steps.fused_add is None else OnePass
    learner = kind(steps, host, Purpose(iteration, mode, noise_key, order_key), off_policy)
    return learner if host.watch is None else Watched(learner, host.watch)


# Rollouts ----------------------------------------------------------------------------------------------------------


class DrawnGroups(NamedTuple):
    """All groups that an iteration drew, in order, with their grades."""

    problems: np.ndarray  # [Q]
    rollout: Rollout
    grades: Grades
    equal: Bool[np.ndarray, "Q"]  # no gradient


class Draws(NamedTuple):
    """Groups of rollouts, and their grades once they are there."""

    problems: np.ndarray  # [P]
    rollout: Rollout
    grades: Callable[[], Grades]
    all_drawn: Callable[[], DrawnGroups]
    # for the log: groups picked for their unequal rewards would give a reward that no policy has
    spent: Spent = Spent()


def draw(
    state: TrainState, iteration: int, *, steps: Steps, host: HostCallbacks, rollout: RolloutConfig, refills: int
) -> Draws:
    """Sample groups and grade them as they end; refill groups of equal rewards from fresh prompts if asked to."""

    def place(prompts: PromptBatch) -> PromptBatch:
        return host.place(prompts, "prompts")

    sampler = SamplerSource(steps.sample, steps.decoding, steps.rollout_params, place, host.fetch, steps.sample_on)
    with closing(sampler):  # scores and updates need the memory of its params
        source = host.source(sampler)
        with host.phase("sample"):
            source.sync(all_params(state), iteration - 1)
        draws = draw_groups(source, state.key, iteration, steps=steps, host=host, rollout=rollout, refills=refills)
        return draws._replace(spent=source.spent())


def draw_groups(
    source: Source,
    root: Key[Array, ""],
    iteration: int,
    *,
    steps: Steps,
    host: HostCallbacks,
    rollout: RolloutConfig,
    refills: int,
) -> Draws:
    """Draw the groups of an iteration from a source; see ``draw``."""
    attempts: list[Draws] = []
    equal = np.ones(0, bool)
    for attempt in range(1 + refills):
        batch_of = partial(batch_of_iteration, root, iteration, attempt=attempt, rollout=rollout)
        attempts.append(sample_groups(source, batch_of, steps=steps, host=host))
        if refills == 0:
            return attempts[0]
        with host.phase(WAITING):
            equal = np.concatenate([equal, equal_groups(attempts[-1], steps, host)])
        if (~equal).sum() >= rollout.prompts:
            break
    rows = informative_first(equal, prompts=rollout.prompts, group_size=rollout.group_size)
    groups = rows[:: rollout.group_size] // rollout.group_size
    rollouts, grades = join([draws.rollout for draws in attempts]), [draws.grades() for draws in attempts]
    chosen_grades, all_grades = join_grades(grades, rows), join_grades(grades, np.arange(len(rollouts.ended)))
    problems = np.concatenate([draws.problems for draws in attempts])
    return Draws(
        problems[groups],
        take(rollouts, rows),
        lambda: chosen_grades,
        lambda: DrawnGroups(problems, rollouts, all_grades, equal),
    )


def sample_groups(
    source: Source, batch_of: Callable[[PromptBatch], Batch], *, steps: Steps, host: HostCallbacks
) -> Draws:
    """Draw the groups of one batch of prompts, and have them graded."""
    with host.phase("sample"):
        prompts = host.next_prompts()
        submission, batch = host.submit(prompts), batch_of(prompts)
        turns = source.draw(batch, submission.report)
        rollout = rollout_of(batch, requested(batch, turns), pad_id=steps.pad_id)
    grades = submission.rest(rollout)

    @cache  # read for the metrics and for the history of rewards
    def all_drawn() -> DrawnGroups:
        return DrawnGroups(draws.problems, rollout, grades(), equal_groups(draws, steps, host))

    draws = Draws(np.asarray(prompts.problem), rollout, grades, all_drawn)
    return draws


def equal_groups(draws: Draws, steps: Steps, host: HostCallbacks) -> Bool[np.ndarray, "Q"]:
    """Mark the groups of one batch whose rewards give no gradient."""
    return np.asarray(steps.equal_groups(jnp.asarray(draws.grades().rewards), past_of(draws, host)))


def past_of(draws: Draws, host: HostCallbacks) -> PastRewards | None:
    """Return the earlier rewards of the rows' problems, if the host keeps them."""
    if host.past is None:
        return None
    return host.past(np.repeat(draws.problems, len(draws.rollout.ended) // len(draws.problems)))


def read_rows(draws: Draws, host: HostCallbacks) -> SampledRows:
    """Find the answers of rollouts, and what else a credit method reads of them on the host."""
    rollout, problems = replace(draws.rollout, origin=None), draws.problems  # no program reads where rows come from
    span = host.find_answers(draws.rollout)
    probed = host.probed(rollout, span, problems) if host.probed else None
    if probed:
        length = rollout.completion.shape[1]
        span = replace(span, reasoning=probed[1].reasoning[:, :length], has_answer=probed[1].has_answer)
    hints = host.hints(draws.rollout, problems) if host.hints else None
    numbers = np.arange(len(rollout.ended), dtype=np.int32)
    return SampledRows(rollout, span, numbers, probed, hints)  # pyright: ignore[reportArgumentType]


def unequal_rows(draws: Draws, steps: Steps, host: HostCallbacks) -> Int[np.ndarray, "R"]:
    """Wait for the grades, and return the rows of groups with unequal rewards: the others have no gradient."""
    with host.phase(WAITING):
        equal = equal_groups(draws, steps, host)
    return np.flatnonzero(~np.repeat(equal, len(draws.rollout.ended) // len(equal)))


def every_row(draws: Draws) -> Int[np.ndarray, "B"]:
    """Return all rows: no reward is needed to choose them, so workers grade while the device scores."""
    return np.arange(len(draws.rollout.ended))


def plan_minibatches(
    rollout: Rollout,
    chosen: Int[np.ndarray, "R"],
    update: UpdateConfig,
    lengths: RolloutConfig,
    *,
    prompt_step: int | None,
    prompt_rows: int,
) -> MinibatchPlan:
    """Plan the minibatches of the chosen rows, sorted by length, so many rows of one group together."""
    step = prompt_step or lengths.prompt_bucket
    sizes = sizes_of(rollout, prompt_bucket=step, completion_bucket=lengths.completion_bucket)
    shapes = update.minibatches, update.microbatch, len(rollout.ended)
    return MinibatchPlan(chosen, *shapes, sizes, prompt_rows, lengths.group_size)


# Rewards and credit ------------------------------------------------------------------------------------------------


class RowRewards(NamedTuple):
    """Rewards of the rows, NaN where ungraded; the two differ where rewards are soft."""

    compared: Float[Array, "B"]  # by the advantages
    graded: Float[Array, "B"]


def reward_rows(
    grades: Grades,
    scores: list[Scores],
    rollout: Rollout,
    plan: MinibatchPlan,
    steps: Steps,
    host: HostCallbacks,
    kl_in: str,
    soft: str,
) -> RowRewards:
    """Return the rewards of the rows."""
    hard = jnp.asarray(np.where(np.isfinite(grades.rewards), grades.rewards, np.nan))
    if kl_in == "reward":
        hard = steps.after_kl(hard, rollout, collect_reference(scores, rollout, plan, host))
    return RowRewards(hard if soft == "off" else soft_rewards(hard, collect_outcomes(scores, plan, host)), hard)


def soft_metrics(rewards: RowRewards, soft: str) -> dict[str, float]:
    """Return the mean of soft rewards, and of their difference to the grades; nothing where rewards are not soft."""
    if soft == "off":
        return {}
    gap = rewards.compared - rewards.graded
    return {"soft_reward": float(jnp.nanmean(rewards.compared)), "soft_gap": float(jnp.nanmean(gap))}


def soft_rewards(rewards: Float[Array, "B"], outcome: Float[np.ndarray, "B"]) -> Float[Array, "B"]:
    """Return the probability of the reference answer for the rows that were graded, NaN for the others."""
    return jnp.where(jnp.isnan(rewards), rewards, jnp.asarray(outcome))


def collect_outcomes(scores: list[Scores], plan: MinibatchPlan, host: HostCallbacks) -> Float[np.ndarray, "B"]:
    """Collect the probabilities of the reference answer of all rows, which all were scored."""
    columns = [np.asarray(x)[..., None] for x in host.fetch([s.outcome for s in scores])]
    return plan.collect(columns, np.zeros((plan.capacity, 1), np.float32))[:, 0]


def reward_std(rewards: Float[Array, "B"], ddof: int) -> float:
    """Return the standard deviation of all rewards that were graded; 0 for ddof or fewer of them."""
    return float(group_std(rewards, ~jnp.isnan(rewards), ddof))


def grade_rows(
    advantages: Float[Array, "B"],
    rollout: Rollout,
    grades: Grades,
    *,
    mask_truncated: bool,
    scale: float | None = None,
    late: Float[Array, "B"] | None = None,
) -> GradedRows:
    """Put the tokens in the loss beside the advantages, on the host: graded rows, without truncated ones if asked."""
    completion = rollout.completion & np.isfinite(grades.rewards)[:, None]
    if mask_truncated:
        completion = without_truncated(jnp.asarray(completion), jnp.asarray(rollout.ended))
    row_scale: Any = None if scale is None else np.full(len(completion), scale, np.float32)
    row_late: Any = None if late is None else np.nan_to_num(np.asarray(late))
    return GradedRows(np.asarray(advantages), np.asarray(completion), row_scale, row_late)  # pyright: ignore[reportArgumentType]


def collect_reference(
    scores: list[Scores], rollout: Rollout, plan: MinibatchPlan, host: HostCallbacks
) -> Float[np.ndarray, "B T"]:
    """Collect the reference log-probs of all rows; 0 in those that were not scored."""
    return plan.collect(host.fetch([s.ref_logps for s in scores]), np.zeros(rollout.completion.shape, np.float32))


def collect_weights(
    credited: list[Credited], rollout: Rollout, plan: MinibatchPlan, host: HostCallbacks
) -> Float[np.ndarray, "B T"]:
    """Collect the weights of all rows; 1 in those that were left out."""
    return plan.collect(host.fetch([c.weights for c in credited]), np.ones(rollout.completion.shape, np.float32))


# Updates -----------------------------------------------------------------------------------------------------------


def update_order(credited: list[Credited], *, epochs: int, seed: tuple[int, int]) -> list[int]:
    """Return the minibatches in the order of their updates, reshuffled every epoch.

    One without a trained token has no update: momentum and weight decay would still move the weights.
    """
    orders = [np.random.default_rng((*seed, epoch)).permutation(len(credited)) for epoch in range(epochs)]
    return [int(k) for order in orders for k in order if credited[k].trains]


def update_policy(
    state: TrainState, learner: TwoPasses, minibatches: list[tuple[Minibatch, Credited]]
) -> tuple[TrainState, list[Metrics]]:
    """Make one optimizer update per entry, in turn."""
    updates = []
    for minibatch, credited in minibatches:
        state, metrics = learner.update(state, minibatch, credited)
        updates.append(metrics)
    return jax.block_until_ready(state), updates


# Metrics -----------------------------------------------------------------------------------------------------------


def measure_rollouts(draws: Draws, iteration: int | None) -> dict[str, float]:
    """Measure all groups that were drawn, refilled ones too, and what decoding them took; the lag in an iteration."""
    groups = draws.all_drawn()
    lag = {} if iteration is None else {"lag": lag_of(groups.rollout, iteration)}
    return lag | rollout_metrics(groups.rollout, groups.grades, equal=groups.equal) | draws.spent.metrics()


def measure_learning(parts: list[Metrics], host: HostCallbacks) -> dict[str, float]:
    """Return the means over minibatches and updates, of what occurred at all."""
    totals: Metrics = host.fetch(reduce(add_metrics, parts, {}))
    counts = totals.pop(GAP_COUNTS, None)
    return {name: float(mean.value) for name, mean in totals.items() if mean.count > 0} | gap_metrics(counts)


def add_metrics(a: dict[str, Mean], b: dict[str, Mean]) -> dict[str, Mean]:
    """Add the sums and counts of both, name by name."""
    return a | {name: a[name] + mean if name in a else mean for name, mean in b.items()}


def padding_shares(plan: MinibatchPlan, rollout: Rollout, scores: list[Scores], order: list[int]) -> dict[str, float]:
    """Return the shares of padding of what was scored and of what was updated, each if there was any."""
    times = {"score": [len(jax.tree.leaves(s)) > 0 for s in scores]}
    times |= {"update": [order.count(k) for k in range(plan.minibatches)]}
    return {f"padding_share/{name}": padding_share(plan, rollout, t) for name, t in times.items() if any(t)}
