"""Up-weight tokens whose gradient points toward their own side of the batch, correct or wrong (arXiv 2605.21467).

Evidence: released code read. Departures: rows with A = 0 are left out of the normaliser, where the released code
counts them at the lowest weight, since they have no gradient and a run that skips them must get the same weights;
rows with a signal that is not finite get ones and count for nothing; the least spread of margins is relative to the
largest number in a state; the sums are over the whole minibatch on all devices.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required
from oarjax.rl.masked import widened

EPS = 1e-8
"""The least variance of margins and sum of centroid weights, as released; here of states scaled to at most 1."""

dot = partial(jnp.einsum, precision="highest")


def delta_weights(
    hidden: Float[Array, "B T D"],
    logps: Float[Array, "B T"],
    completion: Bool[Array, "B T"],
    advantages: Float[Array, "B"],
    *,
    low: float = 0.8,
    high: float = 1.2,
    rounds: int = 1,
) -> Float[Array, "B T"]:
    """Compute w = low + (high - low) q, then scale to a mean of 1 over all tokens of rows with A != 0; 1 elsewhere.

        v_it    (1 - pi(y_it)) h_it, in the place of the token's gradient with respect to the head
        mu+-    mean of v over rows of A > 0 or A < 0, weighted by |A|; 0 without any
        m_it    |v - mu_other|^2 - |v - mu_own|^2
        q_it    sigmoid(m_it / std(m)), the std over the tokens of the same side

    The centroids are recomputed ``rounds`` times with weights q |A| and the std of the margins before; the last margins
    give q.
    """
    finite = jnp.isfinite(hidden).all(-1) & jnp.isfinite(logps)
    usable = jnp.all(finite | ~completion, axis=-1) & (advantages != 0)
    mask = completion & usable[:, None]
    size = jnp.max(jnp.where(mask[..., None], jnp.abs(widened(hidden)), 0))
    states = widened(hidden) / jnp.where(size > 0, size, 1)
    v = jnp.where(mask[..., None], -jnp.expm1(jnp.minimum(widened(logps), 0))[..., None] * states, 0)
    middle = v.sum((0, 1)) / jnp.maximum(mask.sum(), 1)  # distances do not depend on the origin, rounding does
    v = jnp.where(mask[..., None], v - middle, 0)
    sides = [mask & (advantages > 0)[:, None], mask & (advantages < 0)[:, None]]
    mass = jnp.abs(advantages)[:, None]

    def centroid(weights: Float[Array, "B T"]) -> Float[Array, "D"]:
        total = weights.sum()
        return jnp.where(total > 0, dot("bt,btd->d", weights, v) / jnp.maximum(total, EPS), -middle)

    def margins(centroids: list[Float[Array, "D"]]) -> list[Float[Array, "B T"]]:
        # |v - a|^2 - |v - b|^2 = 2 v.(b - a) + |a|^2 - |b|^2, without the cancellation of |v|^2
        plus, minus = centroids
        above = 2 * dot("btd,d->bt", v, plus - minus) + jnp.sum(minus**2) - jnp.sum(plus**2)
        return [above, -above]

    def spread(m: Float[Array, "B T"], side: Bool[Array, "B T"]) -> Float[Array, ""]:
        count = jnp.maximum(side.sum(), 1)
        centred = jnp.where(side, m - jnp.sum(jnp.where(side, m, 0)) / count, 0)
        return jnp.sqrt(jnp.maximum(jnp.sum(centred**2) / count, EPS))

    centroids = [centroid(jnp.where(side, mass, 0)) for side in sides]
    scales = [spread(m, side) for m, side in zip(margins(centroids), sides)]
    for _ in range(rounds):
        old_margins = margins(centroids)
        centroids = [
            centroid(jnp.where(side, jax.nn.sigmoid(m / scale) * mass, 0))
            for m, scale, side in zip(old_margins, scales, sides)
        ]
        scales = [spread(m, side) for m, side in zip(old_margins, sides)]
    shares = [jax.nn.sigmoid(m / scale) for m, scale in zip(margins(centroids), scales)]
    weights = low + (high - low) * jnp.where(sides[0], shares[0], shares[1])
    total = jnp.sum(jnp.where(mask, weights, 0))
    return jnp.where(mask, weights * mask.sum() / jnp.where(total > 0, total, 1), 1)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the tokens by the side of the batch that their gradient is on."""
    hidden, logps = all_required(inputs.signals, ("hidden", "logps"), context)
    return delta_weights(hidden, logps, inputs.completion, inputs.advantages, **vars(context.credit.delta))


METHOD = CreditMethod(weigh, name="delta", coupling="batch", needs=("hidden", "logps"))
