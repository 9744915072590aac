"""Score and update in one pass: the numbers, reports and bad batches of the two-pass form, with fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.credit.resolved import resolve_method
from oarjax.models.qwen import make_policy
from oarjax.step.fused import fuses
from oarjax.step.iteration import iterate
from oarjax.step.programs import make_steps
from oarjax.step.state import new_state
from oarjax.tools.plan.jaxpr_flops import executed_flops
from oarjax.types import GradedRows, SampledRows, TrainBatch

BUCKETS = {"rollout__completion_bucket": 5, "rollout__prompt_bucket": 6, "update__microbatch": 4}
ONE_BUCKET = {"rollout__completion_bucket": 10}
POISONED = 7
"""A token id that few rows hold."""


def build(dtype, changes, *, rate=0.1):
    """Config, programs and params of plain gradient descent."""
    cfg = tiny.config(credit__method="oar_g", **BUCKETS | changes)
    policy = make_policy(tiny.model(), compute_dtype=dtype, remat=cfg.policy.remat, adapter_scale=cfg.lora.scale)
    tx = optax.sgd(rate)
    steps = make_steps(policy, tx, tiny.one_device(), cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
    return cfg, tx, steps._replace(sample=tiny.drawn), tiny.params(dtype)


def run(built, *, poisoned=False):
    """One iteration: the params' change, what it leaves, and what was watched."""
    (cfg, tx, steps, params), records = built, []
    if poisoned:
        embedding = params["embed"]["embedding"].at[POISONED].set(jnp.nan)
        params = {**params, "embed": {"embedding": embedding}}
    state = new_state(params, tx, tiny.one_device(), seed=0, lora=cfg.lora)
    before = jax.device_get(state.params)
    host = tiny.host()._replace(watch=lambda record: records.append(jax.device_get(record._replace(state=None))))
    state, done = iterate(state, None, 1, steps=steps, host=host, cfg=cfg)
    return jax.tree.map(np.subtract, jax.device_get(state.params), before), done, records


def check(both, tolerance, **more):
    """Compare an iteration in one pass with the same in two; return the size of the update, and the metrics."""
    (ours, one, records), (wanted, two, expected) = (run(built, **more) for built in both)
    np.testing.assert_allclose(one.weights, two.weights, rtol=0, atol=10 * tolerance)  # the gate stretches scores
    size = tiny.norm(wanted)
    assert tiny.norm(jax.tree.map(np.subtract, ours, wanted)) <= tolerance * size
    assert set(two.metrics) - set(one.metrics) == {"padding_share/score"}
    for name, value in one.metrics.items():
        assert value == pytest.approx(two.metrics[name], rel=tolerance, abs=tolerance, nan_ok=True), name
    assert [record.phase for record in records] == [record.phase for record in expected]
    for a, b in zip(records, expected, strict=True):
        assert jax.tree.structure(a.evidence) == jax.tree.structure(b.evidence)
        assert set(a.metrics) == set(b.metrics)
        scores = a.evidence.scores.importance, b.evidence.scores.importance
        np.testing.assert_allclose(*scores, rtol=10 * tolerance, atol=tolerance * np.nanmax(scores[1]))
    return size, one.metrics


def in_both_forms(dtype, changes, **more):
    """Build the same run in one pass and in two."""
    return build(dtype, changes, **more), build(dtype, {**changes, "update__fused": "never"}, **more)


