"""Measure how well a minibatch's gradient points, from inner products alone: arrays in, arrays out.

For minibatch i, u_i is the gradient under plain GRPO and g_i the gradient under a method's token advantages, on the
same rollouts. Minibatches are independent draws, so the mean of <g_i, u_j> over i != j estimates <E g, E u> without
bias, and the mean of <u_i, u_j> estimates |E u|^2: the reference is the gradient of an infinite batch, and no minibatch
is compared with itself. The gradients enter only through their M x M inner products.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Gram = Float[np.ndarray, "M M"]
"""Inner products of M gradients with M gradients, entry (i, j) of minibatches i and j."""


class Grams(NamedTuple):
    """Inner products of a method's minibatch gradients g and plain GRPO's u of the same minibatches."""

    method: Gram  # <g_i, g_j>
    cross: Gram  # <g_i, u_j>
    plain: Gram  # <u_i, u_j>
    pivotal: Gram | None = None  # of the part of g that comes from pivotal tokens
    other: Gram | None = None  # of the rest of g

    def of(self, kept: Int[np.ndarray, "m"]) -> Grams:
        """Return the inner products of some of the minibatches."""
        return Grams(*(None if gram is None else gram[np.ix_(kept, kept)] for gram in self))  # type: ignore[arg-type]


def within(gram: Gram) -> float:
    """Return the mean of <x_i, y_i>: an estimate of E <x, y> of one minibatch."""
    return float(np.mean(np.diag(gram)))


def between(gram: Gram) -> float:
    """Return the mean of <x_i, y_j> over i != j: an unbiased estimate of <E x, E y>.

    Raises:
        ValueError: a single minibatch.
    """
    m = len(gram)
    if m < 2:
        raise ValueError(f"between: expected at least 2 minibatches, got {m}")
    return float((gram.sum() - np.trace(gram)) / (m * (m - 1)))


def alignment(grams: Grams) -> dict[str, float]:
    """Compare a method's minibatch gradients with the expected gradient of plain GRPO, mu = E u.

    cosine   <E g, mu> / (sqrt(E |g|^2) |mu|)      of one minibatch's gradient with the reference, in the mean square
    ratio    cosine over plain GRPO's
    bias     <E g, mu> / (|E g| |mu|)              cosine of the method's expected gradient with the reference
    noise    (1 / cosine^2 - 1) over plain GRPO's  factor of rollouts that it needs to point as well as GRPO
    norm     sqrt(E |g|^2 / E |u|^2)               length of its gradient over GRPO's

    NaN where the estimate of |mu|^2 (for bias, of |E g|^2) is not positive: the minibatches show no signal; for noise
    also where the cosine is not positive. Estimates of small samples may lie outside [-1, 1].
    """
    mu2, shared = between(grams.plain), between(grams.cross)
    power, plain_power, mean2 = within(grams.method), within(grams.plain), between(grams.method)
    cosine = _over(shared, _root(power * mu2))
    plain = _over(mu2, _root(plain_power * mu2))
    defined = cosine > 0 and plain > 0
    return {
        "cosine": cosine,
        "ratio": _over(cosine, plain),
        "bias": _over(shared, _root(mean2 * mu2) if mean2 > 0 and mu2 > 0 else 0.0),
        "noise": _over(1 / cosine**2 - 1, 1 / plain**2 - 1) if defined else np.nan,
        "norm": _over(sqrt(power), sqrt(plain_power)),
    }


def best_mixture(grams: Grams) -> dict[str, float]:
    """Find the weights between 1 and a method's that point best: gradients (1 - x) u + x g.

    mixture        x of the largest cosine with mu; at most 0 where the method adds nothing but noise
    mixture_noise  noise of that mixture relative to GRPO's: a bound on what shrinking the weights towards 1 can reach

    With moments E|u|^2, E<u, g>, E|g|^2 in a matrix M and v = (<E u, mu>, <E g, mu>), the largest cosine^2 is
    v M^-1 v / |mu|^2, at weights in proportion to M^-1 v. It is chosen on the minibatches that it is measured on, so it
    flatters the mixture a little. NaN where |mu|^2 has no positive estimate, or the two gradients are the same.
    """
    mu2, shared = between(grams.plain), between(grams.cross)
    plain, cross, power = within(grams.plain), within(grams.cross), within(grams.method)
    volume = plain * power - cross**2
    if not (mu2 > 0 and volume > 1e-9 * plain * power):
        return {"mixture": np.nan, "mixture_noise": np.nan}
    of_plain, of_method = power * mu2 - cross * shared, plain * shared - cross * mu2
    cosine2 = (mu2 * of_plain + shared * of_method) / (volume * mu2)
    noise = _over(1 / cosine2 - 1, plain / mu2 - 1) if cosine2 > 0 else np.nan
    return {"mixture": _over(of_method, of_plain + of_method), "mixture_noise": noise}


def noise_shares(grams: Grams) -> dict[str, float]:
    """Return the shares of a gradient's noise E|g|^2 - |E g|^2 that come from its pivotal and its other tokens.

    The two are not independent: they add up to 1 minus twice their covariance over the noise. ``rho`` is the pivotal
    share over the sum of both.

    Raises:
        ValueError: the inner products of the parts are missing.
    """
    if grams.pivotal is None or grams.other is None:
        raise ValueError("noise_shares: expected the Grams of pivotal and other tokens")
    total = within(grams.method) - between(grams.method)
    pivotal = within(grams.pivotal) - between(grams.pivotal)
    other = within(grams.other) - between(grams.other)
    return {
        "pivotal": _over(pivotal, total),
        "other": _over(other, total),
        "rho": _over(pivotal, pivotal + other),
    }


def deciding_noise(grams: Grams) -> float:
    """Return E|p|^2 / |E p|^2 - 1 of the part p of a gradient that comes from pivotal tokens.

    Where the other tokens have parameters to themselves, as good as all that the policy learns at the pivotal ones is
    in p: noise elsewhere turns the whole gradient, and with it the cosine, but not what is learned here. NaN where
    |E p|^2 has no positive estimate.

    Raises:
        ValueError: the inner products of the part are missing.
    """
    if grams.pivotal is None:
        raise ValueError("deciding_noise: expected the Grams of pivotal tokens")
    mean2 = between(grams.pivotal)
    return within(grams.pivotal) / mean2 - 1 if mean2 > 0 else np.nan


class WeightMoments(NamedTuple):
    """Sums of 1, w and w^2 over a minibatch's tokens, weighted by ``score_noise``; arrays [M] for M minibatches."""

    pivotal: Any
    pivotal_weight: Any
    pivotal_square: Any
    other: Any
    other_square: Any


