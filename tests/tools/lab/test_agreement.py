"""Figures of one method on hand-made rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.credit.diagnose import separation
from oarjax.tools.lab.agreement import CausalEvidence, agreement, best_agreement, concentration

MASK = jnp.array([[True] * 10 + [False] * 2, [True] * 4 + [False] * 8])
EXACT = jnp.array([[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99, 99], [1.0, 2, 3, 4, 99, 99, 99, 99, 99, 99, 99, 99]])


def rows(*places):
    out = np.zeros(MASK.shape, bool)
    for row, at in enumerate(places):
        out[row, list(at)] = True
    return jnp.asarray(out)


def evidence(**changes):
    fields = {"reasoning": MASK, "exact": EXACT, "direct": rows([0, 1], []), "total": None, "known": rows([9], [0, 1])}
    return CausalEvidence(**(fields | changes))


def test_exact_scores_agree_with_themselves():
    found = agreement(EXACT, evidence(), share=0.1)
    np.testing.assert_allclose(found["spearman"], [1, 1], rtol=1e-6)
    np.testing.assert_array_equal(found["recall_exact"], [1, 1])
    np.testing.assert_allclose(found["auc_exact"], [1, 1], rtol=1e-6)
    # The top tenth of ten tokens is one: half of the two direct ones. Row 1 has none to find.
    np.testing.assert_array_equal(found["recall_direct"], [0.5, np.nan])
    np.testing.assert_array_equal(found["recall_known"], [0, 0])
    assert "recall_total" not in found


def test_scores_turned_round_find_the_others():
    found = agreement(-EXACT, evidence(), share=0.1)
    np.testing.assert_allclose(found["spearman"], [-1, -1], rtol=1e-6)
    np.testing.assert_array_equal(found["recall_exact"], [0, 0])
    np.testing.assert_array_equal(found["recall_known"], [1, 0.5])
    np.testing.assert_allclose(found["auc_known"], [1, 1], rtol=1e-6)


def test_equal_scores_are_chance():
    found = agreement(jnp.zeros(EXACT.shape), evidence(), share=0.1)
    assert np.isnan(found["spearman"]).all()
    np.testing.assert_allclose(found["recall_exact"], [1 / 10, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(found["auc_direct"], [0.5, np.nan])


def test_best_recall_is_bounded_by_the_places():
    best = best_agreement(evidence(), share=0.1)
    assert set(best) == {"recall_direct", "recall_known"}
    np.testing.assert_array_equal(best["recall_direct"], [0.5, np.nan])
    np.testing.assert_array_equal(best["recall_known"], [1, 0.5])


def test_concentration_of_weights():
    weights = jnp.where(jnp.arange(12) == 0, 2.0, 1.0) * jnp.ones((2, 1))
    found = concentration(weights, MASK, share=0.1)
    np.testing.assert_allclose(found["ess"], [121 / (10 * 13), 25 / (4 * 7)], rtol=1e-6)
    np.testing.assert_allclose(found["top_mass"], [2 / 11, 2 / 5], rtol=1e-6)


def test_separation_counts_pairs():
    """Causal 3 and 1 against 2, 1, 0: 3 wins all three; 1 loses, ties and wins: (3 + 1.5) / 6."""
    scores = jnp.array([[3.0, 2, 1, 1, 0, 50]])
    causal = jnp.array([[True, False, True, False, False, True]])
    mask = jnp.array([[True] * 5 + [False]])
    np.testing.assert_allclose(separation(scores, causal, mask), [4.5 / 6], rtol=1e-6)


@pytest.mark.parametrize("causal", [[False] * 3, [True] * 3])
def test_separation_needs_both_kinds(causal):
    found = separation(jnp.array([[1.0, 2, 3]]), jnp.array([causal]), jnp.ones((1, 3), bool))
    assert np.isnan(found).all()


def test_scores_that_are_not_finite_are_undefined():
    scores = jnp.array([[1.0, jnp.nan, 3]])
    assert np.isnan(separation(scores, jnp.array([[True, False, False]]), jnp.ones((1, 3), bool))).all()
