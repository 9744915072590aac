"""Masked reductions against hand-worked rows, numpy, padding and permutation."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

from oarjax.rl.masked import (
    masked_count,
    masked_max,
    masked_mean,
    masked_min,
    masked_minmax,
    masked_quantile,
    masked_sum,
)

X = jnp.array([[4.0, 1.0, jnp.nan, 3.0], [jnp.inf, jnp.nan, 7.0, 5.0], [1.0, 2.0, 3.0, 4.0]])
M = jnp.array([[True, True, False, True], [False, False, True, False], [False] * 4])


def test_hand_worked_rows():
    # row 0 holds 4, 1, 3; row 1 holds 7; row 2 holds nothing, and NaN or inf outside the mask is never read
    np.testing.assert_array_equal(masked_count(M), [3, 1, 0])
    np.testing.assert_array_equal(masked_sum(X, M), [8, 7, 0])
    np.testing.assert_allclose(masked_mean(X, M), [8 / 3, 7, 0], rtol=1e-7)
    np.testing.assert_array_equal(masked_min(X, M), [1, 7, np.inf])
    np.testing.assert_array_equal(masked_max(X, M), [4, 7, -np.inf])
    # (4-1)/3, (1-1)/3, -, (3-1)/3; a single value has no spread
    np.testing.assert_allclose(masked_minmax(X, M), [[1, 0, 0, 2 / 3], [0] * 4, [0] * 4], rtol=1e-7)
    # sorted 1 3 4, index .25 * 2 = .5 -> 2
    np.testing.assert_allclose(masked_quantile(X, M, level=0.25), [2, 7, 0], rtol=1e-7)


def test_valid_nan_shows():
    row, all_valid = jnp.array([[1.0, jnp.nan, 2.0]]), jnp.ones((1, 3), bool)
    assert np.isnan(masked_sum(row, all_valid)[0])
    assert np.isnan(masked_minmax(row, all_valid)).all()


def test_bfloat16_is_summed_in_float32():
    # bfloat16 has 8 bits: its own running sum of ones stops at 256
    ones = jnp.ones((1, 1000), jnp.bfloat16)
    total = masked_sum(ones, jnp.ones((1, 1000), bool))
    assert total.dtype == jnp.float32
    assert total[0] == 1000


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8),
    level=st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.77, 1.0]),
    seed=st.integers(0, 9),
)
def test_any_row_padded_and_shuffled_equals_numpy(values, level, seed):
    width = 11  # one shape for every example
    order = np.random.default_rng(seed).permutation(width)
    row, mask = np.full(width, np.nan, np.float32), np.zeros(width, bool)
    row[: len(values)], mask[: len(values)] = values, True
    row, mask = jnp.asarray(row[order])[None], jnp.asarray(mask[order])[None]
    np.testing.assert_allclose(masked_sum(row, mask)[0], np.sum(values), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(
        masked_quantile(row, mask, level=level)[0], np.quantile(values, level), rtol=1e-5, atol=1e-5
    )
