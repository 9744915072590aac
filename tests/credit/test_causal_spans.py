"""Causal spans against the released formula: which spans there are, the drops in float64, and weights from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from toy_policy import toy_params, toy_policy

from oarjax.credit.methods import causal_spans
from oarjax.credit.methods.calculation_spans import NO_TEXT, find_calculations, row_spans
from oarjax.credit.methods.causal_spans import span_weights
from oarjax.credit.probe import Probe
from oarjax.credit.settings import AnswerSettings, CausalSpansSettings, CreditSettings, MaskingSettings
from oarjax.credit.signals import Context
from oarjax.errors import ConfigError
from oarjax.rollout.logps import token_logps
from oarjax.step.spans import find_spans
from oarjax.types import AnswerSpan, Rollout


def pieces(text: str) -> list[bytes]:
    """Tokens of a text, between bars."""
    return [piece.encode() for piece in text.split("|")]


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("she| has|7| ×| 7| =| 49| eggs|.| Then|.", ["7| ×| 7| =| 49"]),  # the sentence overlaps, the last is short
        ("a|b|c|d|.|e|f|.|g|h|i|j|k", ["a|b|c|d|.", "g|h|i|j|k"]),  # five tokens or more; the rest as well
        ("a|b|c|d|e.|f|!|g", ["a|b|c|d|e.|f|!"]),  # a full stop within a token ends nothing
        ("a|b|c|d|\n\n|1|+|2|*|3|=|7.5|x", ["a|b|c|d|\n\n", "1|+|2|*|3|=|7.5"]),
        ("a|b|1|2|+|34|=|4|6 and", ["1|2|+|34|=|4|6 and"]),  # tokens are taken whole
        ("\\|\\|\\|x|.", []),  # LaTeX
        ("|".join(["x"] * 51), []),  # too long
        ("|".join(["x"] * 50), ["|".join(["x"] * 50)]),
        ("|".join(["1+1=2;"] * 7), ["1+1=2;"] * 5),  # half of the spans at most; the sentence overlaps
        ("|".join(["a|b|c|d|."] * 12), ["a|b|c|d|."] * 10),
        ("", []),
    ],
)
def test_calculations_and_sentences(text, spans):
    found = row_spans(pieces(text), most=10)
    assert ["|".join(p.decode() for p in pieces(text)[start:stop]) for start, stop in found] == spans


def test_labels_number_spans_and_mark_formatting_and_tokens_without_text():
    table = [b"", *pieces("7|+|1| = |8|-|a|#### |8")]
    tokens = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [7, 7, 7, 0, 0, 0, 0, 0, 0, 0]], np.int32)
    completion = np.arange(10) < np.array([10, 4])[:, None]
    reasoning = np.arange(10) < np.array([7, 3])[:, None]
    labels = find_calculations(tokens, completion, table, reasoning, most=10)
    # one span, its equals sign is formatting; then a dash and a letter of no span; the marker; the stop token
    assert labels.tolist() == [
        [0, 0, 0, 1, 0, -1, -2, -1, -2, NO_TEXT],
        [-2, -2, -2, NO_TEXT, 0, 0, 0, 0, 0, 0],
    ]
    assert (labels // 2 == [[0] * 5 + [-1] * 4 + [-2], [-1] * 3 + [-2] + [0] * 6]).all()


@pytest.mark.parametrize("settings", [{}, {"boost": 3.0, "floor": 0.0, "answer": 0.7}])
def test_weights_are_the_released_formula(settings, x64):
    """In float64: .2 for all, the drop over the span's length on it, min-max to .5 .. 1, formatting, answer, mean 1."""
    boost, floor, answer = (settings.get(n, d) for n, d in (("boost", 2.0), ("floor", 0.5), ("answer", 1.5)))
    draw = np.random.default_rng(3)
    lengths, ends = [30, 12, 25, 9], [21, 6, 25, 0]  # of the completion with its stop token, of the reasoning
    drops, labels, expected = np.zeros((4, 30)), np.zeros((4, 30), np.int32), np.ones((4, 30))
    reasoning = np.arange(30) < np.array(ends)[:, None]
    completion = np.arange(30) < np.array(lengths)[:, None]
    for row, (length, end) in enumerate(zip(lengths, ends)):
        spans = [(1, 4), (5, min(11, end)), (14, min(19, end))] if end else []
        formatting = draw.random(30) < 0.2
        span_of, importance = np.full(30, -1), np.full(30, 0.2)
        for number, (start, stop) in enumerate(spans):
            if stop > start and row != 2:  # the third row has no drop at all
                drop = draw.normal() * 3
                drops[row, start:stop] = drop / (stop - start)
                importance[start:stop] += drop / (stop - start)
                span_of[start:stop] = number
        labels[row] = 2 * span_of + formatting
        labels[row, length - 1] = NO_TEXT
        if not end:
            continue
        part = importance[:end]
        top, low = part.max(), part.min()
        part = 0.5 + 0.5 * (part - low) / (top - low) if top > low else np.full(end, 0.5)
        part = np.where(formatting[:end], 0.1 * part, part)
        weights = np.full(length - 1, answer)
        weights[: min(end, length - 1)] = (floor + (boost - floor) * part)[: length - 1]
        expected[row, : length - 1] = weights * (length - 1) / weights.sum()
    arguments = map(jnp.asarray, (drops, reasoning & (labels != NO_TEXT), completion, labels))
    found = np.asarray(span_weights(*arguments, **settings))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(np.where(completion, found, 0).sum(1), lengths, rtol=1e-12)
    assert found.dtype == np.float64


