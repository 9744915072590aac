"""Ratios of the policy to the older one, and the surrogate objectives of a token that are built on them.

Surrogates are to be MAXIMISED. GRPO's is ``clipped_surrogate``. GSPO: arXiv 2507.18071; CISPO: 2506.13585; dual clip:
1912.09729; SAPO: 2511.20347; GMPO: 2507.20673; VESPO: 2602.10693; DPPO: 2602.04879. Log-probs are in nats.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from oarjax.rl.checked import Scalar, ScalarAboveOne, ScalarPositive, ScalarRate, ScalarShare, checked
from oarjax.rl.masked import masked_mean, widened
from oarjax.rl.off_policy import LOG_RATIO_BOUND


def policy_ratio(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    level: Literal["token", "sequence"] = "token",
) -> Float[Array, "B T"]:
    """Compute exp(clip(log-ratio, -20, 20)); 1 outside the mask at token level.

    ``sequence`` (GSPO) takes the mean log-ratio of the row's valid tokens and repeats it along the row; gradients
    reach every token of it.
    """
    log_ratio = jnp.where(mask, widened(logps) - widened(old_logps), 0)
    if level == "sequence":
        log_ratio = jnp.broadcast_to(masked_mean(log_ratio, mask)[:, None], log_ratio.shape)
    elif level != "token":
        raise ValueError(f"policy_ratio: level must be token or sequence, got {level!r}")
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


@checked
def clipped_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: ScalarShare = 0.2,
    clip_high: ScalarRate = 0.28,
    dual_clip: ScalarAboveOne | None = None,
) -> Float[Array, "B T"]:
    """Compute min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and where A < 0 at least dual_clip * A.

    PPO's clip in GRPO's objective (arXiv 2402.03300, eq. 3). TRL's ``delta`` (a cap on the unclipped ratio for either
    sign) is the same function for delta >= 1 + clip_high. Numbers may be traced.

    Args:
        ratio: policy / older policy of each token.
        advantages: of each token; [B] per row needs ``[:, None]`` and a broadcast.
        clip_low: width of the range below 1, in [0, 1]; default 0.2 (DAPO, arXiv 2503.14476, section 3.1).
        clip_high: width above 1, >= 0; default 0.28 (the same); GRPO has clip_low here.
        dual_clip: bound c > 1 of the ratio where A < 0 (arXiv 1912.09729); default None, no bound.
    """
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return objective
    return jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)


@checked
def cispo_surrogate(
    logps: Float[Array, "B T"],
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    ratio_cap: ScalarPositive = 5.0,
) -> Float[Array, "B T"]:
    """Compute stop_gradient(min(ratio, ratio_cap)) * A * logp (CISPO, arXiv 2506.13585).

    Args:
        logps: of the tokens under the current policy, nats; they alone have a gradient.
        ratio: policy / older policy of each token.
        advantages: of each token.
        ratio_cap: largest ratio, > 0, not an excess over 1; default 5.0. May be traced.
    """
    return stop_gradient(jnp.minimum(ratio, ratio_cap)) * advantages * logps


def sapo_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    positive: Scalar = 1.0,
    negative: Scalar = 1.05,
) -> Float[Array, "B T"]:
    """Compute 4/tau * sigmoid(tau * (ratio - 1)) * A (SAPO, arXiv 2511.20347, eq. 6).

    tau is ``positive`` where A > 0, else ``negative``. The slope in the ratio is A at ratio 1 and fades on both sides
    instead of ending at a bound; a larger tau fades faster.
    """
    tau = jnp.where(advantages > 0, positive, negative).astype(ratio.dtype)
    return 4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages


def gmpo_surrogate(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: Scalar = 0.4,
    clip_high: Scalar = 0.4,
) -> Float[Array, "B T"]:
    """Compute A times the geometric mean of the row's clipped ratios (GMPO, arXiv 2507.20673, eq. 4).

    Each token's log-ratio x enters the mean as min(x, clip_high) where A > 0 and as max(x, -clip_low) where A < 0: the
    bounds are of the LOG-ratio (paper: .4 both ways). With one advantage per row the row's mean is the paper's term;
    advantages per token keep their own factor A, and tokens of A = 0 enter with ratio 1, as in verl.
    """
    x = jnp.where(mask, widened(logps) - widened(old_logps), 0)
    falling = jnp.where(advantages < 0, jnp.maximum(x, -clip_low), 0)
    bounded = jnp.where(advantages > 0, jnp.minimum(x, clip_high), falling)
    mean = jnp.clip(masked_mean(bounded, mask), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.exp(mean)[:, None] * advantages


def vespo_surrogate(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    k_positive: Scalar = 2.0,
    lambda_positive: Scalar = 3.0,
    k_negative: Scalar = 3.0,
    lambda_negative: Scalar = 2.0,
) -> Float[Array, "B T"]:
    """Compute stop_gradient(phi(w)) * A * logp with phi(w) = w^k exp(lambda (1 - w)) (VESPO, arXiv 2602.10693).

    w is the product of the row's ratios, within 1e-8 .. e^20, each log-ratio within -20 .. 20, as TRL has it; phi(1) is
    1, and the peak is at w = k / lambda. k and lambda are ``_positive`` where A >= 0. Departure: the sign is that of
    the token's advantage where advantages differ within a row.
    """
    x = jnp.where(mask, stop_gradient(widened(logps)) - widened(old_logps), 0)
    total = jnp.sum(jnp.clip(x, -LOG_RATIO_BOUND, LOG_RATIO_BOUND), axis=-1, keepdims=True)
    log_w = jnp.clip(total, math.log(1e-8), LOG_RATIO_BOUND)
    k = jnp.where(advantages >= 0, k_positive, k_negative)
    rate = jnp.where(advantages >= 0, lambda_positive, lambda_negative)
    return jnp.exp(k * log_w + rate * (1 - jnp.exp(log_w))) * advantages * logps


def dppo_surrogate(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    mask_low: Scalar = 0.2,
    mask_high: Scalar = 0.2,
) -> Float[Array, "B T"]:
    """Compute ratio * A, and 0 where the PROBABILITY has moved too far in the advantage's direction (DPPO).

    With p and q the token's probabilities under the current and the older policy, tokens of A > 0 are left out where
    p - q > mask_high, and tokens of A < 0 where p - q < -mask_low: the binary total variation of arXiv 2602.04879, as
    prime-rl has it. A rare token's ratio may grow far without its probability moving, and stays in.
    """
    low, high = moved_probability(logps, old_logps, advantages, mask_low=mask_low, mask_high=mask_high)
    return jnp.where(low | high, 0, policy_ratio(logps, old_logps, mask) * advantages)


def moved_probability(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    mask_low: Scalar,
    mask_high: Scalar,
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Mark the tokens that DPPO leaves out: those of A < 0 that became too unlikely, of A > 0 too likely."""
    change = jnp.exp(stop_gradient(widened(logps))) - jnp.exp(widened(old_logps))
    return (advantages < 0) & (change < -mask_low), (advantages > 0) & (change > mask_high)
