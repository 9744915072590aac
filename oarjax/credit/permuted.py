"""The control for token credit: the same weights on the wrong tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, UInt32


def permuted_weights(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], key: Key[Array, ""]
) -> Float[Array, "B T"]:
    """Weights shuffled among the reasoning tokens of each row; all other tokens keep theirs.

    The histogram of weights, their mass and their ESS stay, the alignment with the tokens goes. The order of a row
    depends on the key, the row's number and the token positions, never on how far the batch is padded.
    """
    draws = _draws(key, *weights.shape)
    # Both orders list a row's reasoning positions first, then the others in place; the second shuffles the first part.
    places = jnp.argsort(~reasoning, axis=-1, stable=True)
    sources = jnp.lexsort((jnp.where(reasoning, draws, 0), ~reasoning), axis=-1)
    rows = jnp.arange(weights.shape[0])[:, None]
    return weights.at[rows, places].set(weights[rows, sources])


def _draws(key: Key[Array, ""], rows: int, tokens: int) -> UInt32[Array, "B T"]:
    """Random bits that depend on (key, row, position) alone."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    row_keys = fold(key, jnp.arange(rows))
    bits = jax.vmap(lambda k: jax.vmap(jax.random.bits)(fold(k, jnp.arange(tokens))))
    return bits(row_keys)
