"""Signed values v of the first token against its return Q, enumerated, by a policy trained on forks.

Q(a) sums the probabilities of all continuations of ``a`` that are graded right, in the room that is left: any tokens
but the stop token, then the mark, the reference answer and the stop token. One policy is trained on texts without
filler, one with a letter of filler.
"""

import functools
import itertools
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import AnswerSettings, CreditSettings, MaskingSettings, SignedValuesSettings
from oarjax.data.tasks.arithmetic import MARKER
from oarjax.data.tasks.forks import FILLER, right_answer, right_letters, written_out
from oarjax.models.qwen import make_policy
from oarjax.models.weights import init_params
from oarjax.step.spans import with_reference
from oarjax.types import AnswerSpan, Rollout

IDS = {letter: 3 + n for n, letter in enumerate("0123456789=ABCDEF")}
IDS |= {letter: 20 + n % 4 for n, letter in enumerate(FILLER)}
PROMPT, ROOM, SEED = 3, 6, 0
ONE, TWO = "3=", "31="
"""An echo of one fork, ``AA####A`` or with filler ``AbA####A``, a copy of two, ``AF####AF``. The mark is a token."""
CASES = [(ONE, 0), (TWO, 0), pytest.param((ONE, 1), marks=pytest.mark.slow)]
"""Questions, and the filler of their completions: as many tokens more between the place and the mark."""
EVERY = range(tiny.VOCAB)
POLICY = make_policy(tiny.model(), compute_dtype=jnp.float32, remat="none")


def ids(text):
    return [IDS[letter] for letter in text]


def padded(prompts, completions):
    """Return tokens and their mask [B, PROMPT + ROOM], prompts padded on the left."""
    rows = [(PROMPT - len(p), [*p, *c], ROOM - len(c)) for p, c in zip(prompts, completions)]
    tokens = [[tiny.PAD] * before + row + [tiny.PAD] * after for before, row, after in rows]
    valid = [[False] * before + [True] * len(row) + [False] * after for before, row, after in rows]
    return np.array(tokens, np.int32), np.array(valid)


@jax.jit
def log_probs(params, tokens, valid):
    """[B, N, V]: of the token after each position."""
    hidden, _ = POLICY.trunk(params, POLICY.embed(params, tokens), jnp.clip(jnp.cumsum(valid, 1) - 1, 0), valid)
    return jax.nn.log_softmax(POLICY.unembed(params, hidden))


@functools.cache
def trained(filler):
    """Train on the texts of 20 questions, weighted by how often they are drawn; a choice is right by .6."""
    draw, texts = random.Random(0), Counter()
    for kind, forks in (("echo", 1), ("copy", 2))[: 2 - filler]:
        for _ in range(3000):
            question = "".join(draw.choices("0123", k=forks)) + "="
            texts[question, written_out(question, draw, kind=kind, filler=filler, right=0.6, seed=SEED)] += 1
    parts = [text.partition(MARKER) for _, text in texts]
    completions = [[*ids(choices), tiny.MARK, *ids(answer.strip()), tiny.STOP] for choices, _, answer in parts]
    tokens, valid = padded([ids(question) for question, _ in texts], completions)
    weights = np.array(list(texts.values()))[:, None] * valid[:, PROMPT:] / texts.total()

    def loss(params):
        logps = jnp.take_along_axis(log_probs(params, tokens, valid)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return -jnp.sum(logps[:, PROMPT - 1 :] * weights)

    tx = optax.adam(optax.cosine_decay_schedule(1e-2, 300))

    def step(carry, _):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def run(key):
        start = init_params(tiny.model(), key, dtype=jnp.float32)
        return jax.lax.scan(step, (start, tx.init(start)), length=300)[0][0]

    return run(jax.random.key(1))


@functools.cache
def scorer():
    """Value every token of the vocabulary, at one place of each row."""
    every = SignedValuesSettings(by="entropy", places=1, candidates=tiny.VOCAB)
    parts = {"masking": MaskingSettings(buckets=1), "answer": AnswerSettings(source="reference")}
    settings = CreditSettings(method="signed_values", signed_values=every, **parts)
    return jax.jit(resolve_method(settings).scorer(POLICY, temperature=1.0, pad_id=tiny.PAD), static_argnums=4)


def in_parts(program, size, *arrays):
    """Call a program on parts of so many rows, the last one filled up with its first row: it compiles once."""
    rows, parts = len(arrays[0]), []
    for start in range(0, rows, size):
        at = np.arange(start, start + size)
        at[at >= rows] = start
        parts.append(jax.device_get(program(*(x[at] for x in arrays))))
    return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *parts)


def chances(params, question, completions):
    """Return the probability of each completion's tokens, [B, ROOM]; 1 after its end."""
    tokens, valid = padded([ids(question)] * len(completions), completions)
    logps = in_parts(functools.partial(log_probs, params), 24 * tiny.VOCAB, tokens, valid)
    logps = np.asarray(logps, np.float64)[:, PROMPT - 1 : -1]
    own = np.take_along_axis(logps, tokens[:, PROMPT:, None], -1)[..., 0]
    return np.exp(np.where(valid[:, PROMPT:], own, 0))


