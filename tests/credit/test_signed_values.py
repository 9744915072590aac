"""Signed values against their definitions: brute force and finite differences. Q: test_values_and_returns.py."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from oarjax.config.loading import parse_config
from oarjax.costs import RowTokens, clean_flops
from oarjax.credit.methods import signed_values as sv
from oarjax.credit.resolved import resolve_method
from oarjax.credit.settings import AnswerSettings, CreditSettings, SignedValuesSettings
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.step.iteration import iterate
from oarjax.step.spans import with_reference
from oarjax.types import AnswerSpan, Rollout

CUE, TARGET = [tiny.MARK], [5, 6]
TEMPERATURE = 0.8


def rows():
    """Four rows of 10 positions: two with an answer, one that ended without, one that was cut off."""
    draw = np.random.default_rng(0)
    T, lengths, ended = 10, np.array([9, 7, 8, 10]), np.array([True, True, True, False])
    completion = np.arange(T) < lengths[:, None]
    prompt, prompt_valid = draw.integers(3, tiny.VOCAB, (4, 4)), np.array([[0, 1, 1, 1]] * 3 + [[1, 1, 1, 1]], bool)
    tokens = np.where(completion, draw.integers(3, tiny.VOCAB, (4, T)), tiny.PAD)
    reasoning, answer = np.zeros((2, 4, T), bool)
    for row, end in ((0, 8), (1, 6)):  # reasoning, a marker, an answer, the stop
        tokens[row, end], tokens[row, end - 2] = tiny.STOP, tiny.MARK
        reasoning[row, : end - 2], answer[row, end - 1] = True, True
    tokens[2, 7] = tiny.STOP
    zeros = np.zeros((4, T), np.float32)
    rollout = Rollout(
        np.concatenate([prompt, tokens], 1).astype(np.int32),
        np.concatenate([prompt_valid, completion], 1),
        completion,
        zeros,
        zeros,
        ended,
    )
    return rollout, AnswerSpan(reasoning, answer, answer.any(1))


def test_the_outcome_is_the_answer_and_its_end_and_the_cue_where_none_was_written():
    rollout, span = rows()
    probed, at = with_reference(rollout, span, [(CUE, TARGET)] * 4, room=4, stop_id=tiny.STOP)
    written = probed.tokens[:, 4:]
    for row, (start, expected) in enumerate([(7, [5, 6, 1]), (5, [5, 6, 1]), (7, [2, 5, 6, 1]), (10, [2, 5, 6, 1])]):
        np.testing.assert_array_equal(written[row, :start], rollout.tokens[row, 4 : 4 + start])
        np.testing.assert_array_equal(written[row, start : start + len(expected)], expected)
        assert at.outcome[row].sum() == (len(expected) if row < 3 else 0)
        assert probed.completion[row].sum() == start + len(expected)
    np.testing.assert_array_equal(at.reasoning[:2, :10], span.reasoning[:2])


def test_what_ends_an_answer_is_what_the_row_wrote_after_its_own():
    """A closing brace, after which a full stop and the stop token would follow, counts in place of the stop token."""
    rollout, span = rows()
    tokens = rollout.tokens.copy()
    tokens[0, 4 + 7 : 4 + 10], brace = [tiny.MARK + 1, tiny.MARK + 2, tiny.STOP], tiny.MARK + 1
    answer = span.answer.copy()
    answer[0] = np.arange(10) == 6
    rollout, span = rollout.replace(tokens=tokens), span.replace(answer=answer)
    probed, at = with_reference(rollout, span, [(CUE, TARGET)] * 4, room=4, stop_id=tiny.STOP)
    np.testing.assert_array_equal(probed.tokens[0, 4 + 6 : 4 + 9], [*TARGET, brace])
    np.testing.assert_array_equal(np.flatnonzero(at.outcome[0]), [6, 7, 8])


@pytest.fixture(scope="module")
def setting():
    policy, _, state = tiny.build(tiny.config())
    rollout, span = rows()
    probed, at = with_reference(rollout, span, [(CUE, TARGET)] * 4, room=4, stop_id=tiny.STOP)
    return policy, state.params, jax.tree.map(jnp.asarray, probed), jax.tree.map(jnp.asarray, at)


@partial(jax.jit, static_argnums=0)
def log_probs(policy, params, tokens, valid):
    """[B, N, V]: of the token after each position."""
    positions = jnp.clip(jnp.cumsum(valid, 1) - 1, 0)
    hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions, valid)
    return jax.nn.log_softmax(policy.unembed(params, hidden) / TEMPERATURE)


def brute_force(policy, params, probed, at, row, place, token):
    """The product of the outcome's probabilities in one whole forward, with the token at its place."""
    prompt = probed.tokens.shape[1] - probed.completion.shape[1]
    tokens = np.array(probed.tokens[row : row + 1])
    tokens[0, prompt + place] = token
    logps = np.asarray(log_probs(policy, params, tokens, probed.valid[row : row + 1]))[0]
    ends = prompt + np.flatnonzero(at.outcome[row])
    return float(np.exp(sum(logps[p - 1, tokens[0, p]] for p in ends))) if len(ends) else 0.0


