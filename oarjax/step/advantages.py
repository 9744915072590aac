"""Bind the advantages that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.config.learning import AdvantageConfig, GradingConfig, LossConfig
from oarjax.credit.resolved import ResolvedMethod
from oarjax.rl.advantages import (
    AdvantageFunction,
    PastRewards,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    per_reward_advantages,
    problem_advantages,
    reward_after_kl,
    zero_advantage_groups,
    zero_variance_groups,
)
from oarjax.rl.distillation import distillation_advantages
from oarjax.types import Rollout, Scores

Values = dict[str, Float[Array, "B"]]
"""Unweighted values of each reward, and of the overlong penalty."""

Advantages = Callable[[Float[Array, "B"], Values, PastRewards | None], Float[Array, "B"]]
"""(rewards, NaN where ungraded; values of each reward; past of the rows' problems) -> advantages."""


def bound_advantages(
    a: AdvantageConfig, grading: GradingConfig, *, group_size: int, custom: AdvantageFunction | None = None
) -> Advantages:
    """Return the advantages of ``advantage.method``, or the custom ones, with a run's settings."""

    def grpo(rewards: Float[Array, "B"], values: Values, past: PastRewards | None = None) -> Float[Array, "B"]:
        scale = "group" if a.scale == "problem" else a.scale  # refused with grpo, see config.rules
        return group_advantages(rewards, group_size=group_size, scale=scale, ddof=a.ddof, eps=a.eps)

    def rloo(rewards: Float[Array, "B"], values: Values, past: PastRewards | None = None) -> Float[Array, "B"]:
        scale = "none" if a.scale == "none" else "batch"
        return leave_one_out_advantages(rewards, group_size=group_size, scale=scale, ddof=a.ddof, eps=a.eps)

    def batch(rewards: Float[Array, "B"], values: Values, past: PastRewards | None = None) -> Float[Array, "B"]:
        scale = "none" if a.scale == "none" else "batch"
        return batch_advantages(rewards, leave_one_out=a.leave_one_out, scale=scale, ddof=a.ddof, eps=a.eps)

    def problem(rewards: Float[Array, "B"], values: Values, past: PastRewards | None = None) -> Float[Array, "B"]:
        scale = "batch" if a.scale == "group" else a.scale
        return problem_advantages(rewards, past, leave_one_out=a.leave_one_out, scale=scale, ddof=a.ddof, eps=a.eps)

    def gdpo(rewards: Float[Array, "B"], values: Values, past: PastRewards | None = None) -> Float[Array, "B"]:
        columns, weights = reward_columns(grading, rewards, values)
        scales = jnp.asarray(weights, float)
        return per_reward_advantages(columns.T, scales, group_size=group_size, ddof=a.ddof, eps=a.eps)

    if custom is None:
        return {"grpo": grpo, "rloo": rloo, "batch": batch, "problem": problem, "gdpo": gdpo}[a.method]
    return lambda rewards, values, past=None: jnp.where(jnp.isnan(rewards), 0, custom(rewards, values, group_size))


def bound_equal_groups(
    a: AdvantageConfig, *, group_size: int
) -> Callable[[Float[Array, "B"], PastRewards | None], Bool[Array, "P"]]:
    """Return a function (rewards, NaN where ungraded; past) -> the groups that these advantages leave at 0."""
    by_row = {"batch": lambda rewards, past: batch_advantages(rewards, scale="none")}
    by_row |= {"problem": lambda rewards, past: problem_advantages(rewards, past, scale="none")}

    def equal_groups(rewards: Float[Array, "B"], past: PastRewards | None = None) -> Bool[Array, "P"]:
        if a.method not in by_row or a.function is not None:
            return zero_variance_groups(rewards, group_size=group_size)
        return zero_advantage_groups(by_row[a.method](rewards, past), group_size=group_size)

    return equal_groups


def split_advantages(
    advantages: Float[Array, "B T"],
    late: Float[Array, "B"],
    answer: Bool[Array, "B T"],
    completion: Bool[Array, "B T"],
    ended: Bool[Array, "B"],
) -> Float[Array, "B T"]:
    """Give the answer's tokens and those after it ``late``; of a row without an answer the stop token alone.

    With p the probability of the one accepted answer given all before it, E[R | that] = p: the reasoning's tokens are
    credited with p less a baseline and these with R - p, whose sum is unbiased. A row that was cut off keeps its own.
    """
    continues = jnp.pad(completion[:, 1:], ((0, 0), (0, 1)))
    stop = completion & ~continues & ended[:, None]
    from_answer = jnp.where(jnp.any(answer, axis=1, keepdims=True), jnp.cumsum(answer, axis=1) > 0, stop)
    return jnp.where(from_answer & completion, late[:, None], advantages)


def row_advantages(
    a: AdvantageConfig, grading: GradingConfig, credit: ResolvedMethod, *, group_size: int
) -> Advantages | None:
    """Return the advantages of a method of kind sequence; None for the others."""
    if credit.method.advantage is None:
        return None
    function = credit.method.advantage
    settings = {"group_size": group_size, "scale": a.scale, "ddof": a.ddof, "eps": a.eps}

    def advantages(rewards: Float[Array, "B"], values: Values, past: PastRewards | None = None) -> Float[Array, "B"]:
        return function(*reward_columns(grading, rewards, values), **settings)

    return advantages


def reward_columns(
    grading: GradingConfig, rewards: Float[Array, "B"], values: Values
) -> tuple[Float[Array, "B K"], list[float]]:
    """Return the value of each reward in a column, NaN in rows without a reward, and the weights of the columns."""
    weights = {reward.name: reward.weight for reward in grading.rewards} | {"overlong": 1.0}
    names = [name for name in weights if name in values]
    columns = jnp.stack([jnp.where(jnp.isfinite(rewards), values[name], jnp.nan) for name in names], axis=1)
    return columns, [weights[name] for name in names]


def taught_advantages(
    advantages: Float[Array, "B T"], completion: Bool[Array, "B T"], scores: Scores, loss: LossConfig
) -> Float[Array, "B T"]:
    """Add what the reference says of each token, where ``loss.kl_in`` is token."""
    if loss.kl_in != "token":
        return advantages
    logps: Any = scores.old_logps, scores.ref_logps  # such a loss has had both computed
    policy_logps, ref_logps = (jnp.where(completion, x, 0) for x in logps)
    return advantages + distillation_advantages(policy_logps, ref_logps, weight=loss.kl_beta)


def bound_kl_penalty(
    beta: float,
) -> Callable[[Float[Array, "B"], Rollout, Float[Array, "B T"]], Float[Array, "B"]]:
    """Return a function (rewards, rollout, reference log-probs) -> rewards minus the KL term of ``loss.kl_in``."""
    subtract_kl = partial(reward_after_kl, beta=beta)

    def penalise(rewards: Float[Array, "B"], rollout: Rollout, ref_logps: Float[Array, "B T"]) -> Float[Array, "B"]:
        return subtract_kl(rewards, rollout.behaviour_logps, ref_logps, rollout.completion)

    return penalise
