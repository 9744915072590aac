"""Controls for token credit: equal weights (plain GRPO), random scores, and the same weights on the wrong tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt32

from oarjax.credit.gate import gated
from oarjax.credit.signals import Context, Signals, required
from oarjax.types import AnswerSpan


def uniform_weights(reasoning: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Return token weights of 1."""
    return jnp.ones(reasoning.shape, jnp.float32)


def random_scores(key: Key[Array, ""], rows: Int[Array, "B"], *, tokens: int) -> Float32[Array, "B T"]:
    """Draw uniform numbers in [0, 1] that depend on (key, number of the row, position) alone."""
    return position_bits(key, rows, tokens=tokens).astype(jnp.float32) * 2.0**-32


def position_bits(key: Key[Array, ""], rows: Int[Array, "B"], *, tokens: int) -> UInt32[Array, "B T"]:
    """Draw bits that depend on (key, number of the row, position) alone: not on the batch's order, cut or padding."""
    draw = partial(jax.random.bits, shape=(), dtype=jnp.uint32)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    bits = jax.vmap(lambda k: jax.vmap(draw)(fold(k, jnp.arange(tokens))))
    return bits(fold(key, rows))


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


def weigh_uniform(
    signals: Signals,
    span: AnswerSpan,
    advantages: Float[Array, "B"],
    completion: Bool[Array, "B T"],
    key: Key[Array, ""],
    context: Context,
) -> Float[Array, "B T"]:
    """Leave every token the advantage of its row."""
    return uniform_weights(completion)


def weigh_random(
    signals: Signals,
    span: AnswerSpan,
    advantages: Float[Array, "B"],
    completion: Bool[Array, "B T"],
    key: Key[Array, ""],
    context: Context,
) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by random scores through the configured gate."""
    scores = random_scores(key, row_numbers(signals, completion), tokens=completion.shape[1])
    return gated(scores, span, context)


def weigh_permuted(
    signals: Signals,
    span: AnswerSpan,
    advantages: Float[Array, "B"],
    completion: Bool[Array, "B T"],
    key: Key[Array, ""],
    context: Context,
) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by the gated importance of others of their row."""
    weights = gated(required(signals, "importance", context), span, context)
    return permuted_weights(weights, span.reasoning, key, row_numbers(signals, completion))


def row_numbers(signals: Signals, completion: Bool[Array, "B T"]) -> Int[Array, "B"]:
    """Return the numbers of the rows, by default their order."""
    return jnp.arange(completion.shape[0]) if signals.rows is None else signals.rows
