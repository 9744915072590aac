"""The OAR gate, step by step: hand-worked rows, mass, fallbacks, padding, permutation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.config.changes import changed
from oarjax.credit.gate import gate, normalise, oar_weights, preserve_mass, reshape
from oarjax.credit.settings import CreditSettings
from oarjax.rl.masked import masked_sum

# expm1 of these gives scores whose log1p is 0, 1, 2, 3, 4: h = 0, .25, .5, .75, 1
H = jnp.array([[0.0, 0.25, 0.5, 0.75, 1.0, 0.0]])
SCORES = jnp.expm1(4 * H)
ROW = jnp.array([[True, True, True, True, True, False]])


def random_scores(rows=4, tokens=12, seed=0):
    rng = np.random.default_rng(seed)
    scores = jnp.asarray(rng.lognormal(size=(rows, tokens)), jnp.float32)
    return scores, jnp.asarray(rng.random((rows, tokens)) < 0.7)


def test_normalise_hand_worked():
    np.testing.assert_allclose(normalise(SCORES, ROW), H, atol=1e-6)


def test_normalise_signs():
    # log1p(-.5) = -.693, log1p(1) = .693. Clamped: 0, 0, 1. Signed: 0, .5, 1
    scores, row = jnp.array([[-0.5, 0.0, 1.0]]), jnp.ones((1, 3), bool)
    np.testing.assert_allclose(normalise(scores, row, signs="clamped"), [[0, 0, 1]])
    np.testing.assert_allclose(normalise(scores, row, signs="signed"), [[0, 0.5, 1]], rtol=1e-6)


def test_quantile_gate_hand_worked():
    # tau .4 of five values: index 1.6, c = .25 + .6 * .25 = .4.  0 -> floor .1;  .25 / .4 = .625;
    # above: 1 + 2 (h - .4) / .6 = 1.3333, 2.1667, 3.  The sixth token is no reasoning: 1
    expected = [[0.1, 0.625, 4 / 3, 13 / 6, 3, 1]]
    np.testing.assert_allclose(gate(H, ROW, tau=0.4, boost=2.0, floor=0.1), expected, rtol=1e-6)


def test_level_gate_hand_worked():
    # c = .5: 0 -> .1, .25 / .5 = .5, 1, 1 + 1 * .25 / .5 = 1.5, 2
    expected = [[0.1, 0.5, 1, 1.5, 2, 1]]
    np.testing.assert_allclose(gate(H, ROW, rule="level", tau=0.5, boost=1.0, floor=0.1), expected, rtol=1e-6)


def test_boost_alone_and_suppress_alone_hand_worked():
    # the quantile case above with 1 below the threshold, and with 1 above it
    args = {"tau": 0.4, "boost": 2.0, "floor": 0.1}
    boosted, suppressed = (gate(H, ROW, levels=levels, **args) for levels in ("boost", "suppress"))
    np.testing.assert_allclose(boosted, [[1, 1, 4 / 3, 13 / 6, 3, 1]], rtol=1e-6)
    np.testing.assert_allclose(suppressed, [[0.1, 0.625, 1, 1, 1, 1]], rtol=1e-6)
    # scaled to a mean of 1: sums 8.5 and 3.725 over five tokens
    kept = oar_weights(SCORES, ROW, levels="boost", **args)
    np.testing.assert_allclose(kept[0, :5], boosted[0, :5] * 5 / 8.5, rtol=1e-5)
    kept = oar_weights(SCORES, ROW, levels="suppress", **args)
    np.testing.assert_allclose(kept[0, :5], suppressed[0, :5] * 5 / 3.725, rtol=1e-5)


def test_the_preset_hard_mutes_below_a_half_and_boosts_nothing():
    # h / .5 below the level and 1 from it on; free: the row's mean falls to .7. Outside the reasoning: 1
    settings = changed(CreditSettings(), {"gate": "hard"}).gate
    np.testing.assert_allclose(oar_weights(SCORES, ROW, **vars(settings)), [[0, 0.5, 1, 1, 1, 1]], atol=1e-6)


def test_a_threshold_of_one_stays_finite_when_compiled():
    # most scores tie at the top: c = 1, and 1 - c + 1e-8 compiles to (1 + 1e-8) - c = 0 in float32
    scores, row = jnp.array([[0.0, 0.5, 0.5, 0.5]]), jnp.ones((1, 4), bool)
    free = jax.jit(lambda s: oar_weights(s, row, mass="free"))(scores)
    np.testing.assert_allclose(free, [[0.1, 1, 1, 1]], rtol=1e-6)


def test_a_threshold_of_zero_suppresses_nothing():
    # three of four scores tie at the bottom: c = 0, and they are at it and not below it
    scores, row = jnp.array([[0.0, 0.0, 0.0, 0.5]]), jnp.ones((1, 4), bool)
    np.testing.assert_allclose(oar_weights(scores, row, mass="free"), [[1, 1, 1, 3]], rtol=1e-6)


def test_floor_zero_suppresses_fully():
    assert gate(H, ROW, tau=0.4, boost=2.0, floor=0.0)[0, 0] == 0


def test_preserve_mass_hand_worked():
    # 1 + 3 over two reasoning tokens: scaled by 2/4; the third token keeps its own
    weights, row = jnp.array([[1.0, 3.0, 7.0]]), jnp.array([[True, True, False]])
    np.testing.assert_array_equal(preserve_mass(weights, row), [[0.5, 1.5, 7]])
    np.testing.assert_array_equal(preserve_mass(jnp.zeros((1, 3)), row), np.zeros((1, 3)))


@pytest.mark.parametrize("rule", ["quantile", "level"])
def test_mass_is_kept_and_advantages_sum_to_the_same(rule):
    scores, reasoning = random_scores()
    completion = reasoning | (jnp.arange(12) < 10)
    weights = oar_weights(scores, reasoning, rule=rule)
    advantages = jnp.array([1.5, -0.5, 0.0, -2.0])
    shaped = reshape(advantages, weights, completion)
    np.testing.assert_allclose(masked_sum(shaped, completion), advantages * completion.sum(-1), rtol=1e-5)
    assert (weights >= 0).all()
    np.testing.assert_array_equal(np.sign(shaped), np.sign(advantages)[:, None] * completion)


def test_free_mass_stays_within_the_gate():
    weights = oar_weights(*random_scores(), mass="free")
    assert weights.min() >= 0.1
    assert weights.max() == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize("mass", ["kept", "free"])
@pytest.mark.parametrize("rule", ["quantile", "level"])
def test_rows_that_tell_nothing_apart_get_ones(rule, mass):
    reasoning = jnp.array([[True] * 4] * 6).at[1].set(False)
    scores = jnp.array(
        [
            [0.3] * 4,  # equal
            [1.0, 2.0, 3.0, 4.0],  # no reasoning
            [1.0, jnp.nan, 3.0, 4.0],
            [1.0, jnp.inf, 3.0, 4.0],
            [0.0] * 4,
            [-1.0, -2.0, -0.5, -3.0],  # all clamped to 0
        ]
    )
    np.testing.assert_array_equal(oar_weights(scores, reasoning, rule=rule, mass=mass), np.ones((6, 4)))


def test_signed_row_below_minus_one_gets_ones():
    # the published form gives NaN for the whole row
    scores = jnp.array([[-1.5, 0.2, 0.7]])
    np.testing.assert_array_equal(oar_weights(scores, jnp.ones((1, 3), bool), signs="signed"), np.ones((1, 3)))


def test_one_reasoning_token_gets_one():
    reasoning = jnp.zeros((1, 4), bool).at[0, 2].set(True)
    np.testing.assert_array_equal(oar_weights(jnp.arange(4.0)[None], reasoning), np.ones((1, 4)))


def test_padding_and_junk_outside_change_nothing():
    scores, reasoning = random_scores()
    weights = oar_weights(scores, reasoning)
    padded = jnp.pad(jnp.where(reasoning, scores, jnp.nan), ((0, 2), (3, 5)), constant_values=jnp.nan)
    wide = oar_weights(padded, jnp.pad(reasoning, ((0, 2), (3, 5))))
    np.testing.assert_allclose(wide[:4, 3:15], weights, rtol=1e-6)
    assert (wide[4:] == 1).all()


def test_permuting_rows_and_tokens_permutes_weights():
    scores, reasoning = random_scores()
    weights = oar_weights(scores, reasoning)
    rows, tokens = jnp.array([2, 0, 3, 1]), jnp.asarray(np.random.default_rng(1).permutation(12))
    np.testing.assert_array_equal(oar_weights(scores[rows], reasoning[rows]), weights[rows])
    shuffled = oar_weights(scores[:, tokens], reasoning[:, tokens])
    np.testing.assert_allclose(shuffled, weights[:, tokens], rtol=1e-6)  # the sum runs in another order


def test_row_alone_equals_row_in_batch():
    # the released code overwrites the quantile level inside its batch loop, so that later rows change
    scores, reasoning = random_scores()
    together = oar_weights(scores, reasoning)
    for row in range(4):
        np.testing.assert_array_equal(oar_weights(scores[row : row + 1], reasoning[row : row + 1])[0], together[row])


def test_reshape_hand_worked_and_without_gradient():
    weights, completion = jnp.array([[0.5, 1.5, 9.0]]), jnp.array([[True, True, False]])
    advantages = jnp.array([-2.0])
    np.testing.assert_array_equal(reshape(advantages, weights, completion), [[-1, -3, 0]])
    assert (jax.grad(lambda w: reshape(advantages, w, completion).sum())(weights) == 0).all()


def test_weights_of_one_are_the_group_advantage_itself():
    completion, advantages = jnp.ones((2, 3), bool), jnp.array([0.7, -1.3])
    shaped = reshape(advantages, jnp.ones((2, 3)), completion)
    np.testing.assert_array_equal(shaped, np.full((2, 3), advantages[:, None]))
