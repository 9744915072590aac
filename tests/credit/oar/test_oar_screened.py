"""Which tokens are scored exactly, and how both kinds of score join."""

import jax.numpy as jnp
import numpy as np

from oarjax.credit.oar.oar_screened import screened_scores, top_share

MASK = jnp.array([[True] * 5 + [False], [True] * 2 + [False] * 4, [False] * 6])


def test_the_top_share_of_each_row():
    scores = jnp.array([[1.0, 5, 3, 3, 2, 99], [0, 0, 9, 9, 9, 9], [1, 1, 1, 1, 1, 1]])
    # ceil(.4 * 5) = 2: the 5 and the earlier 3; ceil(.4 * 2) = 1: the earlier zero; none of none.
    expected = [[False, True, True, False, False, False], [True] + [False] * 5, [False] * 6]
    np.testing.assert_array_equal(top_share(scores, MASK, share=0.4), expected)
    np.testing.assert_array_equal(top_share(scores, MASK, share=1.0), MASK)
    assert not top_share(scores, MASK, share=0.0).any()


def test_others_are_brought_to_the_scale_of_the_exact_scores():
    exact = jnp.array([[8.0, 4, 0, 0, 0, 0]])
    estimate = jnp.array([[20.0, 4, 3, 2, 1, 7]])
    chosen = jnp.array([[True, True, False, False, False, False]])
    # 12 / 24 = 1/2; the highest other, 3, becomes 1.5, below the median 6 of the chosen.
    found = screened_scores(exact, estimate, chosen, MASK[:1])
    np.testing.assert_allclose(found, [[8, 4, 1.5, 1, 0.5, 0]])


def test_others_stay_below_the_median_of_the_chosen():
    exact = jnp.array([[8.0, 1, 3, 0, 0, 0]])
    estimate = jnp.array([[1.0, 1, 1, 0.9, 0.3, 0]])  # 12 / 3 = 4 would make .9 a 3.6; the median is 3
    found = screened_scores(exact, estimate, jnp.array([[True] * 3 + [False] * 3]), MASK[:1])
    np.testing.assert_allclose(found, [[8, 1, 3, 3, 1, 0]], rtol=1e-6)


def test_where_nothing_was_chosen_estimates_stay():
    estimate = jnp.array([[1.0, 2, 3, 4, 5, 6]])
    found = screened_scores(jnp.zeros((1, 6)), estimate, jnp.zeros((1, 6), bool), MASK[:1])
    np.testing.assert_allclose(found, [[1, 2, 3, 4, 5, 0]])