def scored(setting, by="oar_l", **changes):
    policy, params, probed, at = setting
    settings = CreditSettings(
        method="signed_values",
        signed_values=SignedValuesSettings(by=by, places=3, candidates=4, **changes),
        answer=AnswerSettings(source="reference"),
    )
    method = resolve_method(settings)
    keys = jax.random.split(jax.random.key(0), 4)
    score = jax.jit(method.scorer(policy, temperature=TEMPERATURE, pad_id=tiny.PAD), static_argnums=4)
    return score(params, probed, at, keys, "answer_mean")


@pytest.mark.parametrize("by", ["oar_l", "random", "entropy", pytest.param("oar_g", marks=pytest.mark.slow)])
def test_values_are_brute_force(setting, by):
    policy, params, *where = setting
    probed, at = jax.device_get(where)
    found = jax.device_get(scored(setting, by))
    values, listed = found.values, np.asarray(found.values.listed)
    where = np.flatnonzero(listed.any((2,)).reshape(-1))
    assert len(where) == 4 * 3
    order = np.argsort(-np.abs(np.where(at.reasoning, found.importance, -np.inf)), axis=1, kind="stable")
    T = listed.shape[1]
    prompt = probed.tokens.shape[1] - T
    for flat in where:
        row, place = divmod(int(flat), T)
        assert at.reasoning[row, place]
        logps = log_probs(policy, params, probed.tokens[row : row + 1], probed.valid[row : row + 1])
        own = int(probed.tokens[row, prompt + place])
        likeliest = np.argsort(-logps[0, prompt + place - 1])[:4].tolist()
        ids = values.ids[row, place][listed[row, place]].tolist()
        assert sorted(ids) == sorted({*likeliest, own})
        expected = [brute_force(policy, params, probed, at, row, place, token) for token in ids]
        np.testing.assert_allclose(values.values[row, place][listed[row, place]], expected, rtol=2e-4, atol=1e-9)
    if by == "random":
        assert len({tuple(row[:3]) for row in order.tolist()}) > 1
    if by == "entropy":
        logps = log_probs(policy, params, probed.tokens, probed.valid)[:, prompt - 1 : -1]
        entropies = jnp.where(at.reasoning, -jnp.sum(jnp.exp(logps) * logps, -1), 0)
        np.testing.assert_allclose(found.importance, entropies, rtol=1e-5)
    assert (np.asarray(values.values)[3] == 0).all()  # cut off: the answer is never reached


def test_the_loss_is_its_definition_and_its_gradient_that_of_finite_differences():
    draw = np.random.default_rng(1)
    with jax.enable_x64(True):
        logits = jnp.asarray(draw.normal(size=(2, 7)))
        ids = jnp.array([[1, 4, 6], [0, 2, 2]])
        listed = jnp.array([[True, True, True], [True, True, False]])
        values, scale = jnp.asarray(draw.random((2, 3))), jnp.array([0.4, 0.25])

        def loss(logits, frozen=None):
            """The definition; with ``frozen`` the stopped factor is that of other logits."""
            total = 0.0
            for row in range(2):
                pi = jax.nn.softmax(logits[row])
                at = jax.nn.softmax((logits if frozen is None else frozen)[row])
                C = [int(a) for a, there in zip(ids[row], listed[row]) if there]
                v = {int(a): values[row, n] for n, a in enumerate(ids[row]) if listed[row, n]}
                b = sum(at[a] * v[a] for a in C) / sum(at[a] for a in C)
                total -= sum(pi[a] * (v[a] - b) / scale[row] for a in C)
            return total

        def ours(logits):
            return sv.signed_value_loss(jax.nn.log_softmax(logits), ids, values, listed, scale).sum()

        np.testing.assert_allclose(ours(logits), loss(logits), rtol=1e-12, atol=1e-14)
        gradient, h = jax.grad(ours)(logits), 1e-6
        for row, token in itertools.product(range(2), range(7)):
            up, down = (loss(logits.at[row, token].add(d), logits) for d in (h, -h))
            np.testing.assert_allclose(gradient[row, token], (up - down) / (2 * h), rtol=1e-6, atol=1e-9)
        equal = sv.signed_value_loss(jax.nn.log_softmax(logits), ids, values, listed, jnp.zeros(2))
        assert (equal == 0).all()


