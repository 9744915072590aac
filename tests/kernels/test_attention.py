"""attend against the plain softmax with repeated heads, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.kernels import attention
from oarjax.kernels.attention import Segment

attend = jax.jit(attention.attend)  # compiled whole: faster than one operation after another


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def segment(*arrays):
    return Segment.of(*map(jnp.asarray, arrays))


def plain(q, k, v, mask):
    """Heads repeated, one softmax: the definition."""
    share = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, share, 2), np.repeat(v, share, 2)
    scores = np.einsum("bnah,bmah->banm", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("banm,bmah->bnah", weights / weights.sum(-1, keepdims=True), v)


def test_by_hand():
    """One head of width 1: scores 1*0 and 1*ln 3, weights 1/4 and 3/4, values 4 and 8: 1 + 6 = 7."""
    k = jnp.array([0.0, np.log(3.0)]).reshape(1, 2, 1, 1)
    v = jnp.array([4.0, 8.0]).reshape(1, 2, 1, 1)
    out = attend(jnp.ones((1, 1, 1, 1)), (segment(k, v, jnp.ones((1, 1, 2), bool)),))
    np.testing.assert_allclose(out.ravel(), [7.0], rtol=1e-6)


def test_grouped_heads_equal_repeated_heads():
    q, k, v = random(0, 2, 3, 6, 4), random(1, 2, 5, 2, 4), random(2, 2, 5, 2, 4)
    mask = np.arange(5) <= np.arange(3)[:, None] + np.array([1, 2])[:, None, None]
    np.testing.assert_allclose(attend(q, (segment(k, v, mask),)), plain(q, k, v, mask), atol=1e-6)


def test_segments_equal_one_long_segment_and_a_shared_one_its_copies():
    """Rows 0-2 share row 0 of the first segment, rows 3-5 row 1."""
    q = random(0, 6, 3, 4, 8) * 4
    shared = random(1, 2, 5, 2, 8), random(2, 2, 5, 2, 8)
    own = random(3, 6, 4, 2, 8), random(4, 6, 4, 2, 8)
    shared_mask = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)[:, None]
    own_mask = np.broadcast_to(np.tril(np.ones((3, 4), bool), 1), (6, 3, 4))
    got = attend(q, (segment(*shared, shared_mask), segment(*own, own_mask)))
    k, v = (np.concatenate([np.repeat(s, 3, 0), o], 1) for s, o in zip(shared, own))
    mask = np.concatenate([np.broadcast_to(np.repeat(shared_mask, 3, 0), (6, 3, 5)), own_mask], 2)
    np.testing.assert_allclose(got, plain(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize("by_query", [False, True])
def test_blocks_of_queries_are_all_of_them_at_once(by_query):
    """Ragged new tokens after a prefix of their own and one that two rows share, masked by row or by query."""
    length = 2 * attention.LEAST_QUERIES + 3
    q, k, v = (random(seed, 4, length, heads, 8) for seed, heads in enumerate((4, 2, 2)))
    valid = jnp.arange(length) >= np.array([0, 5, length - 1, 70])[:, None]
    masks = [jnp.arange(6) < np.array([6, 4])[:, None, None], jnp.arange(3) < np.array([3, 0, 1, 2])[:, None, None]]
    if by_query:
        masks[0] = masks[0] & (np.random.default_rng(9).random((2, 2 * length, 6)) < 0.5)
    stored = [(random(7, 2, rows, 8, slots), random(8, 2, rows, slots, 8)) for rows, slots in ((2, 6), (4, 3))]

    def whole(stored, q, k, v):
        causal = valid[:, None] & jnp.tril(jnp.ones((length, length), bool))
        segments = [Segment(*arrays, mask) for arrays, mask in zip(stored, masks)]
        return attention.attend(q, (*segments, Segment.of(k, v, causal)))

    def pulled(mix):
        out, pull = jax.vjp(mix, stored, q, k, v)
        return out, pull(random(11, *out.shape))

    blocks = attention.segment_mixer(masks, valid)
    for got, expected in zip(*(jax.tree.leaves(jax.jit(pulled, static_argnums=0)(f)) for f in (blocks, whole))):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_a_query_with_nothing_to_attend_to_gives_zero_and_finite_gradients():
    q, k, v = random(0, 1, 2, 2, 4), random(1, 1, 3, 1, 4), random(2, 1, 3, 1, 4)
    mask = np.array([[[False] * 3, [True, False, True]]])
    out = attend(q, (segment(k, v, mask), segment(k, v, jnp.zeros((1, 1, 3), bool))))
    np.testing.assert_array_equal(out[0, 0], 0.0)
    np.testing.assert_allclose(out[0, 1], plain(q[:, 1:], k, v, mask[:, 1:])[0, 0], atol=1e-6)
    gradient = jax.jit(jax.grad(lambda *qkv: attend(qkv[0], (segment(*qkv[1:], mask),)).sum(), argnums=(0, 1, 2)))
    gradients = gradient(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0][0, 0], 0.0)


def test_large_scores_do_not_overflow():
    q, k = jnp.full((1, 1, 1, 4), 1e3), jnp.stack([jnp.full((1, 1, 4), s) for s in (1e3, 1e3, -1e3)], 1)
    v = jnp.arange(12.0).reshape(1, 3, 1, 4)
    out = attend(q, (segment(k, v, jnp.ones((1, 1, 3), bool)),))
    np.testing.assert_allclose(out.ravel(), [2, 3, 4, 5])  # the mean of the first two


def test_bfloat16_operands_keep_float32_sums():
    """4,096 equal keys: each weight is 1; a bfloat16 sum would stop growing at 256."""
    q, k = jnp.zeros((1, 1, 1, 2), jnp.bfloat16), jnp.zeros((1, 4096, 1, 2), jnp.bfloat16)
    out = attend(q, (segment(k, k + 1, jnp.ones((1, 1, 4096), bool)),))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
