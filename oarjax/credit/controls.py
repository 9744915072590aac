"""Controls for token credit: equal weights (plain GRPO), random scores, and the same weights on the wrong tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Key, UInt32

from oarjax.credit.gate import gated
from oarjax.credit.signals import Context, Signals, required
from oarjax.types import AnswerSpan


def uniform_weights(reasoning: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Return token weights of 1."""
    return jnp.ones(reasoning.shape, jnp.float32)


def random_scores(key: Key[Array, ""], *, rows: int, tokens: int) -> Float32[Array, "B T"]:
    """Draw uniform numbers in [0, 1] that depend on (key, row, position) alone, never on padding."""
    return position_bits(key, rows=rows, tokens=tokens).astype(jnp.float32) * 2.0**-32


def position_bits(key: Key[Array, ""], *, rows: int, tokens: int) -> UInt32[Array, "B T"]:
    """Draw random bits that depend on (key, row, position) alone."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    row_keys = fold(key, jnp.arange(rows))
    bits = jax.vmap(lambda k: jax.vmap(jax.random.bits)(fold(k, jnp.arange(tokens))))
    return bits(row_keys)


def permuted_weights(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], key: Key[Array, ""]
) -> Float[Array, "B T"]:
    """Shuffle weights among the reasoning tokens of each row; all other tokens keep theirs.

    The histogram of weights, their mass and their ESS stay, the alignment with the tokens goes. The order of a row
    depends on the key, the row's number and the token positions, never on how far the batch is padded.
    """
    draws = position_bits(key, rows=weights.shape[0], tokens=weights.shape[1])
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
    scores = random_scores(key, rows=completion.shape[0], tokens=completion.shape[1])
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
    weights = gated(required(signals.importance, "importance", context), span, context)
    return permuted_weights(weights, span.reasoning, key)
