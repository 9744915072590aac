"""Concentration and agreement measures: hand-worked rows, scipy, ties, padding."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import spearmanr

from oarjax.credit.diagnose import ess_ratio, recall_at_k, spearman, top_mass


def ones(*shape):
    return jnp.ones(shape, bool)


def test_ess_hand_worked():
    # uniform 1;  (1 + 3)^2 / (2 * (1 + 9)) = 16 / 20;  all on one of four 16 / (4 * 16) = 1/4
    weights = jnp.array([[5.0, 5.0, 5.0, 5.0], [1.0, 3.0, 99.0, 99.0], [4.0, 0.0, 0.0, 0.0]])
    mask = ones(3, 4).at[1, 2:].set(False)
    np.testing.assert_allclose(ess_ratio(weights, mask), [1, 0.8, 0.25], rtol=1e-6)


def test_top_mass_hand_worked():
    # 10 tokens: the largest one, 11 / 20.  11 tokens: the two largest, (11 + 1) / 21
    weights = jnp.array([[11.0] + [1.0] * 10])
    ten = ones(1, 11).at[0, 10].set(False)
    np.testing.assert_allclose(top_mass(weights, ten), [11 / 20], rtol=1e-6)
    np.testing.assert_allclose(top_mass(weights, ones(1, 11)), [12 / 21], rtol=1e-6)
    np.testing.assert_allclose(top_mass(weights, ones(1, 11), share=1.0), [1], rtol=1e-6)


@pytest.mark.parametrize("n", [10, 30, 70, 1000])
def test_a_tenth_of_a_round_number_is_exact(n):
    # .1 * 30 and the like come out a rounding above or below the whole number
    np.testing.assert_allclose(top_mass(jnp.ones((1, n)), ones(1, n)), [0.1], rtol=1e-6)


def test_spearman_against_scipy_with_ties_and_padding():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, (2, 5, 20)).astype(np.float32)
    mask = rng.random((5, 20)) < 0.8
    ours = spearman(jnp.asarray(np.where(mask, a, np.nan)), jnp.asarray(b), jnp.asarray(mask))
    truth = [spearmanr(x[m], y[m]).statistic for x, y, m in zip(a, b, mask)]
    np.testing.assert_allclose(ours, truth, atol=1e-5)


def test_spearman_hand_worked():
    # reversed order -1; monotone but not linear 1
    a = jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    b = jnp.array([[9.0, 5.0, 1.0], [1.0, 10.0, 1000.0]])
    np.testing.assert_allclose(spearman(a, b, ones(2, 3)), [-1, 1], atol=1e-6)


def test_recall_hand_worked():
    # 20 tokens, the best two are 3 and 7; causal are 3, 5, 7, 9 -> 2 / 4
    scores = jnp.zeros((1, 20)).at[0, 3].set(9.0).at[0, 7].set(8.0).at[0, 5].set(7.0)
    causal = jnp.zeros((1, 20), bool).at[0, jnp.array([3, 5, 7, 9])].set(True)
    np.testing.assert_allclose(recall_at_k(scores, causal, ones(1, 20)), [0.5])


def test_recall_of_constant_scores_is_chance_whatever_the_order():
    for where in (0, 11, 19):
        causal = jnp.zeros((1, 20), bool).at[0, where].set(True)
        np.testing.assert_allclose(recall_at_k(jnp.ones((1, 20)), causal, ones(1, 20)), [0.1], rtol=1e-6)


def test_recall_ignores_what_is_masked():
    scores = jnp.array([[9.0, 1.0, 2.0, 3.0]])
    mask = ones(1, 4).at[0, 0].set(False)
    causal = jnp.array([[True, False, False, True]])
    np.testing.assert_allclose(recall_at_k(scores, causal, mask), [1])


def test_undefined_is_nan():
    x, nothing = jnp.arange(3.0)[None], jnp.zeros((1, 3), bool)
    for value in (
        ess_ratio(x, nothing),
        top_mass(x, nothing),
        spearman(x, x, nothing),
        spearman(x, jnp.ones((1, 3)), ones(1, 3)),
        spearman(x, x.at[0, 0].set(jnp.nan), ones(1, 3)),
        recall_at_k(x, nothing, ones(1, 3)),
    ):
        assert np.isnan(value[0])
