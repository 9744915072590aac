"""OAR-P: equal to masking tokens one by one, whatever the chunk, the padding and the neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import ROWS, batch, single
from toy_policy import toy_params, toy_policy

from oarjax.oar.perturb import masked_token_importance
from oarjax.oar.probe import kl_divergence
from oarjax.policy import Policy, positions_of
from oarjax.types import AnswerSpan

MASK = 9  # a token that two of the rows contain
POLICY, PARAMS = toy_policy(), toy_params(jax.random.key(0), scale=1.5)


@functools.partial(jax.jit, static_argnames=("mode", "chunk"))
def importance(tokens, valid, span, *, mode="answer_mean", chunk=4):
    return masked_token_importance(
        POLICY, PARAMS, tokens, valid, span, mode=mode, mask_id=MASK, chunk=chunk, temperature=0.7
    )


def one_by_one(row, mode):
    """Masked sequences written out in token ids, one whole forward each."""
    ids = row.prompt + row.completion
    begin = len(row.prompt) + len(row.reasoning) + len(row.cue)
    at = np.arange(begin, begin + len(row.answer)) - 1

    @jax.jit
    def outcome(ids):
        tokens = ids[None]
        valid = jnp.ones(tokens.shape, bool)
        hidden, _ = POLICY.trunk(PARAMS, POLICY.embed(PARAMS, tokens), positions_of(valid), valid)
        logits = POLICY.unembed(PARAMS, hidden[0, at]) / 0.7
        if mode == "answer_joint":
            return jax.nn.log_softmax(logits)[jnp.arange(len(at)), ids[at + 1]].mean()
        return logits[0] if mode == "last" else logits.mean(0)

    clean, scores = outcome(jnp.array(ids)), []
    for t in range(len(row.prompt), len(row.prompt) + len(row.reasoning)):
        masked = outcome(jnp.array((*ids[:t], MASK, *ids[t + 1 :])))
        scores.append(clean - masked if mode == "answer_joint" else kl_divergence(clean, masked))
    return np.array(scores)


@pytest.mark.parametrize("mode", ["last", "answer_mean", "answer_joint"])
def test_equals_masking_tokens_one_by_one(mode):
    tokens, valid, span = batch()
    found = np.asarray(importance(tokens, valid, span, mode=mode))
    for i in (0, 2):
        expected = one_by_one(ROWS[i], mode)
        np.testing.assert_allclose(found[i, : len(expected)], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert (found[~np.asarray(span.reasoning)] == 0).all()
    assert (found[3] == 0).all(), "a row with no answer"
    if mode == "answer_joint":
        assert (found < 0).any(), "a drop may be negative"


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunk_size_changes_nothing(chunk):
    whole = importance(*batch())
    np.testing.assert_allclose(importance(*batch(), chunk=chunk), whole, rtol=0, atol=1e-5 * whole.max())


def test_padding_and_neighbours_change_nothing():
    together = importance(*batch())
    wider = importance(*batch(prompt=7, length=15, pad=MASK))
    np.testing.assert_allclose(wider[:, :12], together, rtol=0, atol=1e-5 * together.max())
    assert (wider[:, 12:] == 0).all()
    for i in (0, 2):
        alone = importance(*single(ROWS[i]))
        np.testing.assert_allclose(together[i, : alone.shape[1]], alone[0], rtol=0, atol=1e-5 * together.max())


def test_permuting_rows_permutes_scores():
    order = [2, 0, 3, 1]
    permuted = importance(*batch([ROWS[i] for i in order]))
    np.testing.assert_allclose(permuted, importance(*batch())[jnp.array(order)], rtol=0, atol=1e-7)


def test_a_token_that_is_the_mask_scores_zero():
    scores = importance(*batch())
    assert ROWS[0].reasoning[1] == MASK
    np.testing.assert_allclose(scores[0, 1], 0, atol=1e-6)
    assert scores[0, 0] > 1e-3


def test_what_follows_the_answer_does_not_matter():
    before, after = (importance(*batch([ROWS[1]._replace(rest=rest)])) for rest in ((1,), (17, 3, 5)))
    np.testing.assert_array_equal(before, after)


def counting_policy() -> Policy:
    """Hidden state = how often each token has been seen; the outcome (2 values) turns on token 7 alone."""

    def trunk(params, embeddings, positions, valid, *, cache=None, prefix=None):
        assert cache is None
        assert prefix is None
        return jnp.cumsum(embeddings * valid[..., None], axis=1), None

    def unembed(params, hidden):
        return jnp.stack([params["gain"] * hidden[..., 7], jnp.zeros(hidden.shape[:-1])], axis=-1)

    return Policy(lambda params, tokens: jax.nn.one_hot(tokens, 10), trunk, unembed, lambda rows, slots: None)


def test_the_one_deciding_token_is_found():
    tokens = jnp.array([[1, 2, 5, 7, 3, 4, 1]])  # prompt of one; reasoning 2 5 7 3; cue 4; answer 1
    reasoning, answer = jnp.arange(6)[None] < 4, jnp.arange(6)[None] == 5
    scores = masked_token_importance(
        counting_policy(),
        {"gain": jnp.array(2.0)},
        tokens,
        jnp.ones((1, 7), bool),
        AnswerSpan(reasoning, answer, jnp.ones(1, bool)),
        mode="answer_mean",
        mask_id=0,
        chunk=3,
        temperature=0.5,
    )
    # Clean logits (2/0.5, 0), without the token (0, 0): KL = sum p ln(2 p) = ln 2 - entropy, p = sigmoid(4).
    p = 1 / (1 + np.exp(-4.0))
    expected = p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p))
    np.testing.assert_allclose(scores, [[0, 0, expected, 0, 0, 0]], rtol=1e-5, atol=1e-7)


def test_no_gradient_reaches_the_parameters():
    tokens, valid, span = batch(ROWS[:2])

    def total(params):
        return masked_token_importance(
            POLICY, params, tokens, valid, span, mode="answer_joint", mask_id=MASK, chunk=4, temperature=1.0
        ).sum()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(PARAMS)):
        assert (leaf == 0).all()


def test_errors_say_what_was_expected():
    tokens, valid, span = batch()
    with pytest.raises(ValueError, match="chunk: expected at least 1 counterfactual per forward, got 0"):
        importance(tokens, valid, span, chunk=0)
    with pytest.raises(ValueError, match="the prompt first"):
        importance(tokens[:, 4:], valid[:, 4:], span)
