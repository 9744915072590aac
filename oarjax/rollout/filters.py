"""Change logits before sampling: repetition penalty, top-k, top-p and min-p, in the order of ``transformers``.

The penalty acts on the logits themselves, before the temperature; the filters act after it, each on what the previous
one left. All keep by a threshold, so tokens of equal logit stay or go together.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int


class Filters(NamedTuple):
    """Settings of the filters; these defaults keep every token."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def off(self) -> bool:
        """Return True if every token is kept."""
        return self == Filters()

    def check(self) -> None:
        """Raise a ValueError for a number outside its range."""
        if self.top_k < 0:
            raise ValueError(f"top_k: expected 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a share in (0, 1], 1 = off, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected a share in [0, 1], 0 = off, got {self.min_p}")


def penalise_repeated(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], *, penalty: float) -> Float[Array, "B V"]:
    """Divide positive logits of seen tokens by the penalty, multiply negative ones by it (CTRL, arXiv 1909.05858)."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def seen_tokens(tokens: Int[Array, "B S"], valid: Bool[Array, "B S"], *, vocab: int) -> Bool[Array, "B V"]:
    """Mark the tokens that occur in each row; padding does not count (in ``transformers`` it does)."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros((tokens.shape[0], vocab), bool).at[rows, jnp.where(valid, tokens, vocab)].set(True, mode="drop")


def filter_logits(
    logits: Float[Array, "*rows V"], *, top_k: int, top_p: float, min_p: float = 0.0
) -> Float[Array, "*rows V"]:
    """Set -inf where top-k, then top-p, then min-p drops a token; return the same array when all are off.

    top_k keeps the k most likely tokens; top_p the smallest set of most likely tokens whose mass, of what is left,
    reaches p; min_p those with at least min_p times the highest probability. Ties with the last one kept are kept
    (``transformers`` breaks such ties by index in top-p). The most likely token always stays. Gradients pass through
    the logits that are kept; the choice of tokens is a constant.
    """
    if 0 < top_k < logits.shape[-1]:
        bound = lowest_kept(stop_gradient(logits), jnp.ones_like(logits), limit=float(top_k))
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    if top_p < 1:
        fixed = stop_gradient(logits)
        bound = lowest_kept(fixed, jax.nn.softmax(fixed, axis=-1), limit=top_p)
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    if min_p > 0:
        bound = jnp.max(stop_gradient(logits), axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    return logits


def lowest_kept(
    logits: Float[Array, "*rows V"], weights: Float[Array, "*rows V"], *, limit: float
) -> Float[Array, "*rows 1"]:
    """Return the lowest value with less than ``limit`` (> 0) of weight strictly above it: a logit, or -inf for all.

    The result is exact: a bisection over the bit patterns of floats, which order like the floats once those of
    negative numbers are reversed. One pass over the vocabulary per bit is many times cheaper than sorting it.
    """
    bits = jnp.finfo(logits.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def reverse_negatives(x):
        return jnp.where(x < 0, x ^ jnp.iinfo(integer).max, x)

    ranks = reverse_negatives(jax.lax.bitcast_convert_type(logits, integer))

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        mass_above = jnp.sum(jnp.where(ranks > middle, weights, 0), axis=-1, keepdims=True)
        return jnp.where(mass_above < limit, low, middle + 1), jnp.where(mass_above < limit, middle, high)

    # From -inf, where everything is above, to the row's maximum, where nothing is.
    high = jnp.max(ranks, axis=-1, keepdims=True)
    low = jnp.minimum(
        reverse_negatives(jax.lax.bitcast_convert_type(jnp.full_like(high, -jnp.inf, logits.dtype), integer)), high
    )
    bound = jax.lax.fori_loop(0, bits, halve, (low, high))[1]
    return jax.lax.bitcast_convert_type(reverse_negatives(bound), logits.dtype)
