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

from oarjax.config.changes import changed
from oarjax.credit import registry
from oarjax.credit.kinds import neutral, relative, token_advantages
from oarjax.credit.methods.keywords import keyword_table
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import CreditInputs, Signals
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
    mass: str = "row"  # row: mean 1 over the reasoning; batch: over the tokens of rows with A != 0; free
    keyed: bool = False  # a row's weights depend on its number as well
    flat: bool = True  # signals that tell nothing apart leave it at GRPO, outside the reasoning too unless it is grail
    coupling: str | None = None  # of the setting, where that is not the registry's

    @property
    def couples(self) -> str:
        return self.coupling or self.record.coupling

    @property
    def record(self):
        return registry.METHODS[self.changes["method"]]


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
    "entropy_top": Law({"method": "entropy_top"}, mass="batch"),
    "entropy_top, correct only": Law({"method": "entropy_top", "polarity": "correct"}, mass="batch"),
    "entropy_top, sequence": Law(
        {"method": "entropy_top", "entropy": {"scope": "sequence"}}, mass="completion", coupling="row"
    ),
    "entropy_top, free": Law({"method": "entropy_top", "entropy": {"mass": "free"}}, mass="free"),
    "keywords": Law({"method": "keywords"}),
    "grail": Law({"method": "grail"}, mass="free"),
    "grail, wrong only": Law({"method": "grail", "polarity": "wrong"}, mass="free"),
    "random": Law({"method": "random"}, keyed=True),
    "permuted": Law({"method": "permuted"}, keyed=True),
    "ktae": Law({"method": "ktae"}, mass="free"),
    "ktae, wrong only": Law({"method": "ktae", "polarity": "wrong"}, mass="free"),
    "gtpo": Law({"method": "gtpo"}, mass="free", flat=False),
    "token_baseline": Law({"method": "token_baseline"}, mass="free", flat=False),
    "delta": Law({"method": "delta"}, mass="batch"),
    "causal_spans": Law({"method": "causal_spans"}, mass="completion", flat=False),
    "dgpo": Law({"method": "dgpo"}, mass="completion"),
    "signed_values": Law({"method": "signed_values"}, mass="free", flat=False),
    "fipo": Law({"method": "fipo"}),
    "crpo": Law({"method": "crpo"}),
    "egca": Law({"method": "egca"}, mass="completion"),
    "critic_search": Law({"method": "critic_search"}, mass="free", flat=False),
    "turn_rewards": Law({"method": "turn_rewards"}, mass="completion"),
    "turn_rewards, differences": Law(
        {"method": "turn_rewards", "turn_rewards": {"values": "differences", "discount": 0.5}}, mass="completion"
    ),
    "turn_oar": Law({"method": "turn_oar"}, mass="completion"),
    "turn_oar, rewards": Law({"method": "turn_oar", "turn_oar": {"share": "rewards"}}, mass="completion"),
    "shear": Law({"method": "shear", "shear": {"window": 3, "stride": 2, "iterations": 3}}, mass="free", flat=False),
    "rlsd": Law({"method": "rlsd"}, mass="free", flat=False),
    "serl": Law({"method": "serl"}, mass="free", flat=False),
    "sdpg": Law({"method": "sdpg"}),
}
PLAIN = ("fipo", "crpo", "sdpg")
"""What they change is not their weights, which are uniform's: they have tests of their own."""
EVERY = [n for n in METHODS if n not in PLAIN]
every = pytest.mark.parametrize("name", EVERY)
distinct = pytest.mark.parametrize("name", [n for n in EVERY if "," not in n])
"""One setting of each method, for laws that its other settings cannot break apart from it."""
apart = pytest.mark.parametrize("name", [n for n, law in METHODS.items() if law.couples != "batch" and n in EVERY])
tries = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


class Case(NamedTuple):
    importance: np.ndarray
    entropies: np.ndarray  # of which other signals are made
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
        return signals_from(*(jnp.asarray(x) for x in (self.importance, self.entropies, self.tokens)))


