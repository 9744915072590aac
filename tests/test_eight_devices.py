"""Sharding changes where arrays live and never what they hold: every program on eight devices and on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
import json, sys
from types import SimpleNamespace
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oarjax.batches import Deck
from oarjax.cli.session import lay_out, new_state
from oarjax.models.qwen import QwenConfig, make_policy
from oarjax.models.weights import init_params
from oarjax.sharding import batch_spec
from oarjax.steps import make_steps
from oarjax.types import TrainBatch
import tiny

fields = dict(model_type="qwen2", vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
    tie_word_embeddings=False, initializer_range=0.4)
model = QwenConfig.from_hf(fields)
policy = make_policy(model, compute_dtype=jnp.float32, remat="full")
prompts = tiny.prompts(8)
one = optax.sgd(1000.0)  # what an update subtracts is the gradient, and large beside the rounding of the params

def outcome(shape, method):
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3,
                         devices=jax.devices()[: int(np.prod(shape))])
    cfg = tiny.config(credit__method=method, credit__masking__buckets=1, rollout__prompts=8, rollout__group_size=2,
                      update__microbatch=8)
    layout = lay_out(SimpleNamespace(mesh=mesh, model=model), one)
    steps = make_steps(policy, one, layout, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
    params = jax.device_put(init_params(model, jax.random.key(3)), layout.params)
    place = lambda tree, *lead: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*lead, *batch_spec())))
    rollouts = [jax.device_get(steps.sample(params, place(prompts), jax.random.key(seed))) for seed in range(4)]
    rollout = rollouts[0]
    span = tiny.find_answers(rollout)
    deck = Deck(np.arange(16), 1, 8, 16)
    r, s, numbers = place(deck.deal((rollout, span, np.arange(16, dtype=np.int32)))[0], None)
    used = deck.used[0]
    found = steps.score(params, None, r, s, numbers, used, jax.random.key(5), probe="answer_mean")
    a = np.random.default_rng(7).normal(size=16).astype(np.float32)
    a, mask = place(deck.deal((a, rollout.completion))[0], None)
    given, _ = steps.credit(found, r, s, a, mask, jax.random.key(6))
    # Every program is given the same: the credit's own rounding is not to show in the gradients.
    per_token = np.random.default_rng(8).normal(size=rollout.completion.shape).astype(np.float32)
    (per_token,) = place(deck.deal((per_token * rollout.completion,))[0], None)
    batch = TrainBatch(tokens=r.tokens, valid=r.valid, completion=mask, advantages=per_token, old_logps=None,
                       ref_logps=None, behaviour_logps=r.behaviour_logps)
    state = new_state(params, one, layout, seed=0)
    moved, metrics = steps.update(state, batch, used, steps.denominator(jnp.asarray(rollout.completion)))
    gradients = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, moved.params)
    tokens = [x for drawn in rollouts for x in (drawn.tokens, drawn.completion)]
    return tokens, {"importance": given.importance, "weights": given.weights, "gradients": gradients,
                    "loss": metrics["loss"].value, "logps": rollout.behaviour_logps}

def error(tree, other):
    # the largest difference, as a share of the largest number
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other))]
    return float(max(np.abs(x - y).max() for x, y in pairs) / max(np.abs(x).max() for x, y in pairs))

for method, shapes in (("oar_p", ((1, 1, 8), (1, 8, 1), (1, 2, 4), (1, 4, 2), (2, 2, 2))), ("oar_g", ((2, 2, 2),))):
    tokens, plain = outcome((1, 1, 1), method)
    for shape in shapes:
        drawn, sharded = outcome(shape, method)
        errors = {name: error(tree, sharded[name]) for name, tree in plain.items()}
        same = all(np.array_equal(x, y) for x, y in zip(tokens, drawn))
        print(json.dumps({"mesh": shape, "method": method, "same_tokens": same, **errors}), flush=True)
"""


@pytest.mark.slow
def test_programs_on_eight_devices_and_on_one():
    """Losses, gradients and importance within 1e-5 of the largest; tokens of four seeds identical."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=2400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 6
    for line in found:
        print(line)
        assert line["same_tokens"], line
        for name in ("loss", "logps", "gradients", "importance"):
            assert line[name] < 1e-5, line
        assert line["weights"] < 1e-4, line  # the gate stretches a row's scores, and their rounding with them
