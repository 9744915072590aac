"""What every method of credit must keep, whatever it is given (hypothesis looks for what breaks it)."""

from functools import cache
from typing import NamedTuple

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oarjax.config import CreditConfig
from oarjax.credit import registry
from oarjax.credit.bind import weigher
from oarjax.credit.gate import reshape
from oarjax.credit.keywords import keyword_table
from oarjax.credit.signals import Signals
from oarjax.types import AnswerSpan

ROWS, TOKENS, VOCAB = 4, 9, 6
PIECES = [b"so", b" so", b"n", b" ", b"=", b""]
TABLE = keyword_table(
    ["so", "="], lambda text: [PIECES.index(text.encode())] if text.encode() in PIECES else [], PIECES
)
KEY = jax.random.key(3)


class Law(NamedTuple):
    """What a method promises."""

    changes: dict
    coupling: str = "row"  # row: no row sees another; batch
    mass: str = "row"  # row: mean 1 over the reasoning; batch: over the tokens of rows with A != 0; free
    keyed: bool = False  # a row's weights depend on its number as well


METHODS = {
    "uniform": Law({"method": "uniform"}),
    "oar_g": Law({"method": "oar_g"}),
    "oar_p, level": Law({"method": "oar_p", "gate": {"rule": "level", "tau": 0.5}}),
    "oar_f, boost only": Law({"method": "oar_f", "gate": {"levels": "boost"}}),
    "oar_l, suppress only": Law({"method": "oar_l", "gate": {"levels": "suppress", "floor": 0.0}}),
    "oar_screened, readme": Law({"method": "oar_screened", "gate": "readme"}),
    "oar_g, free": Law({"method": "oar_g", "gate": {"mass": "free"}}, mass="free"),
    "oar_g, wrong only": Law({"method": "oar_g", "polarity": "wrong"}),
    "entropy": Law({"method": "entropy"}),
    "entropy_top": Law({"method": "entropy_top"}, coupling="batch", mass="batch"),
    "entropy_top, correct only": Law({"method": "entropy_top", "polarity": "correct"}, coupling="batch", mass="batch"),
    "entropy_top, sequence": Law({"method": "entropy_top", "entropy": {"scope": "sequence"}}, mass="completion"),
    "entropy_top, free": Law({"method": "entropy_top", "entropy": {"mass": "free"}}, coupling="batch", mass="free"),
    "keywords": Law({"method": "keywords"}),
    "grail": Law({"method": "grail"}, mass="free"),
    "grail, wrong only": Law({"method": "grail", "polarity": "wrong"}, mass="free"),
    "random": Law({"method": "random"}, keyed=True),
    "permuted": Law({"method": "permuted"}, keyed=True),
}
every = pytest.mark.parametrize("name", METHODS)
row_by_row = pytest.mark.parametrize("name", [n for n, law in METHODS.items() if law.coupling == "row"])
tries = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


class Case(NamedTuple):
    importance: np.ndarray
    entropies: np.ndarray
    tokens: np.ndarray
    reasoning: np.ndarray
    answer: np.ndarray
    completion: np.ndarray
    advantages: np.ndarray

    @property
    def span(self) -> AnswerSpan:
        return AnswerSpan(jnp.asarray(self.reasoning), jnp.asarray(self.answer), jnp.asarray(self.answer.any(1)))

    @property
    def signals(self) -> Signals:
        return Signals(*(jnp.asarray(x) for x in (self.importance, self.entropies, self.tokens)))


