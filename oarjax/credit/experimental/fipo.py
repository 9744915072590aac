"""FIPO (arXiv 2603.19835): a token weighs more if what follows it has become likelier since the rollout.

Evidence: a description. The weights change with every update, so there must be several per rollout; in the
first one all are 1. Settings of the source were not read: gamma and the range are ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context
from oarjax.rl.masked import widened
from oarjax.types import TrainBatch


def future_weights(
    logps: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    completion: Bool[Array, "B T"],
    *,
    gamma: float = 0.99,
    clip: float = 0.2,
) -> Float[Array, "B T"]:
    """Compute w_t = clip(exp(sum_{k >= t} gamma^(k - t) (logp_k - old_k)), 1 - clip, 1 + clip); 1 outside.

    A row with a log-prob that is not finite gets ones.

    Raises:
        ValueError: gamma or clip outside [0, 1].
    """
    if not (0 <= gamma <= 1 and 0 <= clip <= 1):
        raise ValueError(f"future_weights: gamma and clip must be in [0, 1], got gamma={gamma}, clip={clip}")
    change = widened(logps) - widened(old_logps)
    usable = jnp.all(jnp.isfinite(change) | ~completion, axis=-1)[:, None]
    steps = jnp.where(completion & usable, change, 0)

    def back(later: Float[Array, "B"], step: Float[Array, "B"]) -> tuple[Array, Array]:
        total = step + gamma * later
        return total, total

    _, sums = jax.lax.scan(back, jnp.zeros_like(steps[:, 0]), steps.T, reverse=True)
    # Clipped before exp as well: a sum beyond the range must not overflow.
    weights = jnp.clip(jnp.exp(jnp.clip(sums.T, -1, 1)), 1 - clip, 1 + clip)
    return jnp.where(completion & usable, weights, 1)


def reweigh(logps: Float[Array, "B T"], batch: TrainBatch, context: Context) -> Float[Array, "B T"]:
    """Weigh the tokens of a microbatch by what has changed since the rollout."""
    if batch.old_logps is None:
        raise ValueError("fipo: needs the log-probs of the rollout, got None; give TrainBatch(old_logps=...)")
    return future_weights(logps, batch.old_logps, batch.completion, **vars(context.credit.fipo))


METHOD = CreditMethod(name="fipo", reweigh=reweigh)
