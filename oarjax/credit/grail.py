"""GRAIL's token weights (arXiv 2606.04889), from the saliency of the answer's likelihood; ``oarjax.oar.saliency``.

Formulas as in its released trainer. Departures: token t is scored by its own embedding, not by that of the token
before it; the answer is the last one and without its marker; log saliency is standardised over the reasoning alone,
since tokens at and after the answer's end have a saliency of 0 by causality and would set the scale.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.masked import masked_mean, masked_min, widened

EPS = 1e-8
"""Added to the saliency inside the logarithm and to the variance, as released."""


def log_zscores(saliency: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """z = (log(s + 1e-8) - mean) / sqrt(var + 1e-8) over the valid tokens of each row, 0 elsewhere."""
    logs = jnp.log(jnp.where(mask, widened(saliency), 1) + EPS)
    logs = logs - masked_min(logs, mask)[:, None]  # equal scores give 0 exactly, not rounding over 1e-4
    centred = jnp.where(mask, logs - masked_mean(logs, mask)[:, None], 0)
    return centred / jnp.sqrt(masked_mean(centred**2, mask) + EPS)[:, None]


def grail_weights(
    saliency: Float[Array, "B T"],
    reasoning: Bool[Array, "B T"],
    answer: Bool[Array, "B T"],
    completion: Bool[Array, "B T"],
    *,
    mean: float = 1.0,
    spread: float = 0.5,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[Array, "B T"]:
    """clip(mean + spread * z, low, high) on the reasoning; ``high`` on the answer, ``mean`` on the rest.

    The rest are the answer's marker and what follows it. Rows with no answer, or with a saliency that is NaN,
    infinite or negative, get ones, and so does everything outside the completion. Equal saliencies give ``mean``.
    The mass of a row is not kept.

    Raises:
        ValueError: not 0 <= low <= high, or negative mean or spread.
    """
    if not 0 <= low <= high or mean < 0 or spread < 0:
        raise ValueError(
            "grail_weights: expected 0 <= low <= high, mean >= 0 and spread >= 0, "
            f"got low={low}, high={high}, mean={mean}, spread={spread}"
        )
    z = log_zscores(saliency, reasoning)
    weights = jnp.where(reasoning, jnp.clip(mean + spread * z, low, high), jnp.where(answer, high, mean))
    sound = jnp.where(reasoning, jnp.isfinite(saliency) & (saliency >= 0), True)
    usable = jnp.any(answer, axis=-1) & jnp.all(sound, axis=-1)
    return jnp.where(completion & usable[:, None], weights, 1)