@st.composite
def cases(draw, *, broken: bool = False):
    """Rows of 0 to TOKENS tokens: reasoning, a marker, an answer, a stop; some without answer. Any scores >= 0."""
    high = 2.0**60
    number = st.floats(0, high, width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0, 1e-6])
    if broken:
        number = st.floats(width=32) | number
    values = hnp.arrays(np.float32, (ROWS, TOKENS), elements=number, fill=st.sampled_from([np.float32(0.5)]))
    lengths = np.array(draw(st.lists(st.integers(0, TOKENS), min_size=ROWS, max_size=ROWS)))
    answered = np.array(draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)))
    place = np.arange(TOKENS)
    ends = np.maximum(lengths - 3, 0)[:, None]
    return Case(
        importance=draw(values),
        entropies=draw(values),
        tokens=draw(hnp.arrays(np.int32, (ROWS, TOKENS), elements=st.integers(0, VOCAB - 1))),
        reasoning=(place < ends) & answered[:, None],
        answer=(place == lengths[:, None] - 2) & (lengths >= 2)[:, None] & answered[:, None],
        completion=place < lengths[:, None],
        advantages=np.array(
            draw(st.lists(st.sampled_from([-1.5, 0.0, 0.25, 2.0]), min_size=ROWS, max_size=ROWS)), np.float32
        ),
    )


@cache
def compiled(name: str):
    weigh = weigher(CreditConfig(**METHODS[name].changes), keyword_table=TABLE)
    return jax.jit(lambda signals, span, advantages, completion: weigh(signals, span, advantages, completion, KEY))


def weights(name: str, case: Case) -> np.ndarray:
    return np.asarray(
        compiled(name)(case.signals, case.span, jnp.asarray(case.advantages), jnp.asarray(case.completion))
    )


def test_every_method_is_here():
    assert {law.changes["method"] for law in METHODS.values()} == set(registry.METHODS)


@every
@given(case=cases(broken=True))
@tries
def test_weights_are_finite_and_not_negative(name, case):
    w = weights(name, case)
    assert w.dtype == np.float32
    assert np.isfinite(w).all()
    assert (w >= 0).all()


@every
@given(case=cases())
@tries
def test_signs_and_rows_that_teach_nothing(name, case):
    shaped = np.asarray(
        reshape(jnp.asarray(case.advantages), jnp.asarray(weights(name, case)), jnp.asarray(case.completion))
    )
    assert (shaped * case.advantages[:, None] >= 0).all()
    assert (shaped[case.advantages == 0] == 0).all()
    assert (shaped[~case.completion] == 0).all()


@every
@given(case=cases())
@tries
def test_what_stands_outside_the_completion_is_not_used(name, case):
    outside = ~case.completion
    junk = case._replace(
        importance=np.where(outside, np.nan, case.importance),
        entropies=np.where(outside, np.inf, case.entropies),
        tokens=np.where(outside, 1, case.tokens),
    )
    np.testing.assert_array_equal(weights(name, junk)[case.completion], weights(name, case)[case.completion])


@every
@given(case=cases())
@tries
def test_padding_rows_and_positions_changes_nothing(name, case):
    pad = ((0, 2), (0, 5))
    wide = Case(*(np.pad(x, pad[: x.ndim]) for x in case))
    np.testing.assert_allclose(
        weights(name, wide)[:ROWS, :TOKENS][case.completion], weights(name, case)[case.completion], rtol=1e-5
    )


@every
@given(case=cases(), order=st.permutations(range(ROWS)))
@tries
def test_permuting_rows_permutes_weights(name, case, order):
    if METHODS[name].keyed:
        return  # a row's draw belongs to its number: see test_a_row_is_its_own
    moved = Case(*(x[np.array(order)] for x in case))
    np.testing.assert_allclose(weights(name, moved), weights(name, case)[np.array(order)], rtol=1e-5)


@row_by_row
@given(case=cases(), other=cases())
@tries
def test_a_row_is_its_own(name, case, other):
    """Whatever stands in the other rows, a row's weights stay (for keyed methods: in its place)."""
    mixed = Case(*(np.concatenate([a[:1], b[1:]]) for a, b in zip(case, other)))
    np.testing.assert_array_equal(weights(name, mixed)[0], weights(name, case)[0])


