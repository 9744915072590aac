"""DGPO (arXiv 2605.03327): more for tokens where the policy has moved from the reference and is undecided.

Evidence: a description, two independent reimplementations that agree. Its objective has no KL term
(``loss.kl_beta`` 0, the default). Departure: a row with a signal that is not finite gets ones. At the first update the
policy is its reference and every weight is 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import masked_count, widened


def dgpo_weights(
    hellinger: Float[Array, "B T"],
    spread: Float[Array, "B T"],
    completion: Bool[Array, "B T"],
    *,
    tau: float = 0.5,
    kappa: float = 1.0,
) -> Float[Array, "B T"]:
    """Compute w_t = T softmax_t(d_t g_t / tau) over the row's T tokens, which average 1; 1 elsewhere.

    d_t = 1 - sum_v sqrt(pi(v) pi_ref(v)) in [0, 1], g_t = (H_t / log V)^kappa in [0, 1], so no weight of a row is more
    than exp(1 / tau) times another.

    Raises:
        ValueError: tau not positive, or kappa negative.
    """
    if tau <= 0 or kappa < 0:
        raise ValueError(f"dgpo_weights: expected tau > 0 and kappa >= 0, got tau={tau}, kappa={kappa}")
    finite = jnp.isfinite(hellinger) & jnp.isfinite(spread)
    usable = jnp.all(finite | ~completion, axis=-1)
    product = jnp.clip(widened(hellinger), 0, 1) * jnp.clip(widened(spread), 0, 1) ** kappa
    logits = jnp.where(completion & usable[:, None], product / tau, 0)
    shares = jax.nn.softmax(logits, axis=-1, where=completion)
    weights = jnp.where(completion, shares, 0) * masked_count(completion)[:, None]
    return jnp.where(completion & usable[:, None], weights, 1)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the tokens by their distance from the reference and by their entropy."""
    hellinger, spread = all_required(inputs.signals, ("hellinger", "spread"), context)
    return dgpo_weights(hellinger, spread, inputs.completion, **vars(context.credit.dgpo))


METHOD = CreditMethod(weigh, name="dgpo", needs=("hellinger", "spread"))
