"""The probability of the reference answer as the reward: its value, its split, and that the split is unbiased."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from oarjax.config.loading import parse_config
from oarjax.errors import ConfigError
from oarjax.models.policy import positions_of
from oarjax.step.advantages import split_advantages
from oarjax.step.iteration import iterate
from oarjax.step.spans import with_reference

CUE, TARGET = [tiny.MARK], [5, 6]
CFG = {
    "credit__answer": {"source": "reference"},
    "advantage__method": "batch",
    "advantage__scale": "none",
    "update__skip_zero_variance": False,
}


def probed(rollout, span, problems):
    return with_reference(rollout, span, [(CUE, TARGET)] * len(rollout.ended), room=4, stop_id=tiny.STOP)


def probabilities(policy, params, rows, span):
    """The product of the outcome's probabilities, in a whole forward of each row."""

    @jax.jit
    def log_probs(params, tokens, valid):
        hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions_of(valid), valid)
        return jax.nn.log_softmax(policy.unembed(params, hidden))

    logps = np.asarray(log_probs(params, np.asarray(rows.tokens), np.asarray(rows.valid)), np.float64)
    prompt = rows.tokens.shape[1] - rows.completion.shape[1]
    out = []
    for row, marked in enumerate(np.asarray(span.outcome)):
        at = prompt + np.flatnonzero(marked)
        out.append(np.exp(sum(logps[row, p - 1, rows.tokens[row, p]] for p in at)) if len(at) else 0.0)
    return np.array(out)


@pytest.mark.parametrize("method", ["uniform", "oar_g"])
@pytest.mark.parametrize("soft", ["reward", "split"])
def test_the_reward_is_the_probability_of_the_answer(method, soft):
    """With a method that makes a clean pass of its own, and with one that makes none."""
    cfg = tiny.config(**CFG, advantage__soft=soft, credit__method=method)
    policy, steps, state = tiny.build(cfg)
    params = jax.tree.map(jnp.copy, state.params)
    _, done = iterate(state, state.params, 1, steps=steps, host=tiny.host()._replace(probed=probed), cfg=cfg)
    span = tiny.find_answers(done.rollout)
    p = probabilities(policy, params, *probed(done.rollout, span, None))
    assert (p[~done.rollout.ended] == 0).all()
    np.testing.assert_allclose(done.advantages, p - p.mean(), rtol=1e-3, atol=1e-9)
    assert done.metrics["soft_reward"] == pytest.approx(p.mean(), rel=1e-4)
    assert done.metrics["soft_gap"] == pytest.approx(p.mean() - done.grades.rewards.mean(), rel=1e-4)


def test_the_answers_tokens_receive_the_rest():
    """A row with an answer, one that ended without, one that was cut off."""
    advantages, late = jnp.arange(1.0, 4.0)[:, None] * jnp.ones((3, 5)), jnp.array([-1.0, -2.0, -3.0])
    answer = jnp.zeros((3, 5), bool).at[0, 2].set(True)
    completion = jnp.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    found = split_advantages(advantages, late, answer, completion, jnp.array([True, True, False]))
    np.testing.assert_array_equal(found * completion, [[1, 1, -1, -1, 0], [2, 2, -2, 0, 0], [3, 3, 3, 3, 3]])


def test_both_forms_are_unbiased_by_enumeration_and_the_split_varies_less():
    """A choice z of three, then an answer y of two; R = 1 if y is right. p(z) = pi(right | z) is E[R | z].

    The gradient by all logits of E[R] is what each estimate is on average: of the grade for both tokens, and of the
    split; the probability alone leaves out the answer's own part.
    """
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=3), draw.normal(size=(3, 2))
    pz = np.exp(first) / np.exp(first).sum()
    py = np.exp(second) / np.exp(second).sum(1, keepdims=True)
    p, baseline = py[:, 1], 0.3

    def slopes(z, y):
        one, two = np.zeros(3), np.zeros((3, 2))
        one[z] += 1
        two[z, y] += 1
        two[z] -= py[z]
        return one - pz, two

    moments = {name: np.zeros((2, 9)) for name in ("grade", "split", "probability")}
    for z, y in itertools.product(range(3), range(2)):
        chance, reward, (one, two) = pz[z] * py[z, y], float(y == 1), slopes(z, y)
        estimates = {
            "grade": ((reward - baseline) * one, (reward - baseline) * two),
            "split": ((p[z] - baseline) * one, (reward - p[z]) * two),
            "probability": ((p[z] - baseline) * one, (p[z] - baseline) * two),
        }
        for name, (a, b) in estimates.items():
            estimate = np.concatenate([a, b.ravel()])
            moments[name] += chance * np.stack([estimate, estimate**2])
    exact = np.concatenate([pz * (p - pz @ p), (pz[:, None] * py * (np.eye(2)[1] - p[:, None])).ravel()])
    np.testing.assert_allclose(moments["grade"][0], exact, atol=1e-12)
    np.testing.assert_allclose(moments["split"][0], exact, atol=1e-12)
    np.testing.assert_allclose(moments["probability"][0][:3], exact[:3], atol=1e-12)
    np.testing.assert_allclose(moments["probability"][0][3:], 0, atol=1e-12)
    assert moments["split"][1][:3].sum() < moments["grade"][1][:3].sum()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"credit__answer": {"source": "own"}}, "reads the reference answer"),
        ({"update__skip_zero_variance": True}, "is known after the rows are scored"),
        ({"advantage__method": "problem"}, "and problem reads grades"),
        ({"advantage__soft": "split", "advantage__scale": "batch"}, "adds two differences in units of the reward"),
        ({"credit__method": "crpo"}, "and credit.method crpo reads each reward"),
    ],
)
def test_what_it_refuses(changes, says):
    with pytest.raises(ConfigError, match=says):
        tiny.config(**CFG | {"advantage__soft": "reward"} | changes)
    assert parse_config(tiny.config(**CFG | {"advantage__soft": "reward"}).model_dump())
