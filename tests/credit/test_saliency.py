"""GRAIL's saliency against the gradient of the plain whole-sequence loss."""

import jax
import jax.numpy as jnp
import numpy as np
from oar_rows import ROWS, batch, single
from toy_policy import toy_params, toy_policy

from oarjax.credit.methods.grail import answer_saliency
from oarjax.models.policy import positions_of
from oarjax.rollout.logps import logits_logps

POLICY = toy_policy()
PARAMS = toy_params(jax.random.key(1), scale=1.5)
TEMPERATURE = 0.7


@jax.jit
def compiled(params, tokens, valid, span):
    return answer_saliency(POLICY, params, tokens, valid, span, temperature=TEMPERATURE)


def saliency(tokens, valid, span):
    return np.asarray(compiled(PARAMS, tokens, valid, span))


def plain(row) -> np.ndarray:
    """|| dL/de_t * e_t || over all tokens of one unpadded sequence, by one gradient of the whole forward."""
    ids = jnp.asarray([row.prompt + row.completion])
    valid = jnp.ones(ids.shape, bool)
    first = len(row.prompt) + len(row.reasoning) + len(row.cue)

    def loss(embeddings):
        hidden, _ = POLICY.trunk(PARAMS, embeddings, positions_of(valid), valid)
        logps, _ = logits_logps(POLICY.unembed(PARAMS, hidden[0, :-1]), ids[0, 1:], temperature=TEMPERATURE)
        return -jnp.sum(logps[first - 1 : first - 1 + len(row.answer)])

    embeddings = POLICY.embed(PARAMS, ids)
    product = jax.jit(jax.grad(loss))(embeddings) * embeddings
    return np.linalg.norm(np.asarray(product[0]), axis=-1)[len(row.prompt) :][: len(row.reasoning)]


def test_equals_the_gradient_of_the_whole_sequence():
    found = saliency(*batch())
    for scores, row in zip(found, ROWS):
        assert (scores[len(row.reasoning) :] == 0).all()
        if row.answer:
            expected = plain(row)
            assert (expected > 0).all()
            np.testing.assert_allclose(scores[: len(row.reasoning)], expected, rtol=1e-4)
        else:
            assert (scores == 0).all()


def test_padding_and_neighbours_change_nothing():
    together = saliency(*batch())
    np.testing.assert_allclose(saliency(*batch(prompt=7, length=15, pad=9))[:, :12], together, rtol=1e-4, atol=1e-7)
    for row, scores in zip(ROWS[:2], together):
        alone = saliency(*single(row))[0]
        np.testing.assert_allclose(alone, scores[: len(alone)], rtol=1e-4, atol=1e-7)


def test_what_follows_the_answer_does_not_matter():
    before, after = (saliency(*batch([ROWS[1]._replace(rest=rest)] * 4)) for rest in ((1,), (17, 3, 5)))
    np.testing.assert_allclose(before, after, rtol=1e-5)


def test_no_gradient_flows_to_the_policy():
    tokens, valid, span = batch()

    def total(params):
        return jnp.sum(compiled(params, tokens, valid, span))

    assert all((g == 0).all() for g in jax.tree.leaves(jax.grad(total)(PARAMS)))
