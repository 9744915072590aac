"""Random scores: what a gate does when it knows nothing. Through OAR's gate they are a control for its histogram."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key, UInt32


def random_scores(key: Key[Array, ""], *, rows: int, tokens: int) -> Float32[Array, "B T"]:
    """Uniform numbers in [0, 1] that depend on (key, row, position) alone, never on how far the batch is padded."""
    return position_bits(key, rows=rows, tokens=tokens).astype(jnp.float32) * 2.0**-32


def position_bits(key: Key[Array, ""], *, rows: int, tokens: int) -> UInt32[Array, "B T"]:
    """Random bits that depend on (key, row, position) alone."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    row_keys = fold(key, jnp.arange(rows))
    bits = jax.vmap(lambda k: jax.vmap(jax.random.bits)(fold(k, jnp.arange(tokens))))
    return bits(row_keys)
