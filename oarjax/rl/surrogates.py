"""Surrogate objectives beside the clipped one: soft gates (SAPO) and geometric means (GMPO). To be MAXIMISED."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.rl.masked import masked_mean, widened
from oarjax.rl.off_policy import LOG_RATIO_BOUND


def sapo_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    positive: float = 1.0,
    negative: float = 1.05,
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
    clip_low: float = 0.4,
    clip_high: float = 0.4,
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
