"""The outcome distribution: which states it reads, how they are joined, and what it costs nothing to leave out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import LENGTH, PROMPT, ROWS, batch
from toy_policy import toy_params, toy_policy

from oarjax.credit.probe import (
    Probe,
    answer_logp,
    divergence,
    from_inputs,
    kl_divergence,
    outcome_logits,
    outcome_probe,
    probe_mode,
    scored_tokens,
    to_inputs,
)
from oarjax.models.policy import positions_of
from oarjax.rollout.logps import token_logps

POLICY, PARAMS = toy_policy(), toy_params(jax.random.key(0), scale=1.5)
TOKENS, VALID, SPAN = batch()


@jax.jit
def whole(tokens, valid):
    return POLICY.trunk(PARAMS, POLICY.embed(PARAMS, tokens), positions_of(valid), valid)[0]


def states():
    return whole(TOKENS, VALID)[:, PROMPT - 1 : -1]


def test_probe_mode_warms_up():
    chosen = [probe_mode(i, mode="answer_mean", warmup_mode="last", warmup_iterations=2) for i in range(4)]
    assert chosen == ["last", "last", "answer_mean", "answer_mean"]
    assert probe_mode(0, mode="answer_joint", warmup_mode="last", warmup_iterations=0) == "answer_joint"


def test_inputs_are_completion_tokens_shifted_by_one():
    x = jnp.array([[1, 2, 3]])
    assert to_inputs(x).tolist() == [[0, 1, 2]]
    assert from_inputs(x).tolist() == [[2, 3, 0]]


def test_scored_tokens_are_the_reasoning_of_answered_rows():
    last = outcome_probe("last", temperature=1.0)
    assert scored_tokens(SPAN, last).sum(1).tolist() == [5, 3, 7, 0]
    nowhere = SPAN.replace(answer=jnp.zeros_like(SPAN.answer))  # found, but cut off
    assert not scored_tokens(nowhere, last).any()
    assert scored_tokens(nowhere, last._replace(reads="completion")).sum(1).tolist() == [5, 3, 7, 0]


def test_last_is_the_end_of_the_sequence_without_its_answer():
    logits = outcome_logits(POLICY, PARAMS, states(), SPAN.answer, mode="last", temperature=1.0)
    for i, row in enumerate(ROWS[:3]):
        cut = jnp.array([row.prompt + row.reasoning + row.cue])
        alone = POLICY.unembed(PARAMS, whole(cut, jnp.ones(cut.shape, bool))[:, -1])
        np.testing.assert_allclose(logits[i], alone[0], rtol=0, atol=1e-5)


def test_answer_mean_is_one_softmax_of_the_mean_logits():
    """The head of the mean state equals the mean of the heads, and not the mean of the distributions."""
    hidden = states()
    all_logits = POLICY.unembed(PARAMS, hidden)
    share = (SPAN.answer / jnp.maximum(SPAN.answer.sum(1, keepdims=True), 1))[..., None]
    logits = outcome_logits(POLICY, PARAMS, hidden, SPAN.answer, mode="answer_mean", temperature=0.7)
    np.testing.assert_allclose(logits, (all_logits * share).sum(1) / 0.7, rtol=0, atol=1e-5)
    mean_of_distributions = (jax.nn.softmax(all_logits / 0.7) * share).sum(1)
    assert np.abs(jax.nn.softmax(logits)[2] - mean_of_distributions[2]).max() > 1e-3


def test_kl_by_hand():
    p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    # 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75) = 0.5 ln(4/3)
    np.testing.assert_allclose(kl_divergence(p, q), 0.5 * np.log(4 / 3), rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(p + 3, p), 0, atol=1e-7)


def test_answer_logp_is_the_mean_of_the_tokens_log_probabilities():
    logps, _ = token_logps(POLICY, PARAMS, TOKENS, VALID, completion_length=LENGTH, temperature=0.7, head_chunk=16)
    expected = (logps * SPAN.answer).sum(1) / jnp.maximum(SPAN.answer.sum(1), 1)
    found = answer_logp(POLICY, PARAMS, states(), SPAN.answer, TOKENS[:, PROMPT:], temperature=0.7)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found[3] == 0


def test_gradient_of_answer_logp():
    hidden, targets = states(), TOKENS[:, PROMPT:]

    def direct(hidden):
        logps = jnp.take_along_axis(jax.nn.log_softmax(POLICY.unembed(PARAMS, hidden)), targets[..., None], -1)[..., 0]
        return jnp.sum((logps * SPAN.answer).sum(1) / jnp.maximum(SPAN.answer.sum(1), 1))

    def looped(hidden):
        return answer_logp(POLICY, PARAMS, hidden, SPAN.answer, targets, temperature=1.0).sum()

    np.testing.assert_allclose(jax.grad(looped)(hidden), jax.grad(direct)(hidden), rtol=0, atol=1e-6)


def test_divergence_of_a_scalar_is_what_it_lost():
    score = Probe(lambda *_: jnp.zeros(2), "scalar", "completion")
    np.testing.assert_allclose(divergence(score, jnp.array([3.0, 1.0]), jnp.array([1.0, 2.0])), [2.0, -1.0])


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="mode must be last, answer_mean or answer_joint, got 'mean'"):
        outcome_probe("mean", temperature=1.0)
    with pytest.raises(ValueError, match="temperature must be a number > 0, got 0"):
        outcome_probe("last", temperature=0.0)
    with pytest.raises(ValueError, match="mode must be last or answer_mean, got 'answer_joint'"):
        outcome_logits(POLICY, PARAMS, states(), SPAN.answer, mode="answer_joint", temperature=1.0)
