"""OAR-F is the second order of OAR-P, and its factors make up the Fisher information."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import LENGTH, ROWS, batch
from toy_policy import toy_params, toy_policy

from oarjax.credit.clean_pass import linear_pass
from oarjax.credit.oar.oar_f import fisher_factors, fisher_importance
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.oar.oar_p import masked_token_importance
from oarjax.credit.probe import ProbeMode, divergence, outcome_probe, reading_of
from oarjax.models.policy import Policy

MASK = 9
POLICY, PARAMS = toy_policy(), toy_params(jax.random.key(0), scale=1.5)
KEYS = row_keys(jax.random.key(5), jnp.arange(len(ROWS)))


@functools.partial(jax.jit, static_argnames=("mode", "outcomes", "sampled"))
def fisher(tokens, valid, span, keys=KEYS, *, mode: ProbeMode = "answer_mean", outcomes=23, sampled=0):
    return fisher_importance(
        POLICY, PARAMS, tokens, valid, span, keys, probe=outcome_probe(mode, temperature=0.7), mask_id=MASK,
        outcomes=outcomes, sampled=sampled,
    )  # fmt: skip


def test_factors_make_up_the_fisher_information():
    p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 5)) * 2)
    factors = fisher_factors(p, KEYS[:2], outcomes=5, sampled=0)
    expected = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
    np.testing.assert_allclose(jnp.einsum("mbv,mbw->bvw", factors, factors), expected, atol=1e-6)
    assert fisher_factors(p, KEYS[:2], outcomes=9, sampled=0).shape == (5, 2, 5)


def test_drawn_factors_are_right_in_expectation():
    """2 outcomes exactly, 20,000 drawn from the other 3: the rest's part has a relative error of about 1%."""
    p = jnp.array([[0.4, 0.2, 0.2, 0.15, 0.05]])
    factors = fisher_factors(p, KEYS[:1], outcomes=2, sampled=20_000)[:, 0]
    expected = jnp.diag(p[0]) - p[0][:, None] * p[0][None, :]
    np.testing.assert_allclose(factors.T @ factors, expected, atol=0.004)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "mode", ["answer_joint", pytest.param("last", marks=slow), pytest.param("answer_mean", marks=slow)]
)
def test_is_the_leading_order_of_oar_p(mode, x64):
    """Shrink every change of embedding by s: OAR-P / s^2 (s for the scalar) tends to OAR-F, its error with s."""
    params = toy_params(jax.random.key(0), scale=1.5, dtype=jnp.float64)
    tokens, valid, span = batch()
    probe, power = outcome_probe(mode, temperature=0.7), 1 if mode == "answer_joint" else 2

    @jax.jit
    def towards(s):
        """A policy whose mask token lies s of the way from every token: the exact score of a small change."""
        clean = linear_pass(POLICY, params, tokens, valid, completion_length=LENGTH)

        def read(hidden):
            return probe.read(POLICY, params, hidden, reading_of(tokens, valid, span))

        def score(t):
            e = clean.embeddings
            moved = e.at[:, t + 1].add(s * (params["embed"][MASK] - e[:, t + 1]))
            return divergence(probe, read(clean.hidden), read(clean.states(moved)))

        scores = jax.lax.map(score, jnp.arange(LENGTH - 1))  # the last token has none behind it
        scores = jnp.pad(scores.T, ((0, 0), (0, 1)))
        return jnp.where(span.reasoning & span.has_answer[:, None], scores, 0)

    estimate = jax.jit(
        lambda: fisher_importance(
            POLICY, params, tokens, valid, span, KEYS, probe=probe, mask_id=MASK, outcomes=23, sampled=0
        )
    )()
    errors = [np.abs(towards(s) / s**power - estimate).max() / np.abs(estimate).max() for s in (1e-2, 1e-3, 1e-4)]
    assert errors[-1] < 1e-3
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


def linear_policy(params) -> Policy:
    """Hidden state = sum of the embeddings so far, head a matrix."""

    def trunk(params, embeddings, positions, valid, *, cache=None, prefix=None, visible=None):
        return jnp.cumsum(embeddings * valid[..., None], axis=1), cache

    return Policy(
        lambda params, tokens: params["embed"][tokens],
        trunk,
        lambda params, hidden: hidden @ params["head"],
        lambda rows, slots: None,  # pyright: ignore[reportArgumentType]
    )


def test_by_hand():
    """Two outcomes, z = W^T sum e: s_t = p (1 - p) / 2 ((e_mask - e_t) (w_0 - w_1))^2."""
    rng = np.random.default_rng(0)
    embed, head = rng.normal(size=(6, 3)), rng.normal(size=(3, 2))
    ids = [1, 4, 2, 0, 3]  # prompt 1; reasoning 4 2; cue 0; answer 3
    z = embed[ids[:4]].sum(0) @ head
    p = np.exp(z[0]) / np.exp(z).sum()
    slope = (embed[5] - embed[[4, 2]]) @ (head[:, 0] - head[:, 1])
    expected = p * (1 - p) / 2 * slope**2
    from oarjax.types import AnswerSpan

    span = AnswerSpan(jnp.arange(4)[None] < 2, jnp.arange(4)[None] == 3, jnp.ones(1, bool))
    params = {"embed": jnp.asarray(embed, jnp.float32), "head": jnp.asarray(head, jnp.float32)}
    found = fisher_importance(
        linear_policy(params), params, jnp.array([ids]), jnp.ones((1, 5), bool), span, KEYS[:1],
        probe=outcome_probe("answer_mean", temperature=1.0), mask_id=5, outcomes=2, sampled=0,
    )  # fmt: skip
    np.testing.assert_allclose(found, [[*expected, 0, 0]], rtol=1e-4, atol=1e-7)


def test_rows_and_padding_change_nothing():
    together = fisher(*batch(), outcomes=3, sampled=2)
    assert (together[3] == 0).all(), "a row with no answer"
    wider = fisher(*batch(prompt=7, length=15, pad=MASK), outcomes=3, sampled=2)
    np.testing.assert_allclose(wider[:, :LENGTH], together, rtol=0, atol=1e-5 * together.max())
    order = jnp.array([2, 0, 3, 1])
    permuted = fisher(*batch([ROWS[i] for i in order]), KEYS[order], outcomes=3, sampled=2)
    np.testing.assert_allclose(permuted, together[order], rtol=0, atol=1e-6)


def test_more_outcomes_only_add():
    few, all_of_them = fisher(*batch(), outcomes=2), fisher(*batch())
    assert (np.asarray(all_of_them - few) >= -1e-6).all()
    assert (all_of_them > few + 1e-6).any()


def test_no_gradient_reaches_the_parameters():
    tokens, valid, span = batch(ROWS[:2])

    def total(params):
        return fisher_importance(
            POLICY, params, tokens, valid, span, KEYS[:2], probe=outcome_probe("last", temperature=1.0), mask_id=MASK,
            outcomes=2, sampled=1,
        ).sum()  # fmt: skip

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(PARAMS)):
        assert (leaf == 0).all()


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="fisher_importance: outcomes must be an integer >= 1, got 0"):
        fisher(*batch(), outcomes=0)
    # the scores of masking are there to compare with
    assert callable(masked_token_importance)
