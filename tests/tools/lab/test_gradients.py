"""Gradient statistics from inner products, on gradients whose expectation and noise are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.tools.lab.gradients import (
    Grams,
    alignment,
    best_mixture,
    between,
    deciding_noise,
    flattened,
    noise_law,
    noise_shares,
    perfect_weights,
    score_noise,
    weight_moments,
    within,
)


def grams(g, u, pivotal=None):
    parts = () if pivotal is None else (pivotal @ pivotal.T, (g - pivotal) @ (g - pivotal).T)
    return Grams(g @ g.T, g @ u.T, u @ u.T, *parts)


def drawn(*, m=4000, d=12, signal=1.0, noise=2.0, seed=0):
    """Minibatch gradients: pivotal parts with a signal on the first axis and noise, other parts with noise alone."""
    rng = np.random.default_rng(seed)
    pivotal = noise * rng.standard_normal((m, d)) * (np.arange(d) < d // 2)
    other = 3.0 * rng.standard_normal((m, d)) * (np.arange(d) >= d // 2)
    pivotal[:, 0] += signal
    return pivotal, other


def test_means_of_inner_products():
    gram = np.array([[4.0, 1.0], [3.0, 8.0]])
    assert within(gram) == 6
    assert between(gram) == 2
    with pytest.raises(ValueError, match="at least 2 minibatches, got 1"):
        between(gram[:1, :1])


def test_a_longer_gradient_points_the_same_way():
    pivotal, other = drawn(m=50)
    u = pivotal + other
    found = alignment(grams(2.5 * u, u))
    assert found["ratio"] == pytest.approx(1)
    assert found["bias"] == pytest.approx(1)
    assert found["noise"] == pytest.approx(1)
    assert found["norm"] == pytest.approx(2.5)


def test_cosine_is_with_the_expected_gradient():
    """|mu| = 1, E |u|^2 = 1 + 6 * 4 + 6 * 9 = 79."""
    pivotal, other = drawn()
    u = pivotal + other
    found = alignment(grams(u, u))
    assert found["cosine"] == pytest.approx(79**-0.5, rel=0.05)
    perfect = alignment(grams(pivotal, u))
    assert perfect["cosine"] == pytest.approx(25**-0.5, rel=0.05)
    assert perfect["bias"] == pytest.approx(1, abs=0.05)
    turned = pivotal.copy()
    turned[:, 0], turned[:, 1] = pivotal[:, 1], pivotal[:, 0]  # its expectation lies at a right angle
    assert alignment(grams(turned, u))["bias"] == pytest.approx(0, abs=0.1)
    assert np.isnan(alignment(grams(-pivotal, u))["noise"])


def test_the_best_mixture_removes_what_it_can():
    """Half of the others' noise left: twice the method's gradient less GRPO's has none. Noise alone: nothing of it."""
    pivotal, other = drawn(m=1500)
    u = pivotal + other
    found = best_mixture(grams(pivotal + 0.5 * other, u))
    assert found["mixture"] == pytest.approx(2, rel=0.1)
    assert found["mixture_noise"] == pytest.approx(alignment(grams(pivotal, u))["noise"], rel=0.05)
    noise = np.random.default_rng(1).standard_normal(u.shape) * 5
    found = best_mixture(grams(u + noise, u))
    assert found["mixture"] == pytest.approx(0, abs=0.05)
    assert found["mixture_noise"] == pytest.approx(1, abs=0.02)
    assert np.isnan(best_mixture(grams(2 * u, u))["mixture"])


@pytest.mark.parametrize("ratio", [0.0, 1 / 3, 0.7, 2.0])
def test_noise_follows_the_law(ratio):
    """rho + (1 - rho)(a / b)^2 against the noise of b * pivotal + a * other."""
    pivotal, other = drawn(m=1500)
    u, b = pivotal + other, 1.7
    rho = noise_shares(grams(u, u, pivotal))["rho"]
    assert rho == pytest.approx(24 / 78, abs=0.02)
    measured = alignment(grams(b * (pivotal + ratio * other), u))["noise"]
    assert measured == pytest.approx(rho + (1 - rho) * ratio**2, rel=0.08)
    weights = jnp.asarray([[b, b * ratio, b * ratio]])
    mark, noise = jnp.asarray([[True, False, False]]), jnp.asarray([[2.0, 1.0, 5.0]])
    assert noise_law(rho, weight_moments(weights, noise, mark)) == pytest.approx(rho + (1 - rho) * ratio**2, rel=1e-5)


