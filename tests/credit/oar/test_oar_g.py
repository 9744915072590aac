"""OAR-G: the published estimator from its definition, the linearised one as its limit, and the noise of both."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import LENGTH, PROMPT, ROWS, batch, noise_importance, single
from toy_policy import toy_params, toy_policy

from oarjax.credit.oar.oar_g import embedding_noise, gradient_importance, row_keys
from oarjax.credit.probe import kl_divergence, outcome_probe
from oarjax.models.policy import Policy, positions_of
from oarjax.types import AnswerSpan

WIDTH = 8
POLICY, PARAMS = toy_policy(width=WIDTH), toy_params(jax.random.key(0), width=WIDTH, scale=1.5)
KEYS = row_keys(jax.random.key(5), jnp.arange(len(ROWS)))


def unit_noise(length=LENGTH, dtype=jnp.float32):
    return embedding_noise(KEYS, length=length, width=WIDTH, sigma=1.0, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("estimator", "mode", "sigma", "draws"))
def importance(tokens, valid, span, keys=KEYS, *, estimator="linearised", mode="answer_mean", sigma=1e-2, draws=1):
    return gradient_importance(
        POLICY, PARAMS, tokens, valid, span, keys, estimator=estimator, sigma=sigma, draws=draws,
        probe=outcome_probe(mode, temperature=0.7),
    )  # fmt: skip


def by_definition(params, tokens, valid, span, noise, mode):
    """|<dJ/de_t at the noisy point, e_t>| from one function of the embeddings of whole sequences."""
    clean = POLICY.embed(params, tokens)
    inside = jnp.pad(span.reasoning & span.has_answer[:, None], ((0, 0), (PROMPT, 0)))
    answer = jnp.pad(span.answer, ((0, 0), (PROMPT, 0)))[:, 1:, None]
    count = jnp.maximum(answer.sum(1), 1)

    def outcome(embeddings):
        hidden, _ = POLICY.trunk(params, embeddings, positions_of(valid), valid)
        logits = POLICY.unembed(params, hidden)[:, :-1] / 0.7
        if mode == "answer_joint":
            logps = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
            return (logps * answer).sum(1) / count
        first = answer & (jnp.cumsum(answer, 1) == 1)
        return (logits * first).sum(1) if mode == "last" else (logits * answer).sum(1) / count

    def distance(embeddings):
        moved = outcome(embeddings)
        return (target - moved).sum() if mode == "answer_joint" else kl_divergence(target, moved).sum()

    target = outcome(clean)
    noise = jnp.where(inside[..., None], jnp.pad(noise, ((0, 0), (PROMPT, 0), (0, 0))), 0)
    scores = jnp.abs(jnp.sum(jax.grad(distance)(clean + noise) * clean, axis=-1))
    return jnp.where(inside, scores, 0)[:, PROMPT:]


@pytest.mark.parametrize("mode", ["last", "answer_mean", "answer_joint"])
def test_noisy_is_its_definition_and_linearised_its_limit(x64, mode):
    """Float64. Against noisy / sigma the error falls tenfold per decade of sigma and is below 1e-2 at 1e-6."""
    params = toy_params(jax.random.key(0), width=WIDTH, scale=1.5, dtype=jnp.float64)
    args, unit = batch(), unit_noise(dtype=jnp.float64)

    @jax.jit
    def noisy(noise):
        return noise_importance(POLICY, params, *args, noise, estimator="noisy", mode=mode, temperature=0.7)

    @jax.jit
    def linearised(noise):
        return noise_importance(POLICY, params, *args, noise, estimator="linearised", mode=mode, temperature=0.7)

    expected = jax.jit(lambda n: by_definition(params, *args, n, mode))(1e-2 * unit)
    np.testing.assert_allclose(noisy(1e-2 * unit), expected, rtol=0, atol=1e-10 * expected.max())
    assert (expected[:3].max(1) > 1e-4).all()

    scale = 0 if mode == "answer_joint" else 1  # the joint score does not scale with the noise
    limit = linearised(unit)
    errors = [np.abs(noisy(s * unit) / s**scale - limit).max() / limit.max() for s in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)]
    assert errors[-1] < 1e-2
    for wide, narrow in itertools.pairwise(errors):
        assert 5 < wide / narrow < 20, errors
    np.testing.assert_allclose(linearised(1e-3 * unit), 1e-3**scale * limit, rtol=1e-9)


def sum_policy() -> Policy:
    """Hidden state = sum of the embeddings so far: the outcome's Jacobian is the head, at every token."""

    def trunk(params, embeddings, positions, valid, *, cache=None, prefix=None):
        assert cache is None
        assert prefix is None
        return jnp.cumsum(embeddings * valid[..., None], axis=1), None

    return Policy(
        lambda params, tokens: params["embed"][tokens],
        trunk,
        lambda params, hidden: hidden @ params["head"],
        lambda rows, slots: None,
    )


