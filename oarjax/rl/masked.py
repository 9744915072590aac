"""Reduce the valid entries of each row. Masked-out entries may hold anything, NaN included.

Every function reduces the last axis, so ``[T]``, ``[B, T]`` and deeper arrays work alike. Half-precision inputs are
reduced in float32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.rl.checked import ScalarShare, checked


def widened(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Cast to float32 or wider: sums in bfloat16 drop terms after a few hundred."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def masked_count(mask: Bool[Array, "*rows T"]) -> Int[Array, "*rows"]:
    """Count the valid entries of each row."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def masked_sum(values: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"]) -> Float[Array, "*rows"]:
    """Sum the valid entries; 0 for an empty row."""
    return jnp.sum(jnp.where(mask, widened(values), 0), axis=-1)


def masked_mean(values: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"]) -> Float[Array, "*rows"]:
    """Average the valid entries; 0 for an empty row."""
    return masked_sum(values, mask) / jnp.maximum(masked_count(mask), 1)


def masked_min(values: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"]) -> Float[Array, "*rows"]:
    """Return the smallest valid entry, +inf for an empty row, NaN where a valid entry is NaN."""
    return jnp.min(jnp.where(mask, values, jnp.inf), axis=-1)


def masked_max(values: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"]) -> Float[Array, "*rows"]:
    """Return the largest valid entry, -inf for an empty row, NaN where a valid entry is NaN."""
    return jnp.max(jnp.where(mask, values, -jnp.inf), axis=-1)


def masked_minmax(values: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """Scale each row to (x - min) / (max - min), in [0, 1]; 0 outside the mask and in rows of equal entries.

    A row with a valid NaN or infinity has NaN among its valid entries.
    """
    wide = widened(values)
    low = masked_min(wide, mask)[..., None]
    span = masked_max(wide, mask)[..., None] - low
    return jnp.where(mask, (wide - low) / jnp.where(span == 0, 1, span), 0)


@checked
def masked_quantile(
    values: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"], *, level: ScalarShare
) -> Float[Array, "*rows"]:
    """Interpolate a quantile of the valid entries linearly (numpy's default); 0 for an empty row.

    With n valid entries in ascending order x_0 .. x_{n-1} it is the value at the fractional index level * (n - 1).

    Raises:
        ArgumentError: level outside [0, 1].
    """
    wide = widened(values)
    count = masked_count(mask)
    ordered = jnp.sort(jnp.where(mask, wide, jnp.inf), axis=-1)
    at = jnp.asarray(level, wide.dtype) * jnp.maximum(count - 1, 0)
    below = jnp.floor(at)
    index = below.astype(jnp.int32)[..., None]
    last = jnp.maximum(count - 1, 0)[..., None]
    low = jnp.take_along_axis(ordered, index, axis=-1)[..., 0]
    high = jnp.take_along_axis(ordered, jnp.minimum(index + 1, last), axis=-1)[..., 0]
    return jnp.where(count > 0, low + (high - low) * (at - below), 0)
