"""KTAE (arXiv 2505.16826): a bonus for token ids that tell a group's correct completions from its wrong ones.

Evidence: released code read. Departures: a row is correct where its group advantage is positive and wrong where it is
negative, which for rewards of 0 and 1 is the released rule; probabilities of tables count as ties within a relative
1e-4, since float32 would break ties by rounding; no id is exempt (released: the padding id); Fisher's term and the
information gain have weights that can be set, both 1 in the released code whatever its launch script says.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import lgamma
from jaxtyping import Array, Bool, Float, Int

from oarjax.credit.groups import peer_sum, peers_of
from oarjax.credit.method import CreditMethod
from oarjax.credit.signals import Context, CreditInputs, all_required

K1, B = 2.0, 0.5
"""Of the term frequency, as in BM25."""
EPS = 1e-5
"""Added to the divisor of the ratio of frequencies, as released: an id of one side alone gives up to K1 / EPS."""


def key_token_bonus(
    tokens: Int[Array, "B T"],
    completion: Bool[Array, "B T"],
    correct: Bool[Array, "B"],
    wrong: Bool[Array, "B"],
    groups: Int[Array, "B"],
    *,
    fisher: float = 1.0,
    gain: float = 1.0,
    scale: float = 1.0,
) -> Float[Array, "B T"]:
    """Compute the bonus of every token's id in its group, in (-scale, scale); 0 outside and in one-sided groups.

    Of an id, a and b are the numbers of correct and of wrong rows that hold it, c and d of those that do not.

        p     two-sided p-value of Fisher's exact test of [[a, b], [c, d]];  f = exp(-2 p), 0 where p = 1
        ig    information gain in bits: H(correct) - H(correct | the row holds the id)
        tf    BM25's term frequency q (k1 + 1) / (q + k1 (1 - b + b n / nbar)) of each side, q the id's share of the
              side's n tokens, nbar the mean of both sides' n
        x     asin sqrt(a / (a + c)) - asin sqrt(b / (b + d)) + tf+ / (tf- + 1e-5) - tf- / (tf+ + 1e-5)
        bonus scale * (2 sigmoid((fisher f + gain ig) x / (fisher + gain)) - 1)
    """
    peers = peers_of(groups, completion.any(-1))
    sides = jnp.stack([correct, wrong], -1).astype(float)  # float64 in a float64 run
    rows_of = peer_sum(peers, sides)  # [B, 2]: correct and wrong rows of the group
    tokens_of = peer_sum(peers, sides * completion.sum(-1, keepdims=True))
    holding, count = _occurrences(tokens, completion & (correct | wrong)[:, None], sides, groups)
    a, b = holding[..., 0], holding[..., 1]
    c, d = (rows_of[:, None] - holding)[..., 0], (rows_of[:, None] - holding)[..., 1]
    p = _fisher_p(a, b, c, d)
    f = jnp.where(p < 1 - 1e-4, jnp.exp(-2 * p), 0)
    n = jnp.maximum(tokens_of, 1)
    share = count / n[:, None]
    length = K1 * (1 - B + B * tokens_of / jnp.maximum(tokens_of.mean(-1, keepdims=True), 1))
    tf = share * (K1 + 1) / (share + length[:, None])
    ratio = tf[..., 0] / (tf[..., 1] + EPS) - tf[..., 1] / (tf[..., 0] + EPS)
    x = _angle(a, c) - _angle(b, d) + ratio
    strength = (fisher * f + gain * _information_gain(a, b, c, d)) / (fisher + gain)
    both_sides = (rows_of > 0).all(-1)[:, None]
    return jnp.where(completion & both_sides, scale * jnp.tanh(strength * x / 2), 0)


def _occurrences(
    tokens: Int[Array, "B T"], counted: Bool[Array, "B T"], sides: Float[Array, "B 2"], groups: Int[Array, "B"]
) -> tuple[Float[Array, "B T 2"], Float[Array, "B T 2"]]:
    """Count, for every token's id in its group, the rows of each side that hold it and its tokens on each side.

    Sorting by group, id and row puts the occurrences of an id side by side: no table over the vocabulary.
    """
    B, T = tokens.shape
    row = jnp.broadcast_to(jnp.arange(B)[:, None], (B, T)).reshape(-1)
    group = jnp.where(counted.reshape(-1), groups[row], jnp.iinfo(jnp.int32).max)  # what does not count comes last
    ids = tokens.reshape(-1)
    order = jnp.lexsort((row, ids, group))
    starts = [jnp.concatenate([jnp.ones(1, bool), x[order][1:] != x[order][:-1]]) for x in (group, ids, row)]
    run = jnp.cumsum(starts[0] | starts[1]) - 1
    first = starts[0] | starts[1] | starts[2]
    by_side = sides[row[order]] * counted.reshape(-1)[order][:, None]
    sums = [jax.ops.segment_sum(x, run, num_segments=B * T)[run] for x in (by_side * first[:, None], by_side)]
    holding, count = (jnp.zeros_like(x).at[order].set(x).reshape(B, T, 2) for x in sums)
    return holding, count


def _fisher_p(a: Array, b: Array, c: Array, d: Array) -> Float[Array, "B T"]:
    """Sum the hypergeometric probabilities of all tables with these margins that are at most as likely as this one."""
    holding, correct, n = a + b, a + c, a + b + c + d

    def choose(n: Array, k: Array) -> Array:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    def probability(k: Array) -> Array:
        possible = (k >= jnp.maximum(0, holding + correct - n)) & (k <= jnp.minimum(holding, correct))
        safe = jnp.where(possible, k, a)
        logs = choose(correct, safe) + choose(n - correct, holding - safe) - choose(n, holding)
        return jnp.where(possible, jnp.exp(logs), 0)

    observed = probability(a) * (1 + 1e-4)

    def add(k: Array, total: Array) -> Array:
        p = probability(jnp.full_like(a, k))
        return total + jnp.where(p <= observed, p, 0)

    return jax.lax.fori_loop(0, jnp.max(correct).astype(jnp.int32) + 1, add, jnp.zeros_like(a))


def _information_gain(a: Array, b: Array, c: Array, d: Array) -> Float[Array, "B T"]:
    n = jnp.maximum(a + b + c + d, 1)
    parts = (a + b) / n * _entropy(a, b) + (c + d) / n * _entropy(c, d)
    return _entropy(a + c, b + d) - parts


def _entropy(x: Array, y: Array) -> Float[Array, "B T"]:
    """Compute the entropy of two counts in bits; 0 without any."""
    share = jnp.stack([x, y]) / jnp.maximum(x + y, 1)
    return -jnp.sum(jnp.where(share > 0, share * jnp.log2(jnp.where(share > 0, share, 1)), 0), axis=0)


def _angle(held: Array, not_held: Array) -> Float[Array, "B T"]:
    share = held / jnp.maximum(held + not_held, 1)
    return jnp.arcsin(jnp.sqrt(share))


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Add to every token the bonus of its id in its group."""
    tokens, groups = all_required(inputs.signals, ("tokens", "groups"), context)
    settings = vars(context.credit.ktae)
    return key_token_bonus(tokens, inputs.completion, inputs.advantages > 0, inputs.advantages < 0, groups, **settings)


METHOD = CreditMethod(weigh, name="ktae", kind="bonus", coupling="group", needs=("tokens", "groups"))
