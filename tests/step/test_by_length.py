"""Scores and updates by length: microbatches padded to their own buckets give what one padded form gives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.models.qwen import make_policy
from oarjax.models.weights import init_params
from oarjax.step.iteration import iterate
from oarjax.step.programs import make_steps
from oarjax.step.state import new_state

BUCKETS = {"rollout__completion_bucket": 5, "rollout__prompt_bucket": 3, "update__microbatch": 2}
ONE = {"rollout__completion_bucket": 10, "rollout__prompt_bucket": 6, "update__microbatch": 2}


def run(dtype, changes, rate):
    """One iteration of plain gradient descent: params before and after, and what it leaves."""
    cfg = tiny.config(**changes)
    policy = make_policy(tiny.model(), compute_dtype=dtype, remat="none", adapter_scale=cfg.lora.scale)
    tx, where = optax.sgd(rate), tiny.one_device()
    params = init_params(tiny.model(), jax.random.key(3), dtype=dtype)
    state = new_state(params, tx, where, seed=0, lora=cfg.lora)
    before = jax.device_get(state.params)
    steps = make_steps(policy, tx, where, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
    reference = jax.tree.map(lambda p: p * 0.9, params) if cfg.loss.kl_beta and not cfg.lora.rank else None
    drawn = steps._replace(sample=tiny.drawn)
    state, done = iterate(state, reference, 1, steps=drawn, host=tiny.host(), cfg=cfg)
    return before, jax.device_get(state.params), done, steps


def check(dtype, tolerance, loss, changes, *, rate=0.1):
    start, ours, done, steps = run(dtype, changes | BUCKETS, rate)
    _, wanted, padded, _ = run(dtype, changes | ONE, rate)
    assert (steps.fused_add or steps.accumulate)._cache_size() > 1
    np.testing.assert_allclose(done.weights, padded.weights, rtol=0, atol=max(tolerance, 1e-12))
    gradient = optax.tree.norm(jax.tree.map(np.subtract, wanted, start))
    assert gradient > 0
    assert optax.tree.norm(jax.tree.map(np.subtract, ours, wanted)) <= tolerance * gradient
    for name in ("loss", "ratio", "entropy", "sampler_gap", *(["kl"] if "kl" in done.metrics else [])):
        assert done.metrics[name] == pytest.approx(padded.metrics[name], rel=loss, abs=loss)
    assert done.metrics["padding_share/update"] < padded.metrics["padding_share/update"]
    assert done.metrics["rows_used"] == padded.metrics["rows_used"]


CASES = {
    "gspo, permuted": {
        "loss": {"level": "sequence", "kl_beta": 0.1},
        "credit": {"method": "permuted"},
        "update": {"epochs": 2, "minibatches": 2},
    },
    "cispo, oar_g": {"loss": {"surrogate": "cispo", "aggregation": "dr_grpo"}, "credit": {"method": "oar_g"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
def test_buckets_are_the_padded_form_in_float64(name):
    check(jnp.float64, 1e-12, 1e-12, CASES[name])


@pytest.mark.slow
def test_buckets_are_the_padded_form_with_adapters():
    """Adapters are float32 whatever the policy is."""
    # The step is large beside the rounding of the params, which would otherwise show instead of the gradient's.
    check(jnp.float32, 1e-5, 1e-6, {"loss": {"kl_beta": 0.1}, "lora": {"rank": 2}}, rate=100.0)
