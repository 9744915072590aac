"""FIPO (arXiv 2603.19835): a token weighs more if what follows it has become likelier since the rollout.

Evidence: released code read (its fork of verl, and ms-swift). The weights change with every update, so there must be
several per rollout; in the first one all are 1. The defaults are those of the released 32B run; its code recommends
``levels: both`` for smaller policies. Not here: that code leaves rows out of the loss in which more than one token
meets the dual clip (``loss.dual_clip``, 10 in that run). A row with a log-prob that is not finite gets ones.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context
from oarjax.rl.masked import widened
from oarjax.types import TrainBatch

BOUND = 20.0
"""Differences of log-probs are clipped to this, as released."""
SAFE = 0.8, 1.0
"""Range of the weights of unlikely tokens of negative advantage, as released."""


def future_weights(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    completion: Bool[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    gamma: float = 2 ** (-1 / 32),
    clip: float = 0.2,
    levels: Literal["boost", "both"] = "boost",
    drop: float = 10.0,
    cap: float = 10.0,
) -> Float[Array, "B T"]:
    """Compute w_t = clip(exp(sum_{k >= t, r_k <= drop} gamma^(k - t) log r_k), low, 1 + clip); 1 outside.

    log r_k = clip(logp_k - old_k, -20, 20), and low = 1, or 1 - clip with levels both. Where A_t < 0 and r_t > cap,
    w_t is clipped to [.8, 1] after that.

    Raises:
        ValueError: gamma or clip outside [0, 1], drop or cap not positive, or unknown levels.
    """
    if not (0 <= gamma <= 1 and 0 <= clip <= 1 and drop > 0 and cap > 0 and levels in ("boost", "both")):
        raise ValueError(
            "future_weights: expected gamma and clip in [0, 1], drop and cap > 0 and levels boost or both, got "
            f"gamma={gamma}, clip={clip}, drop={drop}, cap={cap}, levels={levels!r}"
        )
    change = widened(logps) - widened(old_logps)
    usable = jnp.all(jnp.isfinite(change) | ~completion, axis=-1)[:, None]
    change = jnp.clip(jnp.where(completion & usable, change, 0), -BOUND, BOUND)
    steps = jnp.where(change > jnp.log(drop), 0, change)

    def back(later: Float[Array, "B"], step: Float[Array, "B"]) -> tuple[Array, Array]:
        total = step + gamma * later
        return total, total

    _, sums = jax.lax.scan(back, jnp.zeros_like(steps[:, 0]), steps.T, reverse=True)
    # Clipped before exp as well: a sum beyond the range must not overflow.
    weights = jnp.clip(jnp.exp(jnp.clip(sums.T, -1, 1)), 1 - clip * (levels == "both"), 1 + clip)
    unlikely = (advantages < 0) & (jnp.exp(change) > cap)
    weights = jnp.where(unlikely, jnp.clip(weights, *SAFE), weights)
    return jnp.where(completion & usable, weights, 1)


def reweigh(logps: Float[Array, "B T"], batch: TrainBatch, context: Context) -> Float[Array, "B T"]:
    """Weigh the tokens of a microbatch by what has changed since the rollout."""
    if batch.old_logps is None:
        raise ValueError("fipo: needs the log-probs of the rollout, got None; give TrainBatch(old_logps=...)")
    return future_weights(logps, batch.old_logps, batch.completion, batch.advantages, **vars(context.credit.fipo))


METHOD = CreditMethod(name="fipo", reweigh=reweigh)
