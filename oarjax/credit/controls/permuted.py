"""Another method's weights on the wrong tokens, a control."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.credit.controls.random_scores import position_bits, row_numbers
from oarjax.credit.gate import gated
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, required


def permuted_weights(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], key: Key[Array, ""], numbers: Int[Array, "B"]
) -> Float[Array, "B T"]:
    """Shuffle weights among the reasoning tokens of each row; all other tokens keep theirs.

    The histogram of weights, their mass and their ESS stay, the alignment with the tokens goes. The order of a row
    depends on the key, the row's number and the token positions, never on the batch's order, cut or padding.
    """
    draws = position_bits(key, numbers, tokens=weights.shape[1])
    # Both orders list a row's reasoning positions first, then the others in place; the second shuffles the first part.
    places = jnp.argsort(~reasoning, axis=-1, stable=True)
    sources = jnp.lexsort((jnp.where(reasoning, draws, 0), ~reasoning), axis=-1)
    rows = jnp.arange(weights.shape[0])[:, None]
    return weights.at[rows, places].set(weights[rows, sources])


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by the gated importance of others of their row."""
    weights = gated(required(inputs.signals, "importance", context), inputs.span, context)
    return permuted_weights(weights, inputs.span.reasoning, inputs.key, row_numbers(inputs.signals, inputs.completion))


METHOD = CreditMethod(weigh, name="permuted", needs=("importance",), score="permuted_of", noisy=True)