@every
@given(case=cases(), value=st.sampled_from([0.0, 1e-6, 0.7, 40.0]))
@tries
def test_signals_that_tell_nothing_apart_change_nothing(name, case, value):
    if name == "random":
        return  # has no signal
    flat = np.full((ROWS, TOKENS), value, np.float32)
    same = case._replace(importance=flat, entropies=flat, tokens=np.full((ROWS, TOKENS), 2, np.int32))
    among = case.reasoning if "grail" in name else np.ones_like(case.reasoning)  # it raises the answer all the same
    np.testing.assert_allclose(weights(name, same)[among], 1, atol=1e-6)


@every
@given(case=cases())
@tries
def test_mass(name, case):
    law, w = METHODS[name], weights(name, case)
    if law.mass == "free":
        return
    polarity = law.changes.get("polarity", "both")
    rows = {"both": case.advantages != 0, "correct": case.advantages > 0, "wrong": case.advantages < 0}[polarity]
    if law.mass == "batch":
        among = case.completion & rows[:, None]
        np.testing.assert_allclose(w[among].sum(), among.sum(), rtol=1e-5)
        assert (w[~among] == 1).all()
        return
    among = case.reasoning if law.mass == "row" else case.completion
    np.testing.assert_allclose(np.where(among, w, 0).sum(1), among.sum(1), rtol=1e-5)
    assert (w[~among] == 1).all()


@every
def test_rows_of_no_and_of_one_token(name):
    place = np.arange(TOKENS)
    completion = place < np.array([0, 1, 1, 5])[:, None]
    reasoning = place < np.array([0, 1, 0, 1])[:, None]
    rng = np.random.default_rng(0)
    case = Case(
        importance=rng.random((ROWS, TOKENS), np.float32),
        entropies=rng.random((ROWS, TOKENS), np.float32),
        tokens=np.zeros((ROWS, TOKENS), np.int32),
        reasoning=reasoning,
        answer=completion & ~reasoning,
        completion=completion,
        advantages=np.array([1, 1, -1, -1], np.float32),
    )
    w = weights(name, case)
    assert np.isfinite(w).all()
    assert (w[0] == 1).all()
    if METHODS[name].coupling == "row" and METHODS[name].mass != "completion":
        np.testing.assert_allclose(w[reasoning], 1, rtol=1e-6)  # one token among itself


@every
def test_no_gradient_flows_through_weights(name):
    rng = np.random.default_rng(1)
    shape = (2, 6)
    span = AnswerSpan(
        jnp.arange(6)[None] < jnp.array([[4], [3]]), jnp.zeros(shape, bool).at[:, 5].set(True), jnp.ones(2, bool)
    )
    completion, advantages = jnp.ones(shape, bool), jnp.array([1.0, -2.0])
    weigh = weigher(CreditConfig(**METHODS[name].changes), keyword_table=TABLE)

    def total(scores):
        signals = Signals(scores, scores, jnp.zeros(shape, jnp.int32))
        return jnp.sum(reshape(advantages, weigh(signals, span, advantages, completion, KEY), completion) ** 2)

    scores = jnp.asarray(rng.random(shape), jnp.float32)
    assert (jax.jit(jax.grad(total))(scores) == 0).all()


@every
def test_half_precision_signals_are_widened(name):
    rng = np.random.default_rng(2)
    scores = jnp.asarray(rng.random((ROWS, 200)), jnp.bfloat16)
    completion = jnp.ones(scores.shape, bool)
    span = AnswerSpan(
        jnp.arange(200)[None] < jnp.full((ROWS, 1), 150),
        jnp.arange(200)[None] == jnp.full((ROWS, 1), 180),
        jnp.ones(ROWS, bool),
    )
    tokens = jnp.asarray(rng.integers(0, VOCAB, scores.shape), jnp.int32)
    half, full = (
        compiled(name)(Signals(x, x, tokens), span, jnp.array([1.0, -1.0, 2.0, -2.0]), completion)
        for x in (scores, scores.astype(jnp.float32))
    )
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, rtol=1e-6)
