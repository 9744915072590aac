"""Sampling with keys and values in int8: what rounding implies, what is recorded, and a run that corrects for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import delta_policy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_programs import built

from oarjax.errors import ConfigError
from oarjax.kernels.attention import Segment, attend
from oarjax.kernels.decode_cache import rounded
from oarjax.models.qwen import make_policy
from oarjax.models.weights import init_params
from oarjax.rollout.sampler import Decoding, group_keys
from oarjax.rollout.segments import SegmentedSampler
from oarjax.step.iteration import iterate

KV, GROUP, WIDTH, SLOTS = 2, 3, 64, 200


def by_hand(q, k, v):
    """Attention in float64 of queries [kv g h] over keys [kv h C] and values [kv C h], and its weights."""
    scores = q @ k * WIDTH**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_attention_over_int8_is_off_by_what_rounding_implies(spread):
    """Of normal numbers, and of channels whose sizes are lognormal, so that few decide a step.

    With |k' - k| <= step / 2 a score is off by d = step / 2 |q|_1 / sqrt(h) at most, a weight p by a factor within
    exp(+-2 d), and so the output o by max step / 2 of the values and (exp(2 d) - 1) sum p |v - o|.
    """
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(KV, *size)) for size in ((GROUP, WIDTH), (WIDTH, SLOTS), (SLOTS, WIDTH)))
    k, v = k * np.exp(spread * draw.normal(size=(WIDTH, 1))), v * np.exp(spread * draw.normal(size=WIDTH))
    held = rounded(*(jnp.asarray(x, jnp.float32)[None, :, None] for x in (k, v)))
    of_keys, of_values = np.moveaxis(np.asarray(held["steps"], np.float64)[0, :, 0], 1, 0)
    near_k, near_v = np.asarray(held["k"], float)[0, :, 0], np.asarray(held["v"], float)[0, :, 0]
    near_k, near_v = near_k * of_keys[:, None], near_v * of_values[..., None]
    assert (np.abs(near_k - k) <= of_keys[:, None] * (0.5 + 1e-4)).all()
    assert (np.abs(near_v - v) <= np.abs(v).max(-1, keepdims=True) / 253 * (1 + 1e-6)).all()

    segment = Segment(*(held[name][0] for name in ("k", "v")), jnp.ones((1, 1, SLOTS), bool), held["steps"][0])
    got = attend(jnp.asarray(q, jnp.float32).reshape(1, 1, -1, WIDTH), (segment,))
    near, (want, weights) = by_hand(q, near_k, near_v)[0], by_hand(q, k, v)
    np.testing.assert_allclose(np.asarray(got).reshape(near.shape), near, atol=2e-6 * np.abs(v).max())

    off = of_keys.max(-1)[:, None] / 2 * np.abs(q).sum(-1) * WIDTH**-0.5
    around = np.stack([weights[:, g, :, None] * np.abs(v - want[:, g, None]) for g in range(GROUP)], 1).sum(2)
    bound = of_values.max(-1)[:, None, None] / 2 + np.expm1(2 * off)[..., None] * around
    assert (np.abs(near - want) <= bound).all()


def nearest(x):
    """What int8 keeps of keys or values, over the last axis."""
    step = (jnp.max(jnp.abs(x), -1, keepdims=True) / 127).astype(jnp.bfloat16)
    return jnp.round(x / jnp.where(step == 0, 1, step)) * step


@pytest.mark.parametrize(
    "model",
    [pytest.param(tiny.model(), id="attention"), pytest.param(delta_policy.MODEL, id="hybrid", marks=pytest.mark.slow)],
)
def test_recorded_log_probs_are_those_of_a_forward_that_rounds(model, x64):
    """Token by token over a plain cache whose keys and values, no states, are rounded in place; also in segments."""
    params = tiny.init(model, jax.random.key(3), dtype=jnp.float64)
    prompts, how = tiny.prompts(3), Decoding(10, 1.0, 0, 1.0, (tiny.STOP, 5), tiny.PAD)
    policy, plain = (make_policy(model, compute_dtype=jnp.float64, int8=int8) for int8 in (True, False))
    options = {"segment": 3, "cache_bucket": 4, "slots": 4, "fewest": 1}
    sampler = SegmentedSampler(policy, how, keys_of=partial(group_keys, group_size=2), group=2, **options)
    got, whole = jax.device_get([draw(params, prompts, jax.random.key(1)) for draw in (sampler, sampler.whole)])
    assert len(set(got.completion.sum(1))) > 2
    np.testing.assert_array_equal(got.tokens, whole.tokens)
    np.testing.assert_allclose(got.behaviour_logps, whole.behaviour_logps, atol=1e-12)

    @jax.jit
    def forward(cache, tokens, positions, valid):
        hidden, after = plain.trunk(params, plain.embed(params, tokens), positions, valid, cache=cache)
        logps = jax.nn.log_softmax(plain.unembed(params, hidden[:, -1]))
        return logps, after.replace(k=nearest(after.k), v=nearest(after.v))

    width, positions = prompts.tokens.shape[1], np.cumsum(got.valid, 1) - 1
    cache, wrote = plain.init_cache(6, got.tokens.shape[1]), np.zeros_like(got.behaviour_logps)
    for t in range(how.max_new):
        part = np.s_[:, :width] if t == 0 else np.s_[:, width + t - 1 : width + t]
        logps, cache = forward(cache, got.tokens[part], np.maximum(positions[part], 0), got.valid[part])
        wrote[:, t] = np.take_along_axis(np.asarray(logps), got.tokens[:, width + t][:, None], 1)[:, 0]
    wrote = np.where(got.completion, wrote, 0)
    np.testing.assert_allclose(got.behaviour_logps, wrote, atol=1e-10)
    assert np.abs(wrote - tiny.logps_of(plain, params, got, temperature=1.0)).max() > 1e-3


def test_a_run_learns_with_its_own_log_probs_and_corrects_for_the_sampler():
    """Evaluations draw with the policy's own cache."""
    run = built(rollout__cache="int8", update__epochs=2, data__eval={"source": "unused"}, eval__batch=4)
    assert run.cfg.loss.off_policy.weighting == "token_truncate"
    start = jax.device_put(tiny.params(), run.layout.params)
    logps_of = partial(tiny.logps_of, run.policy, start, temperature=1.0)
    sampling = run.steps.rollout_params(start)
    held_out = run.steps.evaluate(sampling, run.place(tiny.prompts(), "prompts"), jax.random.key(1))
    np.testing.assert_allclose(held_out.behaviour_logps, logps_of(held_out), atol=1e-5)

    state = run.new_state(start, copy=True)
    host = tiny.host()._replace(place=run.place)
    state, done = iterate(state, None, 1, steps=run.steps, host=host, cfg=run.cfg)
    gap = (logps_of(done.rollout) - done.rollout.behaviour_logps)[done.rollout.completion]
    assert done.metrics["sampler_gap"] == pytest.approx(np.abs(gap).mean(), rel=1e-2)
    assert done.metrics["sampler_weight"] == pytest.approx(np.exp(gap).mean(), rel=1e-5)
    assert abs(done.metrics["sampler_weight"] - 1) > 1e-5
    assert done.metrics["sampler_gap/max"] >= np.abs(gap).max() > 1e-3
    assert int(state.step) == 2


