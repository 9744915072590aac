"""Scores and updates by length: microbatches padded to their own buckets give what one padded form gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from oarjax.data.streams import SFTBatch
from oarjax.models.qwen import make_policy
from oarjax.models.weights import init_params
from oarjax.step.iteration import iterate
from oarjax.step.programs import make_sft_steps, make_steps
from oarjax.step.state import new_state
from oarjax.training.warm_start import by_length, train_batch

BUCKETS = {"rollout__completion_bucket": 5, "rollout__prompt_bucket": 3, "update__microbatch": 2}
ONE = {"rollout__completion_bucket": 10, "rollout__prompt_bucket": 6, "update__microbatch": 2}


def run(changes):
    """One iteration of plain gradient descent in float64: params before and after, and what it leaves."""
    cfg = tiny.config(loss__surrogate="cispo", loss__aggregation="dr_grpo", credit__method="oar_g", **changes)
    policy = make_policy(tiny.model(), compute_dtype=jnp.float64, remat="none")
    tx, where = optax.sgd(0.1), tiny.one_device()
    params = init_params(tiny.model(), jax.random.key(3), dtype=jnp.float64)
    state = new_state(params, tx, where, seed=0, lora=cfg.lora)
    before = jax.device_get(state.params)
    steps = make_steps(policy, tx, where, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
    state, done = iterate(state, None, 1, steps=steps._replace(sample=tiny.drawn), host=tiny.host(), cfg=cfg)
    return before, jax.device_get(state.params), done, steps


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_buckets_are_the_padded_form_in_one_pass():
    """In two passes, and with adapters: tests/step/test_shared_prompts.py."""
    start, ours, done, steps = run(BUCKETS)
    _, wanted, padded, _ = run(ONE)
    assert steps.fused_add._cache_size() > 1
    np.testing.assert_allclose(done.weights, padded.weights, rtol=0, atol=1e-12)
    gradient = optax.tree.norm(jax.tree.map(np.subtract, wanted, start))
    assert gradient > 0
    assert optax.tree.norm(jax.tree.map(np.subtract, ours, wanted)) <= 1e-12 * gradient
    for name in ("loss", "ratio", "entropy", "sampler_gap"):
        assert done.metrics[name] == pytest.approx(padded.metrics[name], rel=1e-12, abs=1e-12)
    assert done.metrics["padding_share/update"] < padded.metrics["padding_share/update"]
    assert done.metrics["rows_used"] == padded.metrics["rows_used"]


@pytest.mark.usefixtures("x64")
def test_a_warm_start_by_length_takes_the_steps_of_the_padded_form():
    """Three steps on pairs of 1 to 10 tokens, one of them with tokens that an environment wrote."""
    policy = make_policy(tiny.model(), compute_dtype=jnp.float64, remat="none")
    rng, lengths = np.random.default_rng(0), np.array([1, 10, 4, 2, 9, 3])
    valid = np.concatenate([np.arange(6) >= rng.integers(0, 5, (6, 1)), np.arange(10) < lengths[:, None]], 1)
    completion = valid[:, 6:].copy()
    completion[1, 2:4] = False
    batch = SFTBatch(rng.integers(3, tiny.VOCAB, (6, 16)).astype(np.int32), valid, completion)
    tx, ends = optax.adam(1e-2), {}
    steps = make_sft_steps(policy, tx, tiny.one_device(), head_chunk=8)
    for name, (microbatch, bucket) in {"whole": (6, 10), "by length": (2, 2)}.items():
        plan = by_length(batch, microbatch, bucket)
        params = init_params(tiny.model(), jax.random.key(3), dtype=jnp.float64)
        state = new_state(params, tx, tiny.one_device(), seed=0, lora=tiny.config().lora)
        for _ in range(3):
            state, metrics = steps.update(state, plan.split(train_batch(batch))[0], plan.pieces[0], None)
        ends[name] = jax.device_get((state.params, metrics["loss"].value))
    assert [piece.bucket and piece.bucket.completion for piece in plan.pieces[0]] == [2, 4, 10]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-11), ends["by length"], ends["whole"])
