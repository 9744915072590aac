"""OAR-P: equal to masking tokens one by one, whatever the chunk, the padding and the neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import LENGTH, PROMPT, ROWS, batch
from toy_policy import toy_params, toy_policy

from oarjax.credit.counterfactual import replacement_embeddings
from oarjax.credit.oar.oar_p import masked_token_importance
from oarjax.credit.probe import Probe, kl_divergence, outcome_probe
from oarjax.models.policy import Policy, positions_of
from oarjax.types import AnswerSpan, KVCache

MASK = 9  # a token that two of the rows contain
POLICY, PARAMS = toy_policy(), toy_params(jax.random.key(0), scale=1.5)


@functools.partial(jax.jit, static_argnames=("mode", "chunk", "buckets", "counterfactual"))
def importance(tokens, valid, span, params=PARAMS, *, mode="answer_mean", chunk=4, buckets=3, counterfactual="mask"):
    return masked_token_importance(
        POLICY, params, tokens, valid, span, probe=outcome_probe(mode, temperature=0.7), mask_id=MASK, chunk=chunk,
        buckets=buckets, counterfactual=counterfactual,
    )  # fmt: skip


@jax.jit
def all_logits(params, ids):
    """One whole forward, at temperature 0.7."""
    valid = jnp.ones((1, len(ids)), bool)
    hidden, _ = POLICY.trunk(params, POLICY.embed(params, ids[None]), positions_of(valid), valid)
    return POLICY.unembed(params, hidden[0]) / 0.7


def one_by_one(row, params, mode):
    """Masked sequences written out in token ids, one whole forward each."""
    ids = row.prompt + row.completion
    begin = len(row.prompt) + len(row.reasoning) + len(row.cue)
    at = np.arange(begin, begin + len(row.answer)) - 1

    def outcome(ids):
        logits = all_logits(params, ids)[at]
        if mode == "answer_joint":
            return jax.nn.log_softmax(logits)[jnp.arange(len(at)), ids[at + 1]].mean()
        return logits[0] if mode == "last" else logits.mean(0)

    clean, scores = outcome(jnp.array(ids)), []
    for t in range(len(row.prompt), len(row.prompt) + len(row.reasoning)):
        masked = outcome(jnp.array((*ids[:t], MASK, *ids[t + 1 :])))
        scores.append(clean - masked if mode == "answer_joint" else kl_divergence(clean, masked))
    return np.array(scores)


@pytest.mark.parametrize("mode", ["last", "answer_mean", "answer_joint"])
@pytest.mark.usefixtures("x64")
def test_equals_masking_tokens_one_by_one(mode):
    tokens, valid, span = batch()
    exact = jax.tree.map(lambda x: x.astype(jnp.float64), PARAMS)
    found = np.asarray(importance(tokens, valid, span, exact, mode=mode))
    assert found.dtype == np.float64
    for i in (0, 2):
        expected = one_by_one(ROWS[i], exact, mode)
        np.testing.assert_allclose(found[i, : len(expected)], expected, rtol=0, atol=1e-11 * np.abs(expected).max())
    assert (found[~np.asarray(span.reasoning)] == 0).all()
    assert (found[3] == 0).all(), "a row with no answer"
    if mode == "answer_joint":
        assert (found < 0).any(), "a drop may be negative"


@pytest.mark.parametrize(("chunk", "buckets"), [(1, 1), (5, 2), (100, 100)])
def test_chunks_and_buckets_change_nothing(chunk, buckets):
    whole = importance(*batch())
    found = importance(*batch(), chunk=chunk, buckets=buckets)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5 * whole.max())


def test_padding_changes_nothing():
    """Nor do neighbours: above, rows of a batch equal forwards of each row alone."""
    together = importance(*batch())
    wider = importance(*batch(prompt=7, length=15, pad=MASK))
    np.testing.assert_allclose(wider[:, :12], together, rtol=0, atol=1e-5 * together.max())
    assert (wider[:, 12:] == 0).all()


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
        seen = embeddings * valid[..., None]
        total = jnp.cumsum(seen, axis=1)
        if prefix is not None:
            copies = embeddings.shape[0] // prefix.valid.shape[0]
            total += jnp.repeat(prefix.k[0, :, :, 0].sum(1), copies, axis=0)[:, None]
        if cache is None:
            return total, None
        assert cache.valid.shape == valid.shape, "filled at once"
        return total, cache.replace(k=seen[None, :, :, None], v=seen[None, :, :, None], valid=valid)

    def unembed(params, hidden):
        return jnp.stack([params["gain"] * hidden[..., 7], jnp.zeros(hidden.shape[:-1])], axis=-1)

    def init_cache(rows, slots):
        empty = jnp.zeros((1, rows, slots, 1, 10))
        return KVCache(empty, empty, jnp.zeros((rows, slots), bool), jnp.zeros((), jnp.int32))

    return Policy(lambda params, tokens: jax.nn.one_hot(tokens, 10), trunk, unembed, init_cache)


def test_the_one_deciding_token_is_found():
    tokens = jnp.array([[1, 2, 5, 7, 3, 4, 1]])  # prompt of one; reasoning 2 5 7 3; cue 4; answer 1
    reasoning, answer = jnp.arange(6)[None] < 4, jnp.arange(6)[None] == 5
    scores = masked_token_importance(
        counting_policy(),
        {"gain": jnp.array(2.0)},
        tokens,
        jnp.ones((1, 7), bool),
        AnswerSpan(reasoning, answer, jnp.ones(1, bool)),
        probe=outcome_probe("answer_mean", temperature=0.5),
        mask_id=0,
        chunk=3,
        buckets=2,
    )
    # Clean logits (2/0.5, 0), without the token (0, 0): KL = sum p ln(2 p) = ln 2 - entropy, p = sigmoid(4).
    p = 1 / (1 + np.exp(-4.0))
    expected = p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p))
    np.testing.assert_allclose(scores, [[0, 0, expected, 0, 0, 0]], rtol=1e-5, atol=1e-7)


def test_no_gradient_reaches_the_parameters():
    tokens, valid, span = batch(ROWS[:2])

    def total(params):
        return masked_token_importance(
            POLICY, params, tokens, valid, span, probe=outcome_probe("answer_joint", temperature=1.0), mask_id=MASK,
            chunk=4, buckets=2,
        ).sum()  # fmt: skip

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(PARAMS)):
        assert (leaf == 0).all()


def test_errors_say_what_was_expected():
    tokens, valid, span = batch()
    with pytest.raises(ValueError, match="masked_token_importance: chunk must be an integer >= 1, got 0"):
        importance(tokens, valid, span, chunk=0)
    with pytest.raises(ValueError, match="masked_token_importance: buckets must be an integer >= 1, got 0"):
        importance(tokens, valid, span, buckets=0)
    with pytest.raises(ValueError, match="need at least 13 token positions, the prompt first; got N = 12"):
        importance(tokens[:, 4:], valid[:, 4:], span)
    hidden = jnp.zeros((4, 12, 8))
    with pytest.raises(ValueError, match=r"counterfactual: expected one with an embedding, mask, .*, got 'deleted'"):
        replacement_embeddings(POLICY, PARAMS, hidden, tokens[:, 4:], counterfactual="deleted", mask_id=MASK)


def plain(change, span, *, policy=POLICY, params=PARAMS, read=None):
    """vmap over whole sequences of embeddings: ``change(embeddings, valid, t)`` for every completion token t."""
    tokens, valid, _ = batch()
    answer = jnp.pad(span.answer, ((0, 0), (PROMPT, 0)))[:, 1:, None]

    def outcome(embeddings, seen):
        hidden, _ = policy.trunk(params, embeddings, positions_of(valid), seen)
        if read is not None:
            return read(hidden[:, PROMPT - 1 : -1])
        logits = policy.unembed(params, hidden)[:, :-1] / 0.7
        return (logits * answer).sum(1) / jnp.maximum(answer.sum(1), 1)

    def one(t):
        before, after = (outcome(*pair) for pair in (clean, change(*clean, t)))
        return before - after if read is not None else kl_divergence(before, after)

    clean = policy.embed(params, tokens), valid
    return jnp.where(span.reasoning, jax.jit(jax.vmap(one))(jnp.arange(LENGTH)).T, 0)


def put(embedding):
    """A change that puts an embedding, one for all or one per token [B, T, D], at completion token t."""

    def change(embeddings, valid, t):
        new = embedding[:, t] if embedding.ndim == 3 else embedding
        return embeddings.at[:, PROMPT + t].set(new), valid

    return change


def second_choices():
    tokens, valid, _ = batch()
    hidden, _ = POLICY.trunk(PARAMS, POLICY.embed(PARAMS, tokens), positions_of(valid), valid)
    logits = POLICY.unembed(PARAMS, hidden)[:, PROMPT - 1 : -1]
    own = jax.nn.one_hot(tokens[:, PROMPT:], logits.shape[-1], dtype=bool)
    return POLICY.embed(PARAMS, jnp.where(own, -jnp.inf, logits).argmax(-1))


KINDS = {
    "mask": lambda: put(PARAMS["embed"][MASK]),
    "mean_embedding": lambda: put(PARAMS["embed"].mean(0)),
    "second_choice": lambda: put(second_choices()),
    "deleted": lambda: lambda embeddings, valid, t: (embeddings, valid.at[:, PROMPT + t].set(False)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_suffixes_alone_equal_whole_forwards(kind):
    tokens, valid, span = batch()
    span = span.replace(reasoning=span.reasoning & span.has_answer[:, None])
    expected = plain(KINDS[kind](), span)
    found = importance(tokens, valid, span, counterfactual=kind)
    assert (expected[:3].max(1) > 1e-4).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected.max())


def test_tokens_of_a_unit_are_changed_together_and_share_its_score():
    tokens, valid, span = batch()
    units = jnp.asarray([[0, 0, 1, 1, 1, *[2] * 7], [0] * 12, [0, 1, 1, 2, 2, 2, 3, *[4] * 5], [0] * 12], jnp.int32)
    observed = (units == 2) & (jnp.arange(4) == 2)[:, None]  # a hole, which an environment wrote: context alone
    span = span.replace(reasoning=span.reasoning & span.has_answer[:, None] & ~observed)

    def change(embeddings, seen, t):
        together = (units == units[:, t, None]) & span.reasoning
        hit = jnp.pad(together, ((0, 0), (PROMPT, 0)))[..., None]
        return jnp.where(hit, PARAMS["embed"][MASK], embeddings), seen

    size = ((units[:, :, None] == units[:, None, :]) & span.reasoning[:, None]).sum(-1)
    expected = plain(change, span) / jnp.maximum(size, 1)
    found = importance(tokens, valid, span.replace(units=units))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected.max())
    assert found[0, 0] == found[0, 1] != found[0, 2]


def test_a_probe_of_ones_own_reads_the_whole_completion():
    """A score of all states, on rows that have no answer too."""
    tokens, valid, span = batch()
    span = span.replace(has_answer=jnp.ones(4, bool), answer=jnp.zeros_like(span.answer))
    inside = valid[:, PROMPT:, None]

    def score(hidden):
        return jnp.tanh((hidden * inside[: len(hidden)]).sum((1, 2)) / 9)

    def read(policy, params, hidden, at):
        return jnp.tanh((hidden * at.valid[..., None]).sum((1, 2)) / 9)

    expected = plain(put(PARAMS["embed"][MASK]), span, read=score)
    found = jax.jit(
        lambda: masked_token_importance(
            POLICY, PARAMS, tokens, valid, span, probe=Probe(read, "scalar", "completion"), mask_id=MASK, chunk=2,
            buckets=4,
        )
    )()  # fmt: skip
    assert np.abs(expected[3]).max() > 1e-4
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
