"""CRPO (arXiv 2605.25511): several rewards, each normalised within the group before they are added.

Evidence: released code read. Here is its advantage alone, for any rewards and weights (``grading.rewards``; the source
takes .5 of task and .5 of style). Its other parts belong elsewhere or are not offered: the ratio of sequences is
``loss.level=sequence``; scaling by character, the response without a persona and the KL coefficient by role are not
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from oarjax.credit.method import CreditMethod
from oarjax.rl.advantages import weighted_group_advantages


def decoupled_advantages(
    rewards: Float[Array, "B K"],
    weights: Sequence[float],
    *,
    group_size: int,
    scale: Literal["group", "batch", "none"],
    ddof: Literal[0, 1],
    eps: float,
) -> Float[Array, "B"]:
    """Compute A_i = sum_k weight_k (r_ik - mean_k) / (std_k + eps), mean and std of each reward in the group.

    A row with a NaN reward gets 0: mask it out of the loss.

    Raises:
        ValueError: not one weight per reward.
    """
    if len(weights) != rewards.shape[1]:
        raise ValueError(f"decoupled_advantages: {rewards.shape[1]} rewards and {len(weights)} weights")
    graded = jnp.all(jnp.isfinite(rewards), axis=1)
    columns = jnp.where(graded[:, None], rewards, jnp.nan).T
    return weighted_group_advantages(
        columns,
        jnp.asarray(weights, float),
        group_size=group_size,
        scale=scale,
        ddof=ddof,
        eps=eps,
    )


METHOD = CreditMethod(name="crpo", kind="sequence", advantage=decoupled_advantages)
