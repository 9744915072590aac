"""The alternatives to OAR: uniform weights, and OAR's own weights on the wrong tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from oarjax.credit.permuted import permuted_weights
from oarjax.credit.uniform import uniform_weights
from oarjax.oar.diagnose import ess_ratio

RNG = np.random.default_rng(0)
WEIGHTS = jnp.asarray(RNG.lognormal(size=(5, 16)), jnp.float32)
REASONING = jnp.asarray(RNG.random((5, 16)) < 0.6).at[4].set(False)


def test_uniform():
    np.testing.assert_array_equal(uniform_weights(REASONING), np.ones((5, 16)))


def test_permuted_keeps_the_histogram_and_the_other_tokens():
    shuffled = permuted_weights(WEIGHTS, REASONING, jax.random.key(3))
    for old, new, mask in zip(WEIGHTS, shuffled, REASONING):
        np.testing.assert_array_equal(np.sort(old[mask]), np.sort(new[mask]))
        np.testing.assert_array_equal(old[~mask], new[~mask])
    assert (np.asarray(shuffled) != np.asarray(WEIGHTS)).sum() > 10
    np.testing.assert_allclose(ess_ratio(shuffled, REASONING)[:4], ess_ratio(WEIGHTS, REASONING)[:4], rtol=1e-6)


def test_permuted_depends_on_the_key_and_the_row():
    same = jnp.tile(jnp.arange(16.0), (5, 1))
    everywhere = jnp.ones((5, 16), bool)
    one, two = (permuted_weights(same, everywhere, jax.random.key(k)) for k in (0, 1))
    assert (one != two).any()
    assert len({tuple(row) for row in np.asarray(one)}) == 5
    np.testing.assert_array_equal(one, permuted_weights(same, everywhere, jax.random.key(0)))


def test_padding_changes_nothing():
    key = jax.random.key(7)
    wide = permuted_weights(jnp.pad(WEIGHTS, ((0, 2), (0, 9))), jnp.pad(REASONING, ((0, 2), (0, 9))), key)
    np.testing.assert_array_equal(wide[:5, :16], permuted_weights(WEIGHTS, REASONING, key))


def test_every_order_is_equally_likely():
    # 6 orders of 3 tokens over 1200 rows: 200 each, std sqrt(1200 * 1/6 * 5/6) = 13; 65 is 5 of these
    rows = 1200
    weights = jnp.tile(jnp.array([0.0, 1.0, 2.0]), (rows, 1))
    shuffled = permuted_weights(weights, jnp.ones((rows, 3), bool), jax.random.key(11))
    _, counts = np.unique(np.asarray(shuffled), axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.abs(counts - 200).max() < 65
