"""Mistakes of shape, dtype, choice or range get a named error; numbers may be traced and mapped."""

# Mistakes on purpose:
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import LENGTH, batch
from toy_policy import toy_params, toy_policy

import oarjax
from oarjax.rl.checked import ArgumentError

SCORES = jnp.array([[0.0, 0.1, 0.7, 0.2], [0.3, 0.0, 0.2, 0.9]])
MASK = jnp.array([[True, True, True, True], [True, True, True, False]])
REWARDS = jnp.array([1.0, 0.0, 0.0, 1.0])
weights = partial(oarjax.oar_weights, SCORES, MASK)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: oarjax.oar_weights(SCORES[0], MASK), r"must be a float array \[B, T\], got float32 \[4\]; for"),
        (lambda: oarjax.oar_weights(SCORES, MASK * 1.0), r"reasoning must be a bool .*float32 \[2, 4\]; compare"),
        (lambda: oarjax.oar_weights(SCORES.tolist(), MASK), r"importance must be .*, got a list; wrap it in jnp.array"),
        (lambda: oarjax.oar_weights(SCORES, MASK[:1]), r"reasoning .* with B = 2 as in importance, got bool \[1, 4\]"),
        (lambda: oarjax.oar_weights(SCORES, None), r"reasoning must be .*, got None"),
        (lambda: weights(rule="quantil"), "oar_weights: rule must be quantile or level, got 'quantil'"),
        (lambda: weights(levels="none"), "levels must be both, boost or suppress, got 'none'"),
        (lambda: weights(signs="abs"), "signs must be clamped or signed, got 'abs'"),
        (lambda: weights(mass="both"), "mass must be kept or free, got 'both'"),
        (lambda: weights(tau=1.2), r"tau must be a number in \[0, 1\], got 1.2"),
        (lambda: weights(tau="low"), "tau must be .*, got a str"),
        (lambda: weights(floor=-0.1), r"floor must be a number in \[0, 1\], got -0.1"),
        (lambda: weights(boost=-1.0), "boost must be a number >= 0, got -1.0"),
        (lambda: weights(boost=jnp.nan), "boost must be a number >= 0, got nan"),
        (lambda: weights(tau=jnp.ones(3)), r"tau must be .*, got float32 \[3\]; use jax.vmap"),
        (lambda: oarjax.top_mass(SCORES, MASK, share=0.0), r"top_mass: share must be a number in \(0, 1\], got 0"),
        (lambda: oarjax.group_advantages(REWARDS, group_size=2.0), "group_size must be an integer >= 1, got float 2.0"),
        (lambda: jax.jit(oarjax.group_advantages)(REWARDS, group_size=2), "group_size .* traced value; name it in"),
        (lambda: oarjax.row_keys(jax.random.key(0), 3), r"rows must be an integer array \[.*\], got int 3; wrap it"),
        (lambda: oarjax.row_keys(0, jnp.arange(2)), r"key must be .*, got int 0; use jax.random.key\(seed\)"),
        (lambda: oarjax.group_advantages(REWARDS > 0, group_size=2), r"rewards must be .* bool \[4\]; use .astype"),
        (lambda: oarjax.kl_estimate(SCORES, SCORES[:, :3]), r"ref_logps must be .* rows = \(2, 4\) as in logps"),
        (lambda: oarjax.row_keys(REWARDS, jnp.arange(2)), r"key must be a key array \[\], got float32 \[4\]"),
        (lambda: oarjax.policy_loss(SCORES, SCORES, {}, max_length=4), "batch must be an oarjax TrainBatch, got"),
        (lambda: loss(kl_beta=-0.1), "policy_loss: kl_beta must be a number >= 0, got -0.1"),
        (lambda: loss(dual_clip=1.0), "policy_loss: dual_clip must be a number > 1, got 1.0"),
        (lambda: loss(surrogate="sapo", sapo_positive=0.0), "policy_loss: sapo_positive must be a number > 0, got 0.0"),
        (lambda: oarjax.group_advantages(REWARDS, group_size=2, ddof=-1), "ddof must be an integer >= 0, got -1"),
        (lambda: scored(head_chunk=0), "token_logps: head_chunk must be an integer >= 1, got 0"),
        (lambda: scored(temperature=0.0), "token_logps: temperature must be a number > 0, got 0"),
        (lambda: oarjax.token_logps({}, *rows()[1:4], **SCORED), "policy must be an oarjax Policy, got a dict"),
        (lambda: by_gradient("last", 1.0, 1.0, probe="last"), "probe must be an oarjax Probe, got a str"),
        (lambda: jax.jit(oarjax.ess_ratio)(SCORES, MASK[:, :3]), "mask must be .* with T = 4 as in weights"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_fields_of_a_record_are_checked_too():
    batch = train_batch()
    with pytest.raises(ArgumentError, match=r"advantages must be .*\[B, T\], got float32 \[2\]; for one number"):
        oarjax.policy_loss(SCORES, SCORES, batch.replace(advantages=REWARDS[:2]), max_length=4)


def test_checks_leave_no_trace_in_a_program():
    checked = jax.make_jaxpr(partial(oarjax.gate, tau=0.4))(SCORES, MASK)
    assert str(checked) == str(jax.make_jaxpr(partial(oarjax.gate.__wrapped__, tau=0.4))(SCORES, MASK))


def train_batch():
    tokens = jnp.zeros((2, 6), jnp.int32)
    return oarjax.TrainBatch(tokens, tokens == 0, MASK, SCORES - 0.4, -SCORES, SCORES - 1.2, SCORES - 1.3)


def loss(**options):
    return oarjax.policy_loss(SCORES - 1, SCORES, train_batch(), max_length=4, **options)[0].value


TOKENS, VALID, SPAN = batch()
KEYS = oarjax.row_keys(jax.random.key(5), jnp.arange(len(TOKENS)))
probe = oarjax.outcome_probe


def rows():
    """In float64 where it is on: the scores are differences of nearly equal outcomes."""
    return toy_policy(), toy_params(jax.random.key(0), scale=1.5, dtype=jnp.result_type(float)), TOKENS, VALID, SPAN


SCORED = {"completion_length": LENGTH, "temperature": 1.0, "head_chunk": 8}


def scored(**changed):
    return oarjax.token_logps(*rows()[:4], **SCORED | changed)[0]


def by_gradient(mode, temperature, sigma, **changed):
    options = {"probe": probe(mode, temperature=temperature), "estimator": "linearised", "sigma": sigma, "draws": 1}
    return oarjax.gradient_importance(*rows(), KEYS, **options | changed)


SWEEPS = {
    "token_logps": lambda t: scored(temperature=t),
    "OAR-G": lambda number: by_gradient("answer_joint", number, number) + by_gradient("last", number, number),
    "OAR-F temperature": lambda t: oarjax.fisher_importance(
        *rows(), KEYS, probe=probe("answer_mean", temperature=t), mask_id=0, outcomes=2, sampled=0
    ),
    "OAR-P temperature": lambda t: oarjax.masked_token_importance(
        *rows(), probe=probe("answer_joint", temperature=t), mask_id=0, chunk=2, buckets=2
    ),
    "OAR-L temperature": lambda t: oarjax.local_importance(
        *rows(), probe=probe("answer_mean", temperature=t), mask_id=0, window=2, answers=2, chunk=2
    ),
    "group_advantages eps": lambda eps: oarjax.group_advantages(REWARDS, group_size=2, eps=eps),
    "gate tau": lambda tau: oarjax.gate(SCORES, MASK, tau=tau),
    "gate tau by level": lambda tau: oarjax.gate(SCORES, MASK, rule="level", tau=tau),
    "oar_weights tau": lambda tau: weights(tau=tau),
    "oar_weights boost": lambda boost: weights(boost=boost),
    "oar_weights floor": lambda floor: weights(floor=floor),
    "top_share share": lambda share: oarjax.top_share(SCORES, MASK, share=share) * 1.0,
    "top_mass share": lambda share: oarjax.top_mass(SCORES, MASK, share=share),
    "recall_at_k share": lambda share: oarjax.recall_at_k(SCORES, SCORES > 0.05, MASK, share=share),
    "clipped_surrogate": lambda low: oarjax.clipped_surrogate(
        SCORES + 0.5, SCORES - 0.3, clip_low=low, clip_high=low / 2, dual_clip=1 + low
    ),
    "cispo_surrogate": lambda cap: oarjax.cispo_surrogate(SCORES - 1, SCORES + 0.5, SCORES - 0.3, ratio_cap=cap),
    "policy_loss clip": lambda high: loss(clip_high=high, dual_clip=1 + high),
    "policy_loss cispo": lambda cap: loss(surrogate="cispo", ratio_cap=cap),
    "policy_loss sapo": lambda tau: loss(surrogate="sapo", sapo_positive=tau, sapo_negative=tau),
    "policy_loss vespo": lambda k: loss(surrogate="vespo", vespo_k_positive=k, vespo_lambda_negative=k),
    "policy_loss gmpo": lambda low: loss(surrogate="gmpo", clip_low=low, clip_high=low),
    "policy_loss kl and entropy": lambda beta: loss(kl_beta=beta, entropy_bonus=beta, max_drift=beta),
}  # fmt: skip


@pytest.mark.parametrize("choice", ["rule", "levels", "mass", "signs"])
def test_a_traced_choice_is_an_error_that_names_it(choice):
    with pytest.raises(ArgumentError, match=rf"{choice} must be .* or .*, got a traced value; name it in static_argn"):
        jax.jit(lambda value: weights(**{choice: value}))(1)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_mapped_sweep_is_the_loop(name):
    """At its last number; the first one gives something else."""
    with jax.enable_x64(True):
        values = jnp.array([0.3, 0.6], jnp.float64)
        other, mapped = jax.jit(jax.vmap(SWEEPS[name]))(values)
        alone = jax.jit(partial(SWEEPS[name], float(values[1])))()
    # Equations have float32 scores, and a mapped number makes the rest float64; policies are float64 throughout.
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if alone.dtype == np.float64 else {"rtol": 2e-6, "atol": 1e-6}
    np.testing.assert_allclose(mapped, alone, **tolerance)
    assert not np.allclose(alone, other, atol=0)
