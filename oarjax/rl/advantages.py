"""Advantages beside the group's own: leave-one-out (RLOO), per reward (GDPO), and KL inside the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.rl.grpo import group_advantages, group_std, grouped_rewards, zero_variance_groups
from oarjax.rl.masked import masked_count, masked_mean, masked_sum, widened

AdvantageFunction = Callable[[Float[Array, "B"], dict[str, Float[Array, "B"]], int], Float[Array, "B"]]
"""(rewards, NaN where ungraded; values of each reward by name, unweighted; rows per group) -> advantages.

What ``advantage.function`` names. It is traced by jit: pure, with jax.numpy. Rows of a group are adjacent.
"""


def leave_one_out_advantages(
    rewards: Float[Array, "B"],
    *,
    group_size: int,
    scale: Literal["batch", "none"] = "none",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float[Array, "B"]:
    """Compute A_i = r_i - mean of the OTHER rewards of its group (RLOO, arXiv 2402.14740, eq. 8).

    ``batch`` then subtracts the mean of all advantages and divides by their std + eps. NaN rewards are left
    out of every mean and get 0, and so does a row whose group has no other graded one, or only equal rewards.

    Raises:
        ValueError: the number of rewards is not a multiple of group_size, or an unknown scale.
    """
    grouped = widened(grouped_rewards(rewards, group_size))
    graded = ~jnp.isnan(grouped)
    others = masked_count(graded)[:, None] - 1
    baseline = (masked_sum(grouped, graded)[:, None] - grouped) / jnp.maximum(others, 1)
    keep = (graded & (others > 0)).reshape(-1)
    advantages = (grouped - baseline).reshape(-1)
    constant = jnp.repeat(zero_variance_groups(rewards, group_size=group_size), group_size)
    advantages = jnp.where(constant, 0, advantages)
    if scale == "batch":
        advantages = (advantages - masked_mean(advantages, keep)) / (group_std(advantages, keep, ddof) + eps)
    elif scale != "none":
        raise ValueError(f"leave_one_out_advantages: scale must be batch or none, got {scale!r}")
    return jnp.where(keep, advantages, 0)


def weighted_group_advantages(
    values: Float[Array, "R B"],
    weights: Float[Array, "R"],
    *,
    group_size: int,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float[Array, "B"]:
    """Sum the group advantages of each reward with weights: A_i = sum_k weight_k (r_ik - mean_k) / (std_k + eps).

    A NaN value adds 0; for the settings see ``group_advantages``.
    """
    settings: dict[str, Any] = {"group_size": group_size, "scale": scale, "ddof": ddof, "eps": eps}
    each = jnp.stack([group_advantages(v, **settings) for v in values])
    return jnp.sum(weights[:, None] * each, axis=0)


def per_reward_advantages(
    values: Float[Array, "R B"],
    weights: Float[Array, "R"],
    *,
    group_size: int,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float[Array, "B"]:
    """Normalise each reward within its group, sum with weights, then normalise over the batch (GDPO, arXiv 2601.05242).

    Rewards on different scales, or with different rates of success, then count by their weights alone. A NaN value of
    one reward counts as 0 there; a row that no reward of a weight graded gets 0. Unlike the group's advantages the
    result is not zero in groups of equal sums: rewards that differ and cancel still teach.
    """
    graded = jnp.any(~jnp.isnan(values) & (weights != 0)[:, None], axis=0)
    total = jnp.where(graded, weighted_group_advantages(values, weights, group_size=group_size, ddof=ddof, eps=eps), 0)
    centred = (total - masked_mean(total, graded)) / (group_std(total, graded, ddof) + eps)
    return jnp.where(graded, centred, 0)


def reward_after_kl(
    rewards: Float[Array, "B"],
    behaviour_logps: Float[Array, "B T"],
    ref_logps: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
) -> Float[Array, "B"]:
    """Subtract beta * sum_t log(policy / reference) from the rewards (RLHF's reward, arXiv 2203.02155, eq. 2).

    The sum over the completion's tokens is the k1 estimate of the sequence's KL, in nats. NaN rewards stay NaN.
    """
    return rewards - beta * masked_sum(widened(behaviour_logps) - widened(ref_logps), mask)
