"""Rotary embedding by hand, and YaRN's ramp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.models.rope import Yarn, inverse_frequencies, rotate, rotation, yarn_attention_factor

YARN = Yarn(factor=4.0, original_max_position=64, attention_factor=1.0, beta_fast=8.0, beta_slow=1.0, truncate=False)


def test_frequencies():
    """theta 100, width 4: pairs turn by 100^0 = 1 and 100^(-2/4) = 0.1 radians per position."""
    np.testing.assert_allclose(inverse_frequencies(4, theta=100.0, yarn=None), [1.0, 0.1])


def test_a_quarter_turn():
    """Pairs are half a head apart: (x0, x2) turns by pi/2 to (-x2, x0), (x1, x3) stays."""
    cos, sin = rotation(jnp.array([[1]]), np.array([np.pi / 2, 0.0]), scale=1.0, dtype=jnp.float32)
    out = rotate(jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4), cos, sin)
    np.testing.assert_allclose(out.ravel(), [-3, 2, 1, 4], atol=1e-6)


def test_scores_depend_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    frequencies = inverse_frequencies(8, theta=1e4, yarn=None)

    def score(i, j):
        turned = [
            rotate(x, *rotation(jnp.array([[p]]), frequencies, scale=1.0, dtype=jnp.float32))
            for x, p in ((q, i), (k, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 1e-3


def test_scale_multiplies_cos_and_sin():
    frequencies = inverse_frequencies(4, theta=100.0, yarn=None)
    cos, sin = rotation(jnp.array([[0, 3]]), frequencies, scale=1.5, dtype=jnp.float32)
    np.testing.assert_allclose(cos[0], [[1.5, 1.5], [1.5 * np.cos(3), 1.5 * np.cos(0.3)]], rtol=1e-6)
    np.testing.assert_allclose(sin[0, 0], 0.0)


def test_angles_follow_the_dtype(x64):
    """Position 30,001 at 0.1 radians: float32 is off by about 1e-4, float64 is not."""
    cos, _ = rotation(jnp.array([[30_001]]), np.array([0.1]), scale=1.0, dtype=jnp.float64)
    assert float(cos[0, 0, 0]) == pytest.approx(np.cos(3000.1), abs=1e-12)


def test_yarn_ramp_by_hand():
    """Width 8, theta 10^4, 64 positions: the pair that turns r times is 8 ln(64 / (2 pi r)) / (2 ln 10^4).

    r = 8: 4 ln(1.27324) / 9.21034 = 0.10491; r = 1: 4 ln(10.18592) / 9.21034 = 1.00800.
    So pair 0 keeps its frequency, pairs 2 and 3 are divided by 4, and pair 1 is stretched by
    (1 - 0.10491) / (1.00800 - 0.10491) = 0.99114: 0.1 * (0.25 * 0.99114 + 0.00886) = 0.0256645.
    """
    plain = inverse_frequencies(8, theta=1e4, yarn=None)
    got = inverse_frequencies(8, theta=1e4, yarn=YARN)
    np.testing.assert_allclose(got[[0, 2, 3]], plain[[0, 2, 3]] / [1, 4, 4])
    assert got[1] == pytest.approx(0.0256645, rel=1e-4)


def test_yarn_truncates_the_ramp_to_whole_pairs():
    """0.105 down to 0, 1.008 up to 2: pair 1 lies half way, 0.1 * (0.25 + 1) / 2 = 0.0625."""
    got = inverse_frequencies(8, theta=1e4, yarn=dataclasses.replace(YARN, truncate=True))
    assert got[1] == pytest.approx(0.0625)


def test_a_ramp_of_no_width_is_a_step():
    """Both ends at pair 1.008: pairs 0 and 1 stay, 2 and 3 are stretched, and nothing is NaN."""
    step = dataclasses.replace(YARN, beta_fast=1.0)
    plain = inverse_frequencies(8, theta=1e4, yarn=None)
    np.testing.assert_allclose(inverse_frequencies(8, theta=1e4, yarn=step), plain / [1, 1, 4, 4])


def test_attention_factor():
    """0.1 ln 4 + 1 = 1.138629; with mscales .7 and .4: (0.07 ln 4 + 1) / (0.04 ln 4 + 1) = 1.039404."""
    assert yarn_attention_factor(4.0, mscale=None, mscale_all_dim=None) == pytest.approx(1.138629, abs=1e-6)
    assert yarn_attention_factor(4.0, mscale=0.7, mscale_all_dim=0.4) == pytest.approx(1.039404, abs=1e-6)
    assert yarn_attention_factor(4.0, mscale=0.7, mscale_all_dim=None) == pytest.approx(1.138629, abs=1e-6)
    assert yarn_attention_factor(1.0, mscale=None, mscale_all_dim=None) == 1.0