CASES = {
    "linearised": {"credit__draws": 2, "policy__remat": "dots", "update__prompt_rows": 1},  # every row's own bucket
    "noisy": {"credit__estimator": "noisy", "credit__sigma": 0.1, "credit__probe__mode": "last"} | ONE_BUCKET,
    "scalar": {"credit__probe__mode": "answer_joint", "loss__aggregation": "bnpo", "loss__mask_truncated": True}
    | ONE_BUCKET,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
def test_one_pass_is_two_in_float64(name):
    both = in_both_forms(jnp.float64, CASES[name])
    size, metrics = check(both, 1e-12)
    assert size > 0
    assert metrics["ess"] < 1
    one, two = (steps for _, _, steps, _ in both)
    buckets = 10 // both[0][0].rollout.completion_bucket
    assert one.score._cache_size() == one.credit._cache_size() == one.accumulate._cache_size() == 0
    assert one.fused_add._cache_size() == two.score._cache_size() == buckets
    assert two.fused_add is None


@pytest.mark.slow
def test_one_pass_is_two_in_float32_with_adapters_and_where_it_is_not_finite():
    both = in_both_forms(jnp.float32, {"lora__rank": 2, "policy__remat": "full"}, rate=100.0)
    size, _ = check(both, 2e-4)
    assert size > 0
    size, metrics = check(both, 2e-4, poisoned=True)  # of the frozen embedding
    assert size == 0
    assert metrics["skipped"] == metrics["nonfinite/loss"] == 1
    assert 0 < metrics["nonfinite/importance"] < 1


def test_config_and_policy_decide():
    def decided(experts=False, **changes):
        cfg = tiny.config(**{"credit__method": "oar_g"} | changes)
        return fuses(cfg.update, resolve_method(cfg.credit), kl_beta=cfg.loss.kl_beta, experts=experts)

    assert decided()
    assert decided(update__skip_zero_variance=False, update__refills=1)
    assert decided(credit__estimator="noisy", lora__rank=2)
    assert not decided(update__skip_zero_variance=False)  # grades come in while the device scores
    assert not decided(update__fused="never")
    assert not decided(experts=True)  # the update reports their load
    assert not decided(update__epochs=2)
    assert not decided(update__minibatches=2)
    assert not decided(loss__kl_beta=0.1)
    assert not decided(credit__answer__source="reference", credit__answer__style="hash")
    for method in ("oar_p", "oar_f", "permuted", "uniform"):
        assert not decided(credit__method=method)


@pytest.mark.parametrize(("remat", "share"), [("none", 0.82), ("full", 0.87)])
def test_one_pass_executes_fewer_products(remat, share):
    """Of score and gradient together, on a microbatch of full rows whose completion is half of them."""
    programs = {}
    for fused in ("auto", "never"):
        cfg = tiny.config(credit__method="oar_g", policy__remat=remat, update__fused=fused, update__microbatch=2)
        policy = make_policy(tiny.model(), compute_dtype=jnp.float32, remat=remat)
        programs[fused] = make_steps(
            policy, optax.sgd(0.1), tiny.one_device(), cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD
        )
    params = tiny.params()
    state = new_state(params, optax.sgd(0.1), tiny.one_device(), seed=0, lora=tiny.config().lora)
    rollout = tiny.drawn(params, tiny.prompts(), None)
    span = tiny.find_answers(rollout)
    every = SampledRows(rollout, span, np.arange(16)), GradedRows(np.ones(16, np.float32), rollout.completion)
    inputs = jax.tree.map(lambda x: jnp.asarray(x)[None, :2], every)
    key, steps = jax.random.key(0), programs["auto"]

    def one_pass(state):
        return steps.fused_add(steps.fused_zeros(state, *inputs), state, *inputs, key, key, 0, 1, probe="last")

    one = executed_flops(one_pass, state)
    steps = programs["never"]

    def two_passes(state):
        rows, graded = inputs
        scores = steps.score(state.params, None, rows, key, 0, 1, probe="last")
        credit, _ = steps.credit(scores, rows, graded, key, 1)
        r, mask = rows.rollout, graded.completion
        batch = TrainBatch(r.tokens, r.valid, mask, credit.advantages, None, None, r.behaviour_logps)
        return steps.accumulate(steps.zeros(state, batch), state, batch, 0, 1)

    assert one < share * executed_flops(two_passes, state)
