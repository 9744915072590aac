"""Screened OAR-P: the exact score where it matters, OAR-F's everywhere else (ours, not in the paper)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.masked import masked_count, masked_sum, widened


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
    """Exact scores of the chosen tokens; the others' estimates, brought to the scale of the exact ones.

    The factor of a row is sum(exact) / sum(estimate) over its chosen tokens, so the others keep their order among
    themselves. Where it is undefined (nothing chosen, or nothing above 0) they keep their estimates.
    """
    above, below = masked_sum(jnp.abs(exact), chosen), masked_sum(jnp.abs(estimate), chosen)
    usable = (above > 0) & (below > 0)
    scale = jnp.where(usable, above / jnp.where(usable, below, 1), 1)
    return jax.lax.select(chosen, exact, jnp.where(scored, estimate * scale[:, None], 0).astype(exact.dtype))
