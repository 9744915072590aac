"""The control for token credit: the same weights on the wrong tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from oarjax.credit.random import position_bits


def permuted_weights(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], key: Key[Array, ""]
) -> Float[Array, "B T"]:
    """Weights shuffled among the reasoning tokens of each row; all other tokens keep theirs.

    The histogram of weights, their mass and their ESS stay, the alignment with the tokens goes. The order of a row
    depends on the key, the row's number and the token positions, never on how far the batch is padded.
    """
    draws = position_bits(key, rows=weights.shape[0], tokens=weights.shape[1])
    # Both orders list a row's reasoning positions first, then the others in place; the second shuffles the first part.
    places = jnp.argsort(~reasoning, axis=-1, stable=True)
    sources = jnp.lexsort((jnp.where(reasoning, draws, 0), ~reasoning), axis=-1)
    rows = jnp.arange(weights.shape[0])[:, None]
    return weights.at[rows, places].set(weights[rows, sources])