def test_of_the_whole_vocabulary_it_is_the_exact_policy_gradient():
    """d/dlogits of sum_a pi(a) Q(a), the expected return of a choice."""
    draw = np.random.default_rng(2)
    with jax.enable_x64(True):
        logits, q = jnp.asarray(draw.normal(size=6)), jnp.asarray(draw.random(6))
        every = jnp.arange(6)
        ours = jax.grad(
            lambda x: sv.signed_value_loss(jax.nn.log_softmax(x), every, q, jnp.ones(6, bool), jnp.asarray(1.0))
        )(logits)
        exact = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * q))(logits)
        np.testing.assert_allclose(-ours, exact, rtol=1e-12)


CFG = {
    "credit__method": "signed_values",
    "credit__answer": {"source": "reference"},
    "advantage__method": "batch",
    "advantage__scale": "batch",
    "update__skip_zero_variance": False,
}


def world(**more):
    def probed(rollout, span, problems):
        return with_reference(rollout, span, [(CUE, TARGET)] * len(rollout.ended), room=4, stop_id=tiny.STOP)

    return tiny.host(**more)._replace(probed=probed)


def test_an_iteration_moves_what_is_listed_and_shares_the_rest():
    """Of 16 prompts, a completion each; where all rewards are equal nothing has a value."""
    singles = {"rollout__prompts": 16, "rollout__group_size": 1}
    cfg = tiny.config(**CFG, **singles, credit__signed_values={"places": 1, "candidates": 3, "share": 0.25})
    _, steps, state = tiny.build(cfg)
    _, done = iterate(state, state.params, 1, steps=steps, host=world(batches=[tiny.prompts(16)]), cfg=cfg)
    assert np.isfinite(done.metrics["grad_norm"])
    assert done.metrics["auxiliary"] != 0
    inside = done.rollout.completion
    assert set(np.unique(done.weights[inside])) == {0.0, 0.25}
    assert ((done.weights == 0) & inside).sum(1).max() == 1
    _, _, state = tiny.build(cfg)
    equal = world(batches=[tiny.prompts(16)], reward=lambda rollout: np.ones(16, np.float32))
    _, done = iterate(state, state.params, 1, steps=steps, host=equal, cfg=cfg)
    assert (done.metrics["auxiliary"], done.metrics["grad_norm"]) == (0, 0)


def test_what_it_refuses():
    tree = tiny.config(**CFG).model_dump()
    with pytest.raises(ConfigError, match=r"skip_zero_variance: true, and signed_values learns from rows of advantage"):
        parse_config(tree | {"update": tree["update"] | {"skip_zero_variance": True}})
    with pytest.raises(ConfigError, match=r"update\.epochs: 2 with update\.minibatches 1 and credit\.method signed_va"):
        tiny.build(tiny.config(**CFG, update__epochs=2))
    with pytest.raises(ConfigError, match=r"credit\.answer\.source: own with credit\.method signed_values"):
        tiny.build(tiny.config(**CFG | {"credit__answer": {"source": "own"}}))
    with pytest.raises(ConfigError, match=r"credit\.polarity: wrong with credit\.method signed_values"):
        tiny.build(tiny.config(**CFG, credit__polarity="wrong"))


def test_its_cost_is_the_finder_and_a_suffix_per_candidate():
    """2 places x 4 candidates at half a row of reasoning alone: eight halves and a clean pass, and OAR-L's own."""
    d = Decoder(layers=2, trunk_params=1000, head_params=10, heads_width=0, kv_width=4)
    row = RowTokens(prompt=0, completion=101, reasoning=100)
    settings = CreditSettings(method="signed_values", signed_values=SignedValuesSettings(by="random"))
    halves = resolve_method(settings).forwards(row, d)
    assert halves == pytest.approx(1 + 8 / 2, rel=0.02)
    free = replace(settings, signed_values=SignedValuesSettings(by="entropy"))
    assert resolve_method(free).forwards(row, d) == pytest.approx(halves + 2 * 10 * 101 / clean_flops(d, row))
    finder = CreditSettings(method="signed_values")
    local = CreditSettings(method="oar_l")
    both = resolve_method(finder).forwards(row, d)
    assert both == pytest.approx(halves + resolve_method(local).forwards(row, d) - 1)
