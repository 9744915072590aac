"""Ratios and surrogates: hand-worked cases, with gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.rl.surrogates import cispo_surrogate, clipped_surrogate, policy_ratio

NAN = jnp.nan


def test_token_ratio_is_bounded_and_one_outside():
    logps = jnp.log(jnp.array([[0.5, 0.2, 0.9]])).at[0, 2].set(NAN)
    ratio = policy_ratio(logps, jnp.log(jnp.array([[0.25, 0.4, 0.1]])), jnp.array([[True, True, False]]))
    np.testing.assert_allclose(ratio, [[2, 0.5, 1]], rtol=1e-6)
    far = policy_ratio(jnp.array([[0.0, -90.0]]), jnp.array([[-90.0, 0.0]]), jnp.ones((1, 2), bool))
    np.testing.assert_allclose(far, [[np.exp(20), np.exp(-20)]], rtol=1e-5)


def test_sequence_ratio_is_the_geometric_mean():
    # 2, 1/2, 8 -> cube root of 8 = 2 for every token; the fourth is not valid
    logps, old = jnp.log(jnp.array([[2.0, 0.5, 8.0, 5.0]])), jnp.zeros((1, 4))
    mask = jnp.array([[True, True, True, False]])
    np.testing.assert_allclose(policy_ratio(logps, old, mask, level="sequence"), [[2] * 4], rtol=1e-6)
    # d ratio / d logp = ratio / 3 for each of the three
    slope = jax.grad(lambda x: policy_ratio(x, old, mask, level="sequence")[0, 0])(logps)
    np.testing.assert_allclose(slope, [[2 / 3, 2 / 3, 2 / 3, 0]], rtol=1e-6)


RATIO = jnp.array([[0.5, 1.0, 1.2, 2.0, 4.0]])


def test_clipped_surrogate_hand_worked():
    surrogate = partial(clipped_surrogate, RATIO, clip_low=0.2, clip_high=0.3)
    # A = 1: min(r, clip(r, .8, 1.3)).   A = -1: the larger of the two, negated
    np.testing.assert_allclose(surrogate(jnp.ones((1, 5))), [[0.5, 1, 1.2, 1.3, 1.3]], rtol=1e-6)
    np.testing.assert_allclose(surrogate(-jnp.ones((1, 5))), [[-0.8, -1, -1.2, -2, -4]], rtol=1e-6)
    # dual clip at 3 touches only A < 0
    np.testing.assert_allclose(surrogate(jnp.ones((1, 5)), dual_clip=3.0), [[0.5, 1, 1.2, 1.3, 1.3]], rtol=1e-6)
    np.testing.assert_allclose(surrogate(-jnp.ones((1, 5)), dual_clip=3.0), [[-0.8, -1, -1.2, -2, -3]], rtol=1e-6)


def test_clipped_tokens_have_no_gradient():
    def slope(advantage):
        a = jnp.full((1, 5), advantage)
        clipped = partial(clipped_surrogate, advantages=a, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
        return jax.grad(lambda r: clipped(r).sum())(RATIO)

    np.testing.assert_allclose(slope(1.0), [[1, 1, 1, 0, 0]])
    np.testing.assert_allclose(slope(-1.0), [[0, -1, -1, -1, 0]])


def test_dual_clip_is_a_cap_on_the_unclipped_ratio_when_above_the_range():
    ratio = jnp.linspace(0.1, 6, 60)[None]
    for advantage in (-1.5, 1.5):
        a = jnp.full(ratio.shape, advantage)
        capped = jnp.minimum(jnp.minimum(ratio, 1.5) * a, jnp.clip(ratio, 0.8, 1.28) * a)
        np.testing.assert_allclose(clipped_surrogate(ratio, a, dual_clip=1.5), capped, rtol=1e-6)


def test_cispo_hand_worked():
    # weights min(r, 2) are constants: value and gradient in logp are w * A * (logp, 1)
    logps, a = jnp.full((1, 5), -0.5), jnp.full((1, 5), 3.0)
    weights = np.array([[0.5, 1, 1.2, 2, 2]])
    np.testing.assert_allclose(cispo_surrogate(logps, RATIO, a, ratio_cap=2.0), -1.5 * weights, rtol=1e-6)
    slope = jax.grad(lambda x: cispo_surrogate(x, jnp.exp(x) * 0 + RATIO, a, ratio_cap=2.0).sum())(logps)
    np.testing.assert_allclose(slope, 3 * weights, rtol=1e-6)