def signals_from(importance, values, tokens):
    """All signals; the first half of the rows is one group, the second another."""
    half = -(-ROWS // 2)
    return Signals(
        importance=importance,
        entropies=values,
        tokens=tokens,
        groups=jnp.where(jnp.arange(len(tokens)) < half, 0, 1),
        logps=-values,
        score_norms=values,
        hidden=jnp.stack([values, importance, jnp.ones_like(values)], -1),
        hellinger=values,
        spread=importance,
        teacher_logps=-importance,
        marks=(tokens % 3 - 1).astype(jnp.float32),
        turns=tokens // 2,
        iteration=3,
    )


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
    weigh = resolve_method(changed(CreditSettings(), METHODS[name].changes)).weigher(keyword_table=TABLE)
    return jax.jit(
        lambda signals, span, advantages, completion: weigh(CreditInputs(signals, span, advantages, completion, KEY))
    )


def weights(name: str, case: Case, signals: Signals | None = None) -> np.ndarray:
    signals = case.signals if signals is None else signals
    return np.asarray(compiled(name)(signals, case.span, jnp.asarray(case.advantages), jnp.asarray(case.completion)))


def test_every_method_is_here():
    assert {law.changes["method"] for law in METHODS.values()} == set(registry.METHODS)


@every
@given(case=cases(broken=True))
@tries
def test_weights_are_finite_and_not_negative(name, case):
    w = weights(name, case)
    assert w.dtype == np.float32
    assert np.isfinite(w).all()
    assert (w >= 0).all() or METHODS[name].record.kind != "weights"


@every
@given(case=cases())
@tries
def test_signs_and_rows_that_teach_nothing(name, case):
    kind = METHODS[name].record.kind
    arrays = (jnp.asarray(x) for x in (weights(name, case), case.advantages, case.completion))
    shaped = np.asarray(token_advantages(kind, *arrays))
    assert (shaped[~case.completion] == 0).all()
    if kind == "weights":
        assert (shaped * case.advantages[:, None] >= 0).all()
        assert (shaped[case.advantages == 0] == 0).all()
    polarity = METHODS[name].changes.get("polarity", "both")
    exempt = {"both": np.zeros(ROWS, bool), "correct": case.advantages <= 0, "wrong": case.advantages >= 0}[polarity]
    rows = exempt[:, None] & case.completion
    np.testing.assert_array_equal(shaped[rows], np.broadcast_to(case.advantages[:, None], shaped.shape)[rows])


@distinct
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


@distinct
@given(case=cases())
@tries
def test_padding_rows_and_positions_changes_nothing(name, case):
    pad = ((0, 2), (0, 5))
    wide = Case(*(np.pad(x, pad[: x.ndim]) for x in case))
    again = weights(name, wide)[:ROWS, :TOKENS][case.completion]
    np.testing.assert_allclose(again, weights(name, case)[case.completion], rtol=1e-5, atol=1e-5)


@distinct
@given(case=cases(), order=st.permutations(range(ROWS)))
@tries
def test_permuting_rows_permutes_weights(name, case, order):
    if METHODS[name].keyed:
        return  # a row's draw belongs to its number: see test_a_row_or_group_is_its_own
    order = np.array(order)
    moved, tolerance = Case(*(x[order] for x in case)), {"rtol": 1e-5, "atol": 1e-5}
    signals = case.signals
    signals = jax.tree.map(lambda x: x[order] if jnp.ndim(x) else x, signals)  # groups too
    np.testing.assert_allclose(weights(name, moved, signals), weights(name, case)[order], **tolerance)


@apart
@given(case=cases(), other=cases())
@tries
def test_a_row_or_group_is_its_own(name, case, other):
    """Whatever stands in the other rows (groups), a row's credit stays; for keyed methods: in its place."""
    kept = 2 if METHODS[name].couples == "group" else 1
    mixed = Case(*(np.concatenate([a[:kept], b[kept:]]) for a, b in zip(case, other)))
    np.testing.assert_allclose(weights(name, mixed)[:kept], weights(name, case)[:kept], rtol=1e-6, atol=1e-6)


@every
@given(case=cases(), value=st.sampled_from([0.0, 1e-6, 0.7, 40.0]))
@tries
def test_signals_that_tell_nothing_apart_change_nothing(name, case, value):
    if name == "random" or not METHODS[name].flat:
        return  # has no signal, or takes a baseline of its own
    flat = np.full((ROWS, TOKENS), value, np.float32)
    same = case._replace(importance=flat, entropies=flat, tokens=np.full((ROWS, TOKENS), 2, np.int32))
    among = case.reasoning if "grail" in name else np.ones_like(case.reasoning)  # it raises the answer all the same
    kind = METHODS[name].record.kind
    same = same._replace(completion=same.completion | same.reasoning)
    plain = np.broadcast_to(neutral(kind, jnp.asarray(case.advantages)), among.shape)
    np.testing.assert_allclose(weights(name, same)[among], plain[among], atol=1e-6)


@every
@given(case=cases())
@tries
def test_mass(name, case):
    law, w = METHODS[name], weights(name, case)
    if law.mass == "free":
        return
    arrays = [jnp.asarray(x) for x in (w, case.advantages, case.completion)]
    w = np.asarray(relative(law.record.kind, arrays[0], token_advantages(law.record.kind, *arrays), *arrays[1:]))
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
    if METHODS[name].record.kind == "weights":
        assert (w[0] == 1).all()
    if METHODS[name].couples == "row" and METHODS[name].mass != "completion" and METHODS[name].flat:
        np.testing.assert_allclose(w[reasoning], 1, rtol=1e-6)  # one token among itself


@distinct
def test_no_gradient_flows_through_weights(name):
    rng = np.random.default_rng(1)
    shape = (2, 6)
    span = AnswerSpan(
        jnp.arange(6)[None] < jnp.array([[4], [3]]), jnp.zeros(shape, bool).at[:, 5].set(True), jnp.ones(2, bool)
    )
    completion, advantages = jnp.ones(shape, bool), jnp.array([1.0, -2.0])
    weigh = resolve_method(changed(CreditSettings(), METHODS[name].changes)).weigher(keyword_table=TABLE)

    def total(scores):
        signals = signals_from(scores, scores, jnp.zeros(shape, jnp.int32))
        credit = weigh(CreditInputs(signals, span, advantages, completion, KEY))
        return jnp.sum(token_advantages(METHODS[name].record.kind, credit, advantages, completion) ** 2)

    scores = jnp.asarray(rng.random(shape), jnp.float32)
    assert (jax.jit(jax.grad(total))(scores) == 0).all()


@distinct
def test_half_precision_signals_are_widened(name):
    rng = np.random.default_rng(2)
    scores = jnp.asarray(rng.random((ROWS, TOKENS)), jnp.bfloat16)
    completion = jnp.ones(scores.shape, bool)
    span = AnswerSpan(
        jnp.arange(TOKENS)[None] < jnp.full((ROWS, 1), 6),
        jnp.arange(TOKENS)[None] == jnp.full((ROWS, 1), 7),
        jnp.ones(ROWS, bool),
    )
    tokens = jnp.asarray(rng.integers(0, VOCAB, scores.shape), jnp.int32)
    half, full = (
        compiled(name)(signals_from(x, x, tokens), span, jnp.array([1.0, -1.0, 2.0, -2.0]), completion)
        for x in (scores, scores.astype(jnp.float32))
    )
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, rtol=1e-6, atol=1e-6)
