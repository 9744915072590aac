"""Corrections for completions that another policy drew: the sampler's numerics, an older policy, a truncated one.

``old`` is the policy at the start of the update, as the trainer computes it; ``behaviour`` is the sampler's own record.
Truncated importance (TIS): Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
Masked importance and its sequence level: Liu et al., "When speed kills stability" (2025). IcePop: arXiv 2510.18855.
Off-policy sequence mask: DeepSeek-V3.2, arXiv 2512.02556, section 3.1. Log-probs are in nats.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from oarjax.rl.checked import Scalar
from oarjax.rl.masked import masked_mean, masked_sum, widened

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clipped to +-20 before exp; beyond it a token has no gradient instead of an infinite one."""

Weighting = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Importance(NamedTuple):
    """Importance weights of a loss: how they are made of old / behaviour, and the range that they may have."""

    weighting: Weighting
    low: float = 0.0
    high: float = 2.0


def importance_weights(
    old_logps: Float[Array, "B T"],
    behaviour_logps: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    weighting: Weighting,
    low: float = 0.0,
    high: float = 2.0,
) -> Float[Array, "B T"]:
    """Compute detached weights old / behaviour within low .. high, of tokens or of whole sequences.

    token_truncate     the token's ratio, clipped to the range (TIS with low 0)
    token_mask         the token's ratio, 0 outside the range (IcePop with .5 and 5)
    sequence_truncate  the product of the row's ratios, clipped, for every token
    sequence_mask      the product of the row's ratios, 0 outside the range, for every token

    Raises:
        ValueError: an unknown weighting, or low above high.
    """
    if low > high:
        raise ValueError(f"importance_weights: low = {low} exceeds high = {high}")
    gap = jnp.where(mask, widened(old_logps) - widened(behaviour_logps), 0)
    level, _, outside = weighting.partition("_")
    if level == "sequence":
        gap = jnp.broadcast_to(masked_sum(gap, mask)[:, None], gap.shape)
    elif level != "token":
        outside = ""
    ratio = jnp.exp(jnp.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if outside == "truncate":
        return stop_gradient(jnp.clip(ratio, low, high))
    if outside == "mask":
        return stop_gradient(jnp.where((ratio >= low) & (ratio <= high), ratio, 0))
    raise ValueError(
        "importance_weights: weighting must be token_truncate, token_mask, sequence_truncate or sequence_mask, "
        f"got {weighting!r}"
    )


def near_policy(
    logps: Float[Array, "B T"],
    behaviour_logps: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    max_drift: Scalar,
) -> Bool[Array, "B T"]:
    """Mark the tokens to keep: all but those of negative advantage in rows that the policy has moved away from.

    A row has drifted if the mean of log(behaviour / policy) over its tokens exceeds ``max_drift``, in nats per token
    (DeepSeek-V3.2's off-policy sequence mask). With one advantage per row whole rows are kept or left out.
    """
    drift = masked_mean(widened(behaviour_logps) - stop_gradient(widened(logps)), mask)
    return (advantages >= 0) | (drift <= max_drift)[:, None]
