"""Advantages of a row from its rewards: against its group (GRPO), the others (RLOO), the batch, its problem's past.

Also GDPO's, each reward normalised on its own.

GRPO: arXiv 2402.03300; Dr. GRPO: 2503.20783; DAPO: 2503.14476. Rows of a group are adjacent; NaN = not graded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.rl.checked import ScalarRate, checked
from oarjax.rl.masked import masked_count, masked_max, masked_mean, masked_min, masked_sum, widened
from oarjax.rl.ranges import Count, Positive

AdvantageFunction = Callable[[Float[Array, "B"], dict[str, Float[Array, "B"]], int], Float[Array, "B"]]
"""(rewards, NaN where ungraded; values of each reward by name, unweighted; rows per group) -> advantages.

What ``advantage.function`` names. It is traced by jit: pure, with jax.numpy. Rows of a group are adjacent.
"""


class PastRewards(NamedTuple):
    """Rewards of the rows' problems in earlier iterations; zeros where a problem has none."""

    seen: Bool[Array, "B"]
    mean: Float[Array, "B"]
    std: Float[Array, "B"]


def zero_variance_groups(rewards: Float[Array, "B"], *, group_size: int) -> Bool[Array, "P"]:
    """Mark groups without a learning signal: all graded rewards equal, or fewer than two graded. NaN = not graded."""
    grouped = grouped_rewards(rewards, group_size, of="zero_variance_groups")
    graded = ~jnp.isnan(grouped)
    return masked_max(grouped, graded) <= masked_min(grouped, graded)


def zero_advantage_groups(advantages: Float[Array, "B"], *, group_size: int) -> Bool[Array, "P"]:
    """Mark groups without a learning signal by their advantages: all of them 0."""
    return jnp.all(grouped_rewards(advantages, group_size, of="zero_advantage_groups") == 0, axis=-1)


@checked
def group_advantages(
    rewards: Float[Array, "B"],
    *,
    group_size: Positive,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: Count = 1,
    eps: ScalarRate = 1e-4,
) -> Float[Array, "B"]:
    """Compute A_i = (r_i - mean of its group) / (std + eps) (GRPO, arXiv 2402.03300, section 4.1.2).

    A NaN reward is left out of every mean and std and gets 0: mask its row out of the loss. A group of equal rewards
    gets exactly 0, however its mean is rounded. The std of ddof or fewer rewards is 0.

    Args:
        rewards: of B rows; the rows of a group are adjacent. NaN = not graded.
        group_size: rows per group, >= 1; B is a multiple of it.
        scale: ``group`` divides by the group's std (GRPO), ``batch`` by the std of all rewards about their common
            mean, ``none`` by nothing (Dr. GRPO, arXiv 2503.20783); default group.
        ddof: subtracted from the number of rewards in the std: 1 the sample's, 0 the population's; default 1, as TRL.
        eps: added to the std, >= 0; default 0.0001, as TRL. May be traced.

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: the number of rewards is not a multiple of group_size.
    """
    grouped = widened(grouped_rewards(rewards, group_size, of="group_advantages"))
    graded = ~jnp.isnan(grouped)
    centred = grouped - masked_mean(grouped, graded)[:, None]
    if scale == "group":
        divisor = group_std(grouped, graded, ddof)[:, None] + eps
    elif scale == "batch":
        divisor = group_std(grouped.reshape(-1), graded.reshape(-1), ddof) + eps
    else:
        divisor = jnp.ones((), grouped.dtype)
    keep = graded & ~zero_variance_groups(rewards, group_size=group_size)[:, None]
    return jnp.where(keep, centred / divisor, 0).reshape(-1)


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
    grouped = widened(grouped_rewards(rewards, group_size, of="leave_one_out_advantages"))
    graded = ~jnp.isnan(grouped)
    other_count = masked_count(graded)[:, None] - 1
    baseline = (masked_sum(grouped, graded)[:, None] - grouped) / jnp.maximum(other_count, 1)
    keep = (graded & (other_count > 0)).reshape(-1)
    advantages = (grouped - baseline).reshape(-1)
    constant = jnp.repeat(zero_variance_groups(rewards, group_size=group_size), group_size)
    advantages = jnp.where(constant, 0, advantages)
    if scale == "batch":
        advantages = (advantages - masked_mean(advantages, keep)) / (group_std(advantages, keep, ddof) + eps)
    elif scale != "none":
        raise ValueError(f"leave_one_out_advantages: scale must be batch or none, got {scale!r}")
    return jnp.where(keep, advantages, 0)


