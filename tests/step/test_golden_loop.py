"""The whole loop of updates against another computation of it, and every random key that an iteration uses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy
from oarjax.step.iteration import NOISE, ORDER, iterate
from oarjax.step.programs import make_steps
from oarjax.types import TrainState

RATE = 0.5


def sgd_build(cfg, *, dtype=jnp.float64):
    """The run of ``tiny.build`` with plain gradient descent, whose steps show the gradient's size."""
    policy, tx = make_policy(tiny.model(), compute_dtype=dtype, remat="none"), optax.sgd(RATE)
    params = tiny.params(dtype)
    state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(cfg.seed))
    where = tiny.one_device()
    steps = make_steps(policy, tx, where, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
    return policy, steps, jax.device_put(state, where.replicated)


def completion_logps(policy, params, tokens, valid, length):
    """Log-softmax of one whole forward at the tokens that follow, [B, T]."""
    hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions_of(valid), valid)
    logps = jax.nn.log_softmax(policy.unembed(params, hidden[:, -length - 1 : -1]))
    return jnp.take_along_axis(logps, tokens[:, -length:, None], -1)[..., 0]


@pytest.mark.usefixtures("x64")
def test_two_epochs_of_two_minibatches_are_four_sgd_steps_written_out():
    """Old log-probs before the first step, rows taken in turn, a seeded order, tokens / 2 as the denominator."""
    cfg = tiny.config(seed=17, update={"epochs": 2, "minibatches": 2, "microbatch": 4, "skip_zero_variance": False})
    policy, steps, state = sgd_build(cfg)
    params = jax.tree.map(jnp.copy, state.params)
    state, done = iterate(state, None, 3, steps=steps, host=tiny.host(), cfg=cfg)

    made, T = np.asarray(done.rollout.completion), done.rollout.completion.shape[1]
    groups = np.float64(done.grades.rewards).reshape(-1, 4)
    spread = groups.std(1, ddof=1, keepdims=True)
    advantages = np.where(spread > 0, (groups - groups.mean(1, keepdims=True)) / (spread + 1e-4), 0).reshape(-1)
    assert (advantages != 0).any()
    taught, all_tokens = jnp.asarray(made), made.sum()
    tokens, valid = jnp.asarray(done.rollout.tokens), jnp.asarray(done.rollout.valid)
    old = jax.jit(completion_logps, static_argnums=(0, 4))(policy, params, tokens, valid, T)

    @jax.jit
    def step(params, rows):
        def loss(params):
            logps = completion_logps(policy, params, tokens[rows], valid[rows], T)
            ratio, a = jnp.exp(jnp.where(taught[rows], logps - old[rows], 0)), jnp.asarray(advantages)[rows, None]
            taken = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.28) * a)
            return -jnp.sum(jnp.where(taught[rows], taken, 0)) / (all_tokens / 2)

        return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))

    for epoch in range(2):  # this seed's orders are [0, 1] and [1, 0], in an iteration 0 twice [0, 1]
        for k in np.random.default_rng((17, 3, epoch)).permutation(2):
            params = step(params, np.arange(k, 16, 2))
    assert int(state.step) == 4
    for ours, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-7 * float(jnp.abs(wanted).max()))


def test_a_minibatch_without_a_trained_token_makes_no_update():
    """Its gradient is 0, but momentum and weight decay would move the weights all the same."""
    cfg = tiny.config(update__minibatches=2, update__skip_zero_variance=False)
    _, steps, state = tiny.build(cfg)

    def reward(rollout):  # rows of the first minibatch are not graded
        return np.where(np.arange(16) % 2 == 0, np.nan, np.arange(16) % 4 == 1)

    drawn = steps._replace(sample=tiny.drawn)
    state, done = iterate(state, None, 1, steps=drawn, host=tiny.host(reward=reward), cfg=cfg)
    assert done.metrics["ungraded"] == 1 / 2
    assert int(state.step) == 1


def test_every_key_of_an_iteration():
    """The root key with the iteration and the purpose folded in: each draw of prompts, OAR-G's noise, the order."""
    cfg = tiny.config(credit__method="permuted", update__refills=2, update__skip_zero_variance=False)
    _, steps, state = tiny.build(cfg)
    root, used = jax.random.key(cfg.seed), []  # the state gives its memory up

    def spied(name, at):
        program = getattr(steps, name)

        def call(*args, **kwargs):
            used.append((name, jax.random.key_data(args[at]).tolist()))
            return program(*args, **kwargs)

        return call

    steps = steps._replace(sample=tiny.drawn)
    spies = steps._replace(sample=spied("sample", 2), score=spied("score", 3), credit=spied("credit", 3))
    for iteration in (1, 2):
        host = tiny.host(reward=lambda r: np.ones(16))  # equal rewards: both refills are drawn
        state, _ = iterate(state, None, iteration, steps=spies, host=host, cfg=cfg)

    def key(*numbers):
        return jax.random.key_data(functools.reduce(jax.random.fold_in, numbers, root)).tolist()

    draws = [("sample", 0), ("sample", 1), ("sample", 2), ("score", NOISE), ("credit", ORDER)]
    wanted = [(name, key(n, *purpose)) for n in (1, 2) for name, *purpose in draws]
    assert used == wanted
    assert len({tuple(k) for _, k in used}) == len(used)
