"""Concentration of token weights, and agreement between two rankings of the same tokens. One number per row.

The definitions are the usual ones; the paper names these measures without formulas that we could read. A measure
that is undefined for a row (no token, no causal token, constant scores) is NaN: leave such rows out of a mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.rl.checked import ScalarPositiveShare, checked
from oarjax.rl.masked import masked_count, masked_mean, masked_sum, widened


@checked
def ess_ratio(weights: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B"]:
    """Compute the effective sample size per token, (sum w)^2 / (n sum w^2), in [1/n, 1]; 1 = uniform.

    Args:
        weights: >= 0.
        mask: tokens that count.
    """
    total = masked_sum(weights, mask)
    power = masked_count(mask) * masked_sum(widened(weights) ** 2, mask)
    return jnp.where(power > 0, total**2 / jnp.where(power > 0, power, 1), jnp.nan)


@checked
def top_mass(
    weights: Float[Array, "B T"], mask: Bool[Array, "B T"], *, share: ScalarPositiveShare = 0.1
) -> Float[Array, "B"]:
    """Compute the share of sum(w) that lies on the ceil(share * n) largest weights, in [share, 1] for weights >= 0.

    Args:
        weights: >= 0.
        mask: tokens that count, n in a row.
        share: in (0, 1]; default 0.1. May be traced.
    """
    ordered = jnp.sort(jnp.where(mask, widened(weights), 0), axis=-1, descending=True)
    first = jnp.arange(mask.shape[-1]) < _top_count(mask, share)[:, None]
    total = masked_sum(weights, mask)
    return jnp.where(total > 0, masked_sum(ordered, first) / jnp.where(total > 0, total, 1), jnp.nan)


@checked
def spearman(a: Float[Array, "B T"], b: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B"]:
    """Compute Spearman's rank correlation over the valid tokens, ties given their average rank, in [-1, 1].

    Args:
        a: scores.
        b: other scores of the same tokens.
        mask: tokens that count.
    """
    x, y = (_centred_ranks(v, mask) for v in (a, b))
    spread = jnp.sqrt(masked_sum(x * x, mask) * masked_sum(y * y, mask))
    finite = jnp.all(jnp.where(mask, jnp.isfinite(a) & jnp.isfinite(b), True), axis=-1)
    defined = finite & (spread > 0)
    return jnp.where(defined, masked_sum(x * y, mask) / jnp.where(defined, spread, 1), jnp.nan)


@checked
def recall_at_k(
    scores: Float[Array, "B T"],
    causal: Bool[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    share: ScalarPositiveShare = 0.1,
) -> Float[Array, "B"]:
    """Compute the share of the causal tokens among the ceil(share * n) highest scores, in [0, 1].

    Tokens tied at the cut share the places left there, so that constant scores get k / n, not the luck of the order.

    Args:
        scores: of each token.
        causal: tokens known to decide the outcome.
        mask: tokens that count, n in a row.
        share: in (0, 1]; default 0.1. May be traced.
    """
    ranked = jnp.where(mask, widened(scores), -jnp.inf)
    k = _top_count(mask, share)
    cut = jnp.take_along_axis(jnp.sort(ranked, axis=-1, descending=True), jnp.maximum(k - 1, 0)[:, None], axis=-1)
    above, tied = mask & (ranked > cut), mask & (ranked == cut)
    places = (k - masked_count(above)) / jnp.maximum(masked_count(tied), 1)
    shares = jnp.where(above, 1.0, jnp.where(tied, places[:, None], 0.0))
    causal_tokens = causal & mask
    return jnp.where(jnp.any(causal_tokens, axis=-1), masked_mean(shares, causal_tokens), jnp.nan)


def separation(scores: Float[Array, "B T"], causal: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B"]:
    """Compute the chance that a causal token scores above another, ties counted half (area under the ROC curve), in
    [0, 1]; .5 = an uninformative score. Unlike recall at k it has no ceiling if many tokens are causal.
    """
    causal_tokens = causal & mask
    ones, zeros = masked_count(causal_tokens), masked_count(mask & ~causal)
    pairs = (ones * zeros).astype(jnp.float32)
    finite = jnp.all(jnp.where(mask, jnp.isfinite(scores), True), axis=-1)
    defined = finite & (pairs > 0)
    above = masked_sum(_centred_ranks(scores, mask), causal_tokens) / jnp.where(pairs > 0, pairs, 1)
    return jnp.where(defined, 0.5 + above, jnp.nan)


def _top_count(mask: Bool[Array, "B T"], share: ScalarPositiveShare) -> Int[Array, "B"]:
    """Return ceil(share * n), where share * n may come out a rounding above a whole number."""
    return jnp.ceil(share * masked_count(mask) * (1 - 1e-6)).astype(jnp.int32)


def _centred_ranks(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Compute average ranks of the valid tokens minus their mean; 0 elsewhere."""
    ranked = jnp.where(mask, widened(values), jnp.inf)
    ordered = jnp.sort(ranked, axis=-1)
    below = jax.vmap(lambda o, v: jnp.searchsorted(o, v, side="left"))(ordered, ranked)
    upto = jax.vmap(lambda o, v: jnp.searchsorted(o, v, side="right"))(ordered, ranked)
    ranks = (below + upto).astype(ranked.dtype) / 2
    return jnp.where(mask, ranks - masked_mean(ranks, mask)[:, None], 0)