@functools.cache
def answer(question):
    return ids(right_answer(question, kind="copy", table=right_letters(SEED)))


def returns(params, question, *, room):
    """Return Q [V], with ``room`` tokens after the first."""
    ending = [tiny.MARK, *answer(question), tiny.STOP]
    before = [t for t in EVERY if t != tiny.STOP]
    right = [[*x, *ending] for n in range(room - len(ending) + 1) for x in itertools.product(before, repeat=n)]
    rows = chances(params, question, [[token, *rest] for token in EVERY for rest in right])
    return rows[:, 1:].prod(1).reshape(tiny.VOCAB, -1).sum(1)


def values(params, question, completions, *, later=0, answered=True):
    """Return v [B, V] at the first token of each completion, every token of the vocabulary in its place.

    ``later`` tokens and the mark follow it, then the answer.
    """
    tokens, valid = padded([ids(question)] * len(completions), completions)
    written, place = valid[:, PROMPT:], np.arange(ROOM)
    zeros = np.zeros(written.shape, np.float32)
    rollout = Rollout(tokens, valid, written, zeros, zeros, np.ones(len(tokens), bool))
    before = np.broadcast_to(place < 1, written.shape)
    after = written & (place > later + 1) & (place < written.sum(1, keepdims=True) - 1) & answered
    span = AnswerSpan(before, after, after.any(1))
    probed, at = with_reference(
        rollout, span, [([tiny.MARK], answer(question))] * len(tokens), room=4, stop_id=tiny.STOP
    )
    leaves, form = jax.tree.flatten((probed, at))
    keys = jax.random.split(jax.random.key(0), tiny.VOCAB)  # entropy chooses the places

    def score(*leaves):
        return scorer()(params, *jax.tree.unflatten(form, leaves), keys, "answer_mean").values

    found = in_parts(score, tiny.VOCAB, *leaves)
    listed, out = found.listed[:, 0], np.full((len(tokens), tiny.VOCAB), np.nan)
    for row in range(len(tokens)):
        out[row, found.ids[row, 0][listed[row]]] = found.values[row, 0][listed[row]]
    assert np.isfinite(out).all()
    return out


@pytest.mark.parametrize("question", [ONE, TWO])
def test_with_nothing_between_the_place_and_the_answer_v_is_q(question):
    """And v - b is Q - V, whichever token was drawn: no text is left that could depend on it."""
    params = trained(0)
    pi = chances(params, question, [[token] for token in EVERY])[:, 0]
    q = returns(params, question, room=len(answer(question)) + 2)
    for v in values(params, question, [[drawn, tiny.STOP] for drawn in EVERY], answered=False):
        np.testing.assert_allclose(v, q, rtol=1e-3)
        np.testing.assert_allclose(v - pi @ v, q - pi @ q, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module", params=CASES)
def drawn_anew(request):
    """Return the question, Q, and [D, V]: the mean of v(a) over the tokens that are drawn after D until the mark."""
    question, filler = request.param
    params, end, v = trained(filler), [*answer(question), tiny.STOP], np.zeros((tiny.VOCAB, tiny.VOCAB))
    for later in range(filler + 2):
        texts = list(itertools.product([t for t in EVERY if t != tiny.STOP], repeat=later))
        of_text = values(params, question, [[0, *x, tiny.MARK, *end] for x in texts], later=later)
        drawn = chances(params, question, [[token, *x, tiny.MARK] for token in EVERY for x in texts])
        v += drawn[:, 1:].prod(1).reshape(tiny.VOCAB, len(texts)) @ of_text
    return question, returns(params, question, room=len(end) + filler + 2), v


def test_v_is_q_where_the_later_tokens_are_drawn_anew(drawn_anew):
    """And their mark: v takes a mark that the row wrote as given, Q counts its probability."""
    _, q, v = drawn_anew
    np.testing.assert_allclose(np.diagonal(v), q, rtol=1e-3)


def test_text_that_restates_the_drawn_token_pulls_the_others_to_its_value(drawn_anew):
    """Of the right letter and each wrong one, either of them drawn: how far v sets them apart, and how far Q does."""
    question, q, v = drawn_anew
    right = answer(question)[0]
    pairs = [(right, a) for a in ids("ABC") if a != right]
    drawn, other = np.array(pairs + [pair[::-1] for pair in pairs]).T
    apart, truly = abs(v[drawn, other] - v[drawn, drawn]), abs(q[drawn] - q[other])
    share = apart.sum() / truly.sum()
    if question == ONE:
        assert (apart < truly + 0.01).all()
        assert share < 0.75
    else:
        assert share == pytest.approx(1, abs=0.2)