def test_only_tokens_with_noise_count_in_the_law():
    mark, noise = jnp.asarray([[True, True, False, False]]), jnp.asarray([[1.0, 3.0, 2.0, 0.0]])
    weights = jnp.asarray([[1.0, 2.0, 0.5, 100.0]])
    # E_p w = 7/4, E_p w^2 = 13/4, E_o w^2 = 1/4
    assert noise_law(0.5, weight_moments(weights, noise, mark)) == pytest.approx((13 / 8 + 1 / 8) / (49 / 16))
    assert np.isnan(noise_law(0.5, weight_moments(weights, noise, jnp.zeros_like(mark))))


def test_parts_of_the_noise():
    pivotal, other = drawn(m=1500)
    found = noise_shares(grams(pivotal + other, pivotal + other, pivotal))
    assert found["pivotal"] == pytest.approx(24 / 78, abs=0.03)
    assert found["other"] == pytest.approx(54 / 78, abs=0.03)
    with pytest.raises(ValueError, match="expected the Grams of pivotal and other tokens"):
        noise_shares(grams(other, other))


def test_the_noise_of_the_deciding_part_is_its_own_whatever_the_rest_does():
    """E|p|^2 = 25 |E p|^2 by construction; three times the filler turns the whole gradient, and not this part."""
    pivotal, other = drawn(m=1500)
    found = [deciding_noise(grams(pivotal + scale * other, pivotal + other, pivotal)) for scale in (0.0, 1.0, 3.0)]
    assert found[0] == found[1] == found[2] == pytest.approx(24, rel=0.4)  # |E p|^2 = 1 is estimated to +-.2
    assert np.isnan(deciding_noise(grams(other, other, other - other.mean(0))))
    with pytest.raises(ValueError, match="expected the Grams of pivotal tokens"):
        deciding_noise(grams(other, other))


def test_grams_of_some_minibatches():
    pivotal, other = drawn(m=6)
    whole, kept = grams(pivotal + other, pivotal, other), np.array([0, 2, 5])
    some = grams((pivotal + other)[kept], pivotal[kept], other[kept])
    for a, b in zip(whole.of(kept), some):
        np.testing.assert_allclose(a, b)
    assert grams(pivotal, pivotal).of(kept).pivotal is None


def test_score_noise_is_the_expected_score_of_the_logits():
    """Over all tokens y of a distribution, E (1 - pi(y)) is E |onehot(y) - pi|^2."""
    pi = np.array([0.5, 0.3, 0.15, 0.05])
    expected = sum(p * np.sum((np.eye(4)[y] - pi) ** 2) for y, p in enumerate(pi))
    found = score_noise(jnp.log(jnp.asarray(pi, jnp.float32))[None], jnp.asarray([-2.0]), jnp.ones((1, 4), bool))
    assert float(np.sum(found[0] * pi)) == pytest.approx(4 * expected, rel=1e-5)
    assert score_noise(jnp.zeros((1, 1)), jnp.ones(1), jnp.ones((1, 1), bool)).tolist() == [[0.0]]
    assert score_noise(jnp.full((1, 1), -1.0), jnp.ones(1), jnp.zeros((1, 1), bool)).tolist() == [[0.0]]


def test_perfect_weights_keep_the_mass():
    reasoning = jnp.asarray([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)
    pivotal = jnp.asarray([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0]], bool)
    assert perfect_weights(pivotal, reasoning).tolist() == [[0, 2, 0, 2, 1], [1, 1, 1, 1, 1]]


def test_a_sketch_keeps_inner_products():
    rng = np.random.default_rng(0)
    trees = [{"a": rng.standard_normal((40, 50)), "b": rng.standard_normal(3000)} for _ in range(2)]
    x, y = (jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), tree) for tree in trees)
    mixed = jax.tree.map(lambda a, b: a + 0.5 * b, x, y)
    exact = [np.asarray(flattened(t, size=5000)) for t in (x, y, mixed)]
    np.testing.assert_array_equal(exact[0], np.concatenate([np.ravel(x["a"]), np.ravel(x["b"])]))
    a, b, m = (np.asarray(flattened(t, size=1000)) for t in (x, y, mixed))
    assert a.shape == (1000,)
    np.testing.assert_allclose(a + 0.5 * b, m, atol=1e-4)  # linear, and the same signs and places in every call
    scale = np.linalg.norm(exact[0]) * np.linalg.norm(exact[2])
    assert abs(a @ m - exact[0] @ exact[2]) < 4 * scale / np.sqrt(1000)
    assert abs(a @ a - exact[0] @ exact[0]) < 4 * np.sqrt(2) * (exact[0] @ exact[0]) / np.sqrt(1000)