def test_what_goes_with_it():
    assert (
        tiny.config(rollout__cache="int8", loss__off_policy={"weighting": "none"}).loss.off_policy.weighting == "none"
    )
    with pytest.raises(ConfigError, match=r"off_policy.weighting: vespo compares with the sampler itself; set none"):
        tiny.config(rollout__cache="int8", loss__surrogate="vespo")
    with pytest.raises(ConfigError, match=r"rollout.cache: int8, and rollout.from draws the rollouts; set policy"):
        tiny.config(rollout__cache="int8", rollout__from=["drawn.jsonl"])


def test_a_decode_program_holds_a_quarter_of_float32_and_multiplies_out_no_more_than_a_layer():
    """As a CPU compiles it, whose products want operands of one type; for TPUs see ``test_decode_attention``."""
    model = replace(tiny.model(), num_hidden_layers=16, num_key_value_heads=2, head_dim=64)
    sizes, rows, slots = {}, 8, 512
    for int8 in (False, True):
        policy = make_policy(model, int8=int8)

        def decoded(params, cache, policy=policy):
            tokens, alive = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1), bool)
            return policy.trunk(params, policy.embed(params, tokens), tokens, alive, cache=cache)[1]

        def made(policy=policy):
            return init_params(model, jax.random.key(0)), policy.caches.init(rows, slots)

        memory = jax.jit(decoded, donate_argnums=1).lower(*jax.eval_shape(made)).compile().memory_analysis()
        sizes[int8] = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    held, _ = sizes[False]
    assert held > 2 * 4 * 16 * 2 * rows * slots * 64
    assert sizes[True][0] < held * (1 + 2 / 64) / 4 * 1.01
    assert sizes[True][1] < 2 * held / 16