def test_linearised_by_hand():
    """z = W' sum of e, so dz = W' sum of noise and s_t = |<W u, e_t>| with u = p (dz - <p, dz>)."""
    rng = np.random.default_rng(0)
    embed, head, noise = rng.normal(size=(6, 3)), rng.normal(size=(3, 5)), rng.normal(size=(1, 4, 3))
    ids = [1, 4, 2, 0, 3]  # prompt 1; reasoning 4 2; cue 0; answer 3
    z = embed[ids[:4]].sum(0) @ head / 2
    p = np.exp(z) / np.exp(z).sum()
    dz = noise[0, :2].sum(0) @ head / 2  # on the two reasoning tokens only
    u = p * (dz - p @ dz)
    expected = np.abs(embed[[4, 2]] @ (head @ u) / 2)
    tokens, valid = jnp.array([ids]), jnp.ones((1, 5), bool)
    span = AnswerSpan(jnp.arange(4)[None] < 2, jnp.arange(4)[None] == 3, jnp.ones(1, bool))
    params = {"embed": jnp.asarray(embed, jnp.float32), "head": jnp.asarray(head, jnp.float32)}
    run = jax.jit(
        lambda noise: noise_importance(
            sum_policy(),
            params,
            tokens,
            valid,
            span,
            noise,
            estimator="linearised",
            mode="answer_mean",
            temperature=2.0,
        )
    )
    found = run(jnp.asarray(noise, jnp.float32))
    np.testing.assert_allclose(found, [[*expected, 0, 0]], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("estimator", ["linearised", "noisy"])
def test_padding_and_neighbours_change_nothing(estimator):
    """Noise included: it belongs to the row and the token, not to the shape of the batch."""
    args = {"estimator": estimator, "sigma": 0.1}  # large, so that noisy's own cancellation stays out of the way
    together = importance(*batch(), **args)
    wider = importance(*batch(prompt=7, length=15, pad=9), **args)
    np.testing.assert_allclose(wider[:, :LENGTH], together, rtol=0, atol=1e-5 * together.max())
    assert (wider[:, LENGTH:] == 0).all()
    alone = importance(*single(ROWS[2]), KEYS[2:3], **args)
    np.testing.assert_allclose(together[2, : alone.shape[1]], alone[0], rtol=0, atol=1e-5 * together.max())
    assert (together[~batch()[2].reasoning] == 0).all()
    assert (together[3] == 0).all(), "a row with no answer"


def test_what_follows_the_answer_does_not_matter():
    before, after = (importance(*batch([ROWS[1]._replace(rest=rest)]), KEYS[:1]) for rest in ((1,), (17, 3, 5)))
    np.testing.assert_array_equal(before, after)


def test_draws_are_averaged_and_differ():
    tokens, valid, span = batch()

    @jax.jit
    def with_noise(draw):
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(KEYS, draw)
        noise = embedding_noise(keys, length=LENGTH, width=WIDTH, sigma=1e-2, dtype=jnp.float32)
        return noise_importance(
            POLICY, PARAMS, tokens, valid, span, noise, estimator="linearised", mode="answer_mean", temperature=0.7
        )

    each = np.stack([with_noise(draw) for draw in range(3)])
    found = importance(tokens, valid, span, draws=3)
    np.testing.assert_allclose(found, each.mean(0), rtol=1e-4, atol=1e-7)
    assert np.abs(each[0] - each[1]).max() > 0.02 * each.max()


def test_noise_is_normal_and_never_shared():
    keys = row_keys(jax.random.key(1), jnp.arange(3))
    noise = embedding_noise(keys, length=200, width=16, sigma=0.5, dtype=jnp.float32)
    # 3 * 200 * 16 = 9,600 numbers: standard errors are 0.005 of the mean and 0.0036 of the deviation.
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 0.5) < 0.015
    for a, b in ((noise[0], noise[1]), (noise[0, 0], noise[0, 1])):
        assert np.abs(a - b).max() > 0.1
    np.testing.assert_array_equal(
        embedding_noise(keys[1:2], length=7, width=16, sigma=0.5, dtype=jnp.float32)[0], noise[1, :7]
    )


def test_no_gradient_reaches_the_parameters():
    tokens, valid, span = batch(ROWS[:2])

    def total(params):
        return gradient_importance(
            POLICY, params, tokens, valid, span, KEYS[:2], estimator="linearised", sigma=1e-2, draws=1,
            probe=outcome_probe("answer_mean", temperature=1.0),
        ).sum()  # fmt: skip

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(PARAMS)):
        assert (leaf == 0).all()


def test_errors_say_what_was_expected():
    args = batch()
    with pytest.raises(ValueError, match="draws must be an integer >= 1, got 0"):
        importance(*args, draws=0)
    with pytest.raises(ValueError, match="sigma must be a number > 0, got 0"):
        importance(*args, sigma=0.0)


def test_a_policy_that_keeps_no_cache_is_refused():
    """Its completions would be scored without their prompts."""

    def forgetful(*inputs, cache=None, **others):
        hidden, after = POLICY.trunk(*inputs, cache=cache, **others)
        return hidden, after if cache is None else None

    tokens, valid, span = batch(ROWS[:2])
    with pytest.raises(ValueError, match="expected the filled cache"):
        gradient_importance(
            POLICY._replace(trunk=forgetful), PARAMS, tokens, valid, span, KEYS[:2], estimator="linearised",
            sigma=1e-2, draws=1, probe=outcome_probe("answer_mean", temperature=1.0),
        )  # fmt: skip