def test_scores_are_drops_of_the_answers_summed_logp_over_the_spans_length(x64):
    """A forward of the whole row for each span, with the pad in its place."""
    policy, T, pad = toy_policy(), 9, 0
    params = jax.tree.map(lambda x: x.astype(jnp.float64), toy_params(jax.random.key(0)))
    tokens, valid = jax.random.randint(jax.random.key(2), (2, 13), 1, 23), jnp.ones((2, 13), bool)
    labels = jnp.asarray([[0, 0, 1, -2, 2, 2, -2, -2, NO_TEXT], [-2, 0, 0, 0, 0, -2, -2, -2, -2]], jnp.int32)
    reasoning = jnp.arange(T) < jnp.array([[6], [5]])
    answer = jnp.asarray([[False] * 6 + [True, True, False], [False] * 7 + [True, False]])
    span = AnswerSpan(reasoning, answer, jnp.ones(2, bool), units=labels)
    rollout = Rollout(tokens, valid, valid[:, -T:], jnp.zeros((2, T)), jnp.zeros((2, T)), jnp.ones(2, bool))
    context = Context(CreditSettings(method="causal_spans"), temperature=0.5, mask_id=pad)
    keys = jax.random.split(jax.random.key(0), 2)
    score = jax.jit(lambda *rows: causal_spans.score(policy, params, *rows, keys, context).importance)
    found = score(rollout, span)

    @jax.jit
    def log_probs(ids):
        return token_logps(policy, params, ids, valid, completion_length=T, temperature=1.0, head_chunk=99)[0]

    def answer_logp(ids) -> np.ndarray:
        return np.where(answer, np.asarray(log_probs(ids), np.float64), 0).sum(1)

    expected = np.zeros((2, T))
    for row, start, stop in ((0, 0, 3), (0, 4, 6), (1, 1, 5)):
        masked = tokens.at[row, 4 + start : 4 + stop].set(pad)
        expected[row, start:stop] = (answer_logp(tokens) - answer_logp(masked))[row] / (stop - start)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    assert (np.abs(expected[0, :3]) > 1e-4).all()
    with pytest.raises(ValueError, match="causal_spans: needs the spans, got None"):
        causal_spans.score(policy, params, rollout, span.replace(units=None), keys, context)


def test_a_config_finds_the_spans_and_refuses_others():
    assert CreditSettings(method="causal_spans").labels_tokens
    assert not CreditSettings().labels_tokens
    causal_spans.check(CreditSettings(method="causal_spans"), None)
    with pytest.raises(
        ConfigError, match=r"credit.masking.unit: causal_spans finds calculations and sentences by itself, got line"
    ):
        causal_spans.check(CreditSettings(masking=MaskingSettings(unit="line")), None)
    with pytest.raises(ConfigError, match=r"credit.probe.function: causal_spans reads the answer's log-probability"):
        causal_spans.check(CreditSettings(), Probe(lambda *_: None, kind="scalar", reads="answer"))  # type: ignore
    with pytest.raises(ConfigError, match=r"credit.causal_spans: floor = 3.0 exceeds boost = 2.0; lower it, or raise"):
        tiny.config(credit={"method": "causal_spans", "causal_spans": {"floor": 3.0}})
    table = [b"", *pieces("1+1=2|;|2+2=4|####|8")]
    tokens = np.array([[1, 2, 3, 4, 5, 0]], np.int32)
    mask = np.ones((1, 6), bool)
    zeros = np.zeros((1, 6), np.float32)
    rollout = Rollout(tokens, mask, mask, zeros, zeros, np.ones(1, bool))  # type: ignore
    credit = CreditSettings(
        method="causal_spans", answer=AnswerSettings(style="hash"), causal_spans=CausalSpansSettings(spans=4)
    )
    assert np.asarray(find_spans(credit, rollout, table).units).tolist() == [[0, -2, 2, -1, -2, NO_TEXT]]