def batch_advantages(
    rewards: Float[Array, "B"],
    *,
    leave_one_out: bool = False,
    scale: Literal["batch", "none"] = "batch",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float[Array, "B"]:
    """Compute A_i = r_i - mean of the batch's rewards, / (their std + eps) with ``batch`` (REINFORCE with a baseline).

    No group is needed: the rows may be of as many prompts, whose difficulty then stays in the advantages. The mean
    includes the row itself, so that A is short by the factor 1 - 1/n in expectation; ``leave_one_out`` takes the mean
    of the other rewards, which is unbiased without the std. NaN rewards are left out of every mean and get 0, and so
    does every row of a batch of equal rewards.

    Raises:
        ValueError: an unknown scale.
    """
    if leave_one_out:
        return leave_one_out_advantages(rewards, group_size=len(rewards), scale=scale, ddof=ddof, eps=eps)
    return group_advantages(rewards, group_size=len(rewards), scale=scale, ddof=ddof, eps=eps)


def problem_advantages(
    rewards: Float[Array, "B"],
    past: PastRewards | None,
    *,
    leave_one_out: bool = False,
    scale: Literal["problem", "batch", "none"] = "batch",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float[Array, "B"]:
    """Compute A_i = r_i - mean of the earlier rewards of its problem, / a scale.

    The mean is older than the row, so that A is unbiased without a scale, and no group is needed. A problem that was
    never seen is compared with the batch, see ``batch_advantages``. ``batch`` divides by sqrt(sum A^2 / (n - ddof)) +
    eps, the batch's std as long as no problem was seen; ``problem`` by the std of the problem's earlier rewards + eps,
    or as ``batch`` where these were equal. A row at its baseline gets 0. NaN rewards get 0 and count for nothing.

    The baseline is the value tracker of SPO (arXiv 2509.13232, eq. 5 and 7) with a fixed discount and without its prior
    from samples of the start policy; its normalisation also subtracts the mean of A, ours does not.

    Args:
        rewards: of B rows. NaN = not graded.
        past: of the rows' problems, before this iteration; None: no problem was seen.
        leave_one_out: the mean of the other rewards, for problems that were not seen; default False.
        scale: default batch.
        ddof: subtracted from the number of advantages; default 1.
        eps: added to the divisor; default 0.0001.
    """
    advantages, graded = batch_advantages(rewards, leave_one_out=leave_one_out, scale="none"), ~jnp.isnan(rewards)
    if past is not None:
        advantages = jnp.where(past.seen & graded, widened(rewards) - past.mean, advantages)
    if scale == "none":
        return advantages
    freedom = jnp.maximum(masked_count(graded) - ddof, 1)
    divisor = jnp.sqrt(masked_sum(advantages**2, graded) / freedom)
    if scale == "problem" and past is not None:
        divisor = jnp.where(past.seen & (past.std > 0), past.std, divisor)
    return jnp.where(advantages == 0, 0, advantages / (divisor + eps))


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
    per_reward = jnp.stack([group_advantages(v, **settings) for v in values])
    return jnp.sum(weights[:, None] * per_reward, axis=0)


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
    result is not zero in groups of equal sums: rewards that differ and cancel still give advantages.
    """
    graded = jnp.any(~jnp.isnan(values) & (weights != 0)[:, None], axis=0)
    total = jnp.where(graded, weighted_group_advantages(values, weights, group_size=group_size, ddof=ddof, eps=eps), 0)
    centred = (total - masked_mean(total, graded)) / (group_std(total, graded, ddof) + eps)
    return jnp.where(graded, centred, 0)


def overlong_penalty(lengths: Int[Array, "B"], *, max_length: int, window: int, penalty: float) -> Float[Array, "B"]:
    """Return what to SUBTRACT from a long completion's reward, in [0, penalty] (DAPO's soft overlong punishment).

    0 up to max_length - window tokens, then linear, the whole penalty at max_length. A window of 0 penalises only
    completions longer than max_length.

    Raises:
        ValueError: window outside 0 .. max_length.
    """
    if not 0 <= window <= max_length:
        raise ValueError(f"overlong_penalty: window must be in 0 .. max_length = {max_length} tokens, got {window}")
    excess = lengths - (max_length - window)
    return penalty * jnp.clip(excess / max(window, 1), 0.0, 1.0)


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


def grouped_rewards(rewards: Float[Array, "B"], group_size: int, *, of: str) -> Float[Array, "P G"]:
    """Return the rewards with a row per group; an error names ``of``, the function that was called."""
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(
            f"{of}: rewards: {rewards.shape[0]} rows are not whole groups of {group_size}; pad the last group with NaN"
        )
    return rewards.reshape(-1, group_size)


def group_std(values: Float[Array, "*rows G"], mask: Bool[Array, "*rows G"], ddof: int) -> Float[Array, "*rows"]:
    """Compute the standard deviation of each row's valid entries; 0 for ddof or fewer of them."""
    deviations = values - masked_mean(values, mask)[..., None]
    freedom = masked_count(mask) - ddof
    variance = masked_sum(deviations**2, mask) / jnp.maximum(freedom, 1)
    return jnp.sqrt(jnp.where(freedom > 0, variance, 0))
