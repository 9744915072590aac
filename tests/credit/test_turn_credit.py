"""Credit per turn against sums written out as loops: returns, differences, shares, and OAR inside a turn."""

import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.config.changes import changed
from oarjax.credit.answer_span import find_answers, find_units
from oarjax.credit.gate import oar_weights
from oarjax.credit.methods.turn_oar import turn_shares, weights_inside
from oarjax.credit.methods.turn_rewards import last_tokens, turn_advantages, turn_differences, turn_returns
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import CreditInputs, Signals
from oarjax.types import AnswerSpan

ROWS, TOKENS = 6, 40
GATE = {"tau": 0.4, "boost": 2.0, "floor": 0.1}


pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def episodes():
    """Rows of 1 to 5 turns with holes between most of them, one row empty; a value and a share per turn."""
    rng = np.random.default_rng(0)
    turns, values = np.zeros((ROWS, TOKENS), int), np.zeros((ROWS, TOKENS))
    for row in range(1, ROWS):
        at = 0
        for turn in range(1, 1 + row):
            length, hole = rng.integers(1, 5), rng.integers(0, 4)
            turns[row, at : at + length], values[row, at : at + length] = turn, rng.normal()
            at += length + hole
    written = turns > 0
    return turns, values, written, rng.normal(size=ROWS)


def by_turn(turns, row):
    return [np.flatnonzero(turns[row] == k) for k in range(1, turns[row].max(initial=0) + 1)]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("form", ["rewards", "differences"])
def test_returns_are_sums_over_later_turns(episodes, discount, form):
    turns, values, written, advantages = episodes
    junk = np.where(written, values, np.nan)
    last = last_tokens(jnp.asarray(turns), jnp.asarray(written))
    rewards = turn_differences(jnp.asarray(junk), last) if form == "differences" else jnp.asarray(junk)
    returns = np.asarray(turn_returns(rewards, last, discount=discount))
    found = turn_advantages(
        jnp.asarray(junk),
        jnp.asarray(turns),
        jnp.asarray(written),
        jnp.asarray(advantages),
        values=form,
        discount=discount,
        weight=0.7,
    )
    for row in range(ROWS):
        places = by_turn(turns, row)
        each = [values[row, at[0]] for at in places]
        if form == "differences":
            each = [value - before for value, before in zip(each, [0, *each])]
        expected = [sum(discount ** (j - k) * each[j] for j in range(k, len(each))) for k in range(len(each))]
        mean = sum(len(at) * g for at, g in zip(places, expected)) / max(written[row].sum(), 1)
        for at, g in zip(places, expected):
            np.testing.assert_allclose(returns[row, at], g, rtol=1e-12)
            np.testing.assert_allclose(found[row, at], advantages[row] + 0.7 * (g - mean), rtol=1e-12)
        np.testing.assert_allclose(found[row, ~written[row]], advantages[row])
        np.testing.assert_allclose(np.sum(found[row, written[row]]), written[row].sum() * advantages[row], atol=1e-12)


def test_inside_a_turn_is_oar_on_a_row_of_that_turn_alone(episodes):
    turns, _, written, _ = episodes
    scores = np.random.default_rng(1).exponential(size=turns.shape)
    reasoning = written & (np.arange(TOKENS) != 3)
    found = weights_inside(jnp.asarray(scores), jnp.asarray(turns), jnp.asarray(reasoning), **GATE, mass="free")
    expected = np.ones(turns.shape)
    for row in range(ROWS):
        for at in by_turn(turns, row):
            at = at[reasoning[row, at]]
            if len(at):
                alone = jnp.asarray(scores[row, at][None]), jnp.ones((1, len(at)), bool)
                expected[row, at] = oar_weights(*alone, **GATE)[0]
                np.testing.assert_allclose(expected[row, at].mean(), 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (expected != 1).any()


def test_a_share_is_the_gate_over_turns(episodes):
    """Each turn counts once in the gate, with the sum of its scores; then the row's mean is 1 over its tokens."""
    turns, _, written, _ = episodes
    scores = np.random.default_rng(2).exponential(size=turns.shape)
    found = np.asarray(turn_shares(jnp.asarray(scores), jnp.asarray(turns), jnp.asarray(written), **GATE))
    for row in range(ROWS):
        places = by_turn(turns, row)
        if not places:
            assert (found[row] == 1).all()
            continue
        sums = jnp.asarray([[scores[row, at].sum() for at in places]], jnp.float32)
        shares = np.asarray(oar_weights(sums, jnp.ones(sums.shape, bool), **GATE, mass="free"))[0]
        scale = written[row].sum() / sum(len(at) * share for at, share in zip(places, shares))
        for at, share in zip(places, shares):
            np.testing.assert_allclose(found[row, at], share * scale, rtol=1e-5)
        np.testing.assert_allclose(found[row, written[row]].mean(), 1, rtol=1e-6)
    assert np.ptp(found[-1][written[-1]]) > 0.1


@pytest.mark.parametrize("share", ["importance", "rewards", "equal"])
def test_a_turn_keeps_its_share_and_an_episode_its_mass(episodes, share):
    turns, values, written, advantages = episodes
    rng, none = np.random.default_rng(3), np.zeros(turns.shape, bool)
    scores, reasoning = rng.exponential(size=turns.shape), written & (rng.random(turns.shape) < 0.8)
    settings = changed(CreditSettings(), {"method": "turn_oar", "turn_oar": {"share": share}})
    span = AnswerSpan(jnp.asarray(reasoning), jnp.asarray(none), jnp.ones(ROWS, bool))
    signals = Signals(importance=jnp.asarray(scores), marks=jnp.asarray(values), turns=jnp.asarray(turns))
    found = np.asarray(
        resolve_method(settings).weigher()(
            CreditInputs(signals, span, jnp.asarray(advantages), jnp.asarray(written), jnp.asarray(0))
        )
    )
    rows = np.broadcast_to(advantages[:, None], turns.shape)
    if share == "rewards":
        rows = np.asarray(turn_advantages(*map(jnp.asarray, (values, turns, written, advantages))))
    for row in range(ROWS):
        for at in by_turn(turns, row):
            if share != "importance":  # whose shares are multiples of the row's advantage on the reasoning alone
                np.testing.assert_allclose(found[row, at].sum(), rows[row, at].sum(), atol=1e-5)
        np.testing.assert_allclose(
            found[row, written[row]].sum(), advantages[row] * written[row].sum(), rtol=1e-5, atol=1e-5
        )
    assert (found != rows).any()


def test_a_turns_end_is_a_line_break():
    """Answers are not read across turns, lines end with them, and a token's place stays its own."""
    table = [b"", b"12", b"34", b"5 is it", b"answer "]
    tokens = np.array([[4, 1, 0, 3, 2, 0]], np.int32)
    completion = np.array([[True, True, True, False, True, True]])
    whole = np.ones((1, 6), bool)
    pattern = r"(\d+)\s*$"
    found = find_answers(tokens, completion, table, style="regex", pattern=pattern)
    assert found.answer.tolist() == [[False, False, False, False, True, False]]
    assert found.reasoning.tolist() == [[True, True, True, False, False, False]]
    joined = find_answers(tokens[:, [0, 1, 2, 4, 5]], whole[:, :5], table, style="regex", pattern=pattern)
    assert joined.answer.tolist() == [[False, True, False, True, False]]
    units = find_units(tokens, completion, table, unit="line")
    assert units[completion].tolist() == [0, 0, 0, 1, 1]