def weight_moments(
    weights: Float[Array, "B T"], noise: Float[Array, "B T"], pivotal: Bool[Array, "B T"]
) -> WeightMoments:
    """Compute the sums that ``noise_law`` needs; ``noise`` is 0 for tokens that do not count."""
    p, o = jnp.where(pivotal, noise, 0), jnp.where(pivotal, 0, noise)
    return WeightMoments(jnp.sum(p), jnp.sum(p * weights), jnp.sum(p * weights**2), jnp.sum(o), jnp.sum(o * weights**2))


def noise_law(rho: float, moments: WeightMoments) -> float:
    """Predict the noise of weights w relative to GRPO: (rho E_p[w^2] + (1 - rho) E_o[w^2]) / E_p[w]^2.

    rho is the pivotal tokens' share of plain GRPO's noise; E_p and E_o are means over pivotal and other tokens,
    weighted by ``score_noise``. If all pivotal tokens have weight b and all others weight a, this is
    rho + (1 - rho)(a / b)^2. Assumes that the other tokens carry no signal, that their noise is orthogonal to the
    signal, and that weights are independent of what they multiply. NaN without a pivotal token.
    """
    p, p1, p2, o, o2 = (float(np.sum(x)) for x in moments)
    if p == 0:
        return np.nan
    other_ratio = o2 / o if o > 0 else 0.0
    return _over(rho * p2 / p + (1 - rho) * other_ratio, (p1 / p) ** 2)


def score_noise(logps: Float[Array, "B T"], advantages: Float[Array, "B"], mask: Bool[Array, "B T"]) -> Array:
    """Return (1 - pi(y)) A^2, [B, T]: an estimate of the noise of a token's score, 0 outside the mask.

    The squared norm of the score with respect to the logits is on average 1 - sum pi^2 = E[1 - pi(y)]. A token that the
    policy writes with certainty has no score and no noise, whatever its weight.
    """
    return jnp.where(mask, (1 - jnp.exp(jnp.minimum(logps, 0))) * advantages[:, None] ** 2, 0)


def perfect_weights(pivotal: Bool[Array, "B T"], reasoning: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Return weights with all mass of the reasoning on its pivotal tokens; 1 outside it and in rows without any."""
    pivotal_inside = pivotal & reasoning
    count = jnp.sum(pivotal_inside, axis=-1, keepdims=True)
    scale = jnp.sum(reasoning, axis=-1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(reasoning & (count > 0), jnp.where(pivotal_inside, scale, 0.0), 1.0)


def flattened(tree: Any, *, size: int) -> Float[Array, "K"]:
    """Flatten a gradient to a float32 vector; above ``size`` numbers, to a count sketch of that length.

    The sketch adds every number with a random sign to a random place, the same in every call. Its inner products
    estimate those of the gradients without bias, with a standard deviation of about |x| |y| / sqrt(size).
    """
    leaves = [leaf.astype(jnp.float32).reshape(-1) for leaf in jax.tree.leaves(tree)]
    if sum(leaf.size for leaf in leaves) <= size:
        return jnp.concatenate(leaves)
    out = jnp.zeros(size, jnp.float32)
    for number, leaf in enumerate(leaves):
        places, signs = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
        at = jax.random.randint(places, leaf.shape, 0, size)
        out = out.at[at].add(leaf * jax.random.rademacher(signs, leaf.shape, jnp.float32))
    return out


def _root(square: float) -> float:
    return sqrt(square) if square > 0 else 0.0


def _over(a: float, b: float) -> float:
    return a / b if b > 0 and np.isfinite(a) else np.nan
