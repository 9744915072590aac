"""Screened OAR-P: the exact score where it matters, OAR-F's everywhere else (ours, not in the paper)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.rl.masked import masked_count, masked_quantile, masked_sum, widened


def top_share(scores: Float[Array, "B T"], mask: Bool[Array, "B T"], *, share: float) -> Bool[Array, "B T"]:
    """The ceil(share * n) highest of each row's n valid scores; of equals the earlier token.

    Raises:
        ValueError: share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: expected a number in [0, 1], got {share}")
    order = jnp.argsort(jnp.where(mask, -widened(scores), jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    count = jnp.ceil(share * masked_count(mask) * (1 - 1e-6))
    return mask & (rank < count[:, None])


def screened_scores(
    exact: Float[Array, "B T"], estimate: Float[Array, "B T"], chosen: Bool[Array, "B T"], scored: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Exact scores of the chosen tokens; the others' estimates, brought to their scale and kept below them.

    A row's factor is sum(exact) / sum(estimate) over its chosen tokens, and less where the highest of the others
    would pass the median of the chosen. The others keep their order among themselves. Where the factor is undefined
    (nothing chosen, nothing above 0) they keep their estimates. Absolute values, for scores that may be negative.
    """
    exact, estimate = jnp.where(chosen, exact, 0), jnp.abs(estimate).astype(exact.dtype)
    others = scored & ~chosen
    above, below = masked_sum(jnp.abs(exact), chosen), masked_sum(estimate, chosen)
    highest = jnp.max(jnp.where(others, estimate, 0), axis=-1)
    cap = masked_quantile(jnp.abs(exact), chosen, level=0.5)
    scale = jnp.where(below > 0, above / jnp.where(below > 0, below, 1), jnp.inf)
    scale = jnp.minimum(scale, jnp.where(highest > 0, cap / jnp.where(highest > 0, highest, 1), jnp.inf))
    scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1)
    return jnp.where(chosen, exact, jnp.where(others, estimate * scale[:, None], 0))
