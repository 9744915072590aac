"""OAR-L: with a window over everything it is OAR-P; else one forward per token with clean keys elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import LENGTH, PROMPT, ROWS, batch
from toy_policy import toy_params, toy_policy

from oarjax.credit.oar.oar_l import local_importance
from oarjax.credit.oar.oar_p import masked_token_importance
from oarjax.credit.probe import Probe, kl_divergence, outcome_probe
from oarjax.models.policy import positions_of

MASK = 9
POLICY, PARAMS = toy_policy(), toy_params(jax.random.key(0), scale=1.5)


@functools.partial(jax.jit, static_argnames=("mode", "window", "answers", "chunk", "counterfactual"))
def local(tokens, valid, span, *, mode="answer_mean", window=1, answers=4, chunk=2, counterfactual="mask"):
    return local_importance(
        POLICY, PARAMS, tokens, valid, span, probe=outcome_probe(mode, temperature=0.7), mask_id=MASK, window=window,
        answers=answers, chunk=chunk, counterfactual=counterfactual,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "kind"), [("answer_mean", "mask"), ("answer_joint", "deleted"), ("last", "second_choice")]
)
def test_with_a_window_over_everything_it_is_oar_p(mode, kind):
    expected = jax.jit(
        lambda: masked_token_importance(
            POLICY, PARAMS, *batch(), probe=outcome_probe(mode, temperature=0.7), mask_id=MASK, chunk=4, buckets=2,
            counterfactual=kind,
        )
    )()  # fmt: skip
    found = local(*batch(), mode=mode, window=100, chunk=1, counterfactual=kind)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_without_a_window_only_the_direct_effect_is_left():
    """One attention layer: the answer's position reads the changed key and value, all others are clean."""
    tokens, valid, span = batch()
    found = local(tokens, valid, span, mode="last", window=0)
    row, t = 2, 3  # by hand for one token: keys and values of the toy layer, one slot replaced
    at = int(np.flatnonzero(np.asarray(span.answer[row]))[0]) + PROMPT - 1
    positions = positions_of(valid)[row]
    embeddings = PARAMS["embed"][tokens[row]]
    changed = embeddings.at[PROMPT + t].set(PARAMS["embed"][MASK])

    def logits(e):
        angle = positions[:, None] * (0.3 / jnp.arange(1, 9))
        x = e + 0.5 * jnp.sin(angle)
        q, k, v = ((x @ PARAMS[name]).reshape(-1, 2, 4) for name in "qkv")
        scores = jnp.einsum("hd,chd->hc", q[at], k)
        scores = jnp.where((jnp.arange(len(x)) <= at) & valid[row], scores, -1e9)
        y = x[at] + jnp.einsum("hc,chd->hd", jax.nn.softmax(scores), v).reshape(-1)
        y = y + jnp.tanh(y @ PARAMS["up"]) @ PARAMS["up"].T
        return y @ PARAMS["embed"].T / 0.7

    expected = kl_divergence(logits(embeddings), logits(changed))
    np.testing.assert_allclose(found[row, t], expected, rtol=1e-4)


def test_chunks_padding_and_neighbours_change_nothing():
    together = local(*batch())
    assert (np.asarray(together)[:3].max(1) > 1e-4).all()
    assert (together[3] == 0).all(), "a row with no answer"
    np.testing.assert_allclose(local(*batch(), chunk=1), together, rtol=0, atol=1e-5 * together.max())
    wider = local(*batch(prompt=7, length=15, pad=MASK))
    np.testing.assert_allclose(wider[:, :LENGTH], together, rtol=0, atol=1e-5 * together.max())
    order = [2, 0, 3, 1]
    np.testing.assert_allclose(local(*batch([ROWS[i] for i in order])), together[jnp.array(order)], rtol=0, atol=1e-6)


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="local_importance: window must be an integer >= 0, got -1"):
        local(*batch(), window=-1)
    with pytest.raises(ValueError, match="a probe that reads the answer alone; for others use OAR-P"):
        local_importance(
            POLICY, PARAMS, *batch(), probe=Probe(lambda *_: jnp.zeros(4), "scalar", "completion"), mask_id=MASK,
            window=1, answers=1, chunk=1,
        )  # fmt: skip
