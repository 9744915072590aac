"""Random scores through OAR's gate, a control: the same histogram of weights, on tokens drawn at random."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt32

from oarjax.credit.gate import gated
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, Signals


def random_scores(key: Key[Array, ""], rows: Int[Array, "B"], *, tokens: int) -> Float32[Array, "B T"]:
    """Draw uniform numbers in [0, 1] that depend on (key, number of the row, position) alone."""
    return position_bits(key, rows, tokens=tokens).astype(jnp.float32) * 2.0**-32


def position_bits(key: Key[Array, ""], rows: Int[Array, "B"], *, tokens: int) -> UInt32[Array, "B T"]:
    """Draw bits that depend on (key, number of the row, position) alone: not on the batch's order, cut or padding."""
    draw = partial(jax.random.bits, shape=(), dtype=jnp.uint32)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    bits = jax.vmap(lambda k: jax.vmap(draw)(fold(k, jnp.arange(tokens))))
    return bits(fold(key, rows))


def row_numbers(signals: Signals, completion: Bool[Array, "B T"]) -> Int[Array, "B"]:
    """Return the numbers of the rows, by default their order."""
    return jnp.arange(completion.shape[0]) if signals.rows is None else signals.rows


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by random scores through the configured gate."""
    scores = random_scores(
        inputs.key, row_numbers(inputs.signals, inputs.completion), tokens=inputs.completion.shape[1]
    )
    return gated(scores, inputs.span, context)


METHOD = CreditMethod(weigh, name="random", noisy=True)
