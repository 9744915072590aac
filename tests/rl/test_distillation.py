"""On-policy distillation: the advantages are the gradient of the reverse KL, and programs add them to the reward's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.models.qwen import make_policy
from oarjax.models.weights import init_params
from oarjax.rl.distillation import distillation_advantages
from oarjax.rl.loss import policy_loss
from oarjax.rollout.logps import token_logps
from oarjax.step.programs import make_steps
from oarjax.types import AnswerSpan, GradedRows, SampledRows, TrainBatch


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def test_the_expected_gradient_is_that_of_the_reverse_kl(x64):
    """Over all tokens of a vocabulary of 6: sum_y p(y) A(y) grad log p(y) = -grad KL(p || teacher)."""
    draw = np.random.default_rng(0)
    student, teacher = (jnp.asarray(draw.normal(size=6)) for _ in range(2))

    def kl(logits):
        p = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(p) * (p - jax.nn.log_softmax(teacher)))

    log_p, log_t = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    advantages = distillation_advantages(log_p[None], log_t[None], weight=0.5)[0]
    np.testing.assert_allclose(advantages, 0.5 * (log_t - log_p), rtol=1e-12)
    scores = jax.jacobian(jax.nn.log_softmax)(student)  # [y, logit]
    np.testing.assert_allclose((jnp.exp(log_p) * advantages) @ scores, -0.5 * jax.grad(kl)(student), atol=1e-12)


def test_the_loss_has_the_gradient_of_the_estimator_k2(x64):
    """Where the policy drew the tokens itself, grad of (log p - log t)^2 / 2 is (log p - log t) grad log p."""
    draw, mask = np.random.default_rng(1), jnp.arange(7) < jnp.array([[7], [3], [1]])
    logps, teacher = (jnp.asarray(-draw.exponential(size=(3, 7))) for _ in range(2))
    unused = jnp.zeros((3, 9), jnp.int32)
    batch = TrainBatch(unused, unused > 0, mask, jnp.zeros((3, 7)), None, teacher, None)

    def loss(x, batch, **kl):
        return policy_loss(x, jnp.zeros_like(x), batch, max_length=7, **kl)[0].value

    taught = replace(batch, advantages=distillation_advantages(logps, teacher, weight=0.3), ref_logps=None)
    ours, k2 = jax.grad(loss)(logps, taught), jax.grad(loss)(logps, batch, kl_beta=0.3, kl_estimator="k2")
    np.testing.assert_allclose(ours, k2, atol=1e-12)
    assert np.abs(k2).max() > 0.01


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_a_teacher_of_another_architecture_is_added_to_the_credit_of_the_reward(weight):
    """``weight`` is the reward's: without it the teacher is all that is learned from."""
    cfg = tiny.config(loss__kl_in="token", loss__kl_beta=0.5, update__skip_zero_variance=False)
    policy = make_policy(tiny.model(), compute_dtype=jnp.float32, remat="none")
    params = tiny.params()
    large = replace(tiny.model(), hidden_size=32, num_hidden_layers=3)
    teacher = make_policy(large, compute_dtype=jnp.float32, remat="none")
    taught = init_params(large, jax.random.key(8), dtype=jnp.float32)
    steps = make_steps(
        policy, optax.sgd(1.0), tiny.one_device(), cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD, reference_policy=teacher
    )
    rollout = tiny.drawn(params, tiny.prompts(1), None)
    none = np.zeros(rollout.completion.shape, bool)
    rows = SampledRows(rollout, AnswerSpan(none, none, none.any(-1)), np.arange(4, dtype=np.int32))
    rows = jax.tree.map(lambda x: jnp.asarray(x)[None], rows)
    scores = steps.score(params, taught, rows, jax.random.key(2), 0, jnp.int32(1), probe="last")
    read = {"completion_length": none.shape[1], "temperature": cfg.rollout.temperature, "head_chunk": 64}
    mask = np.asarray(rollout.completion)
    old, theirs = (
        np.asarray(token_logps(p, held, jnp.asarray(rollout.tokens), jnp.asarray(rollout.valid), **read)[0])
        for p, held in ((policy, params), (teacher, taught))
    )
    np.testing.assert_allclose(np.asarray(scores.ref_logps)[0][mask], theirs[mask], rtol=1e-5)
    group = jnp.array([[1.0, -1.0, 0.5, -0.5]]) * weight
    credit, _ = steps.credit(scores, rows, GradedRows(group, jnp.asarray(mask)[None]), jax.random.key(0), 1)
    expected = np.where(mask, np.asarray(group)[0][:, None] + 0.5 * (theirs - old), 0)
    np.testing.assert_allclose(np.asarray(credit.advantages)[0][mask], expected[mask], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(credit.weights, 1)
