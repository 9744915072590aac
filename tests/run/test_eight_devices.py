"""Sharding changes where arrays live and never what they hold: every program on eight devices and on one."""

from __future__ import annotations

import json

import pytest
from conftest import json_lines

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec
from oarjax.step.minibatches import Bucket, MinibatchPlan, Piece
from oarjax.run.layout import check_layouts, rollout_layout, training_layout
from oarjax.run.policy import bind_policy
from oarjax.step.state import new_state
from oarjax.system.mesh import make_mesh
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import init_params
from oarjax.step.programs import make_steps
from oarjax.types import GradedRows, SampledRows, TrainBatch
import tiny

# Two key heads: fewer than the tensor axis of most meshes here.
fields = dict(model_type="qwen2", vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
    tie_word_embeddings=False, initializer_range=0.4)
model = QwenConfig.from_hf(fields)
prompts = tiny.prompts(8)
one = optax.sgd(1000.0)  # what an update subtracts is the gradient, and large beside the rounding of the params

def outcome(shape, rollout_tensor):
    pairs = Bucket(prompts.tokens.shape[1], 10, 2)  # both rows of a group compute their prompt once
    bucket = pairs if shape[0] > 1 else None
    axes = dict(zip(("slice", "data", "fsdp", "tensor"), shape))
    mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod(shape))])
    layout, found = training_layout(tiny.config().lora, model, mesh, one), {}
    place = lambda tree: jax.device_put(tree, layout.microbatches)
    params = jax.device_put(init_params(model, jax.random.key(3)), layout.params)
    for method in ("oar_p", "oar_g"):
        cfg = tiny.config(credit__method=method, credit__masking__buckets=1, rollout__prompts=8,
                          rollout__group_size=2, rollout__tensor=rollout_tensor, update__microbatch=8,
                          policy__head_chunk=24, eval__batch=8)
        check_layouts(cfg, model, mesh)
        rollouts = rollout_layout(cfg.policy, cfg.rollout, cfg.lora, model, mesh)
        policy = bind_policy(cfg.policy, model, mesh, adapter_scale=1.0)
        steps = make_steps(policy, one, layout, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD,
                           rollout=rollouts)
        if method == "oar_p":
            sampling, asked = steps.rollout_params(params), jax.device_put(prompts, rollouts.rows)
            drawn = [jax.device_get(steps.sample(sampling, asked, jax.random.key(seed))) for seed in range(4)]
            rollout = drawn[0]
            span = tiny.find_answers(rollout)
            plan = MinibatchPlan(np.arange(16), 1, 8, 16)
            sampled = place(plan.split(SampledRows(rollout, span, np.arange(16, dtype=np.int32)))[0])
            r = sampled.rollout
            used = plan.used[0]
            a = np.random.default_rng(7).normal(size=16).astype(np.float32)
            graded = place(plan.split(GradedRows(a, rollout.completion))[0])
            mask = graded.completion
        scores = steps.score(params, None, sampled, jax.random.key(5), np.int32(0), used, probe="answer_mean",
                             bucket=bucket)
        pieces = scores.importance.sharding.devices_indices_map(scores.importance.shape).values()
        assert len({str(piece) for piece in pieces}) == np.prod(shape[:3])
        found[f"importance/{method}"] = scores.importance
        found[f"weights/{method}"] = steps.credit(scores, sampled, graded, jax.random.key(6), 1)[0].weights
    # Every program is given the same: the credit's own rounding is not to show in the gradients.
    per_token = np.random.default_rng(8).normal(size=rollout.completion.shape).astype(np.float32)
    (per_token,) = place(plan.split((per_token * rollout.completion,))[0])
    batch = TrainBatch(tokens=r.tokens, valid=r.valid, completion=mask, advantages=per_token, old_logps=None,
                       ref_logps=None, behaviour_logps=r.behaviour_logps)
    state = new_state(params, one, layout, seed=0, lora=cfg.lora)
    pieces = (Piece(bucket, np.int32(0), used),)
    keys = jax.random.key(5), jax.random.key(6)
    fused = steps.fused(state, sampled, graded, pieces, keys, probe="answer_mean")
    found |= {"importance/fused": fused.importance, "gradients/fused": fused.sums.grads}
    if shape[1] == 1:
        policy = bind_policy(cfg.policy.model_copy(update={"compute_dtype": "bfloat16"}), model, mesh, adapter_scale=1)
        rounded = make_steps(policy, one, layout, cfg, stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
        fused = rounded.fused(state, sampled, graded, (Piece(pairs, np.int32(0), used),), keys, probe="answer_mean")
        found |= {"importance/bfloat16": fused.importance, "gradients/bfloat16": fused.sums.grads}
    denominator = steps.denominator(jnp.asarray(rollout.completion))
    moved, metrics = steps.updates.update(state, batch, pieces, denominator)
    found["gradients"] = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, moved.params)
    tokens = [x for each in drawn for x in (each.tokens, each.completion)]
    return tokens, found | {"loss": metrics["loss"].value, "logps": rollout.behaviour_logps}

def error(tree, other):
    # the largest difference, as a share of the largest number
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other))]
    return float(max(np.abs(x - y).max() for x, y in pairs) / max(np.abs(x).max() for x, y in pairs))

tokens, plain = outcome((1, 1, 1, 1), None)
for shape, rollout_tensor in json.loads(sys.argv[1]):
    drawn, sharded = outcome(shape, rollout_tensor)
    errors = {name: error(plain[name], tree) for name, tree in sharded.items()}
    same = all(np.array_equal(x, y) for x, y in zip(tokens, drawn))
    print(json.dumps({"mesh": shape, "rollout.tensor": rollout_tensor, "same_tokens": same, **errors}), flush=True)
"""
MESHES = [  # (slice, data, fsdp, tensor), rollout.tensor
    ((1, 2, 1, 4), None),
    ((2, 1, 2, 2), 8),
]


@pytest.mark.slow
def test_programs_on_eight_devices_and_on_one():
    """Losses, gradients and importance within 1e-5 of the largest; tokens of four seeds identical.

    On the second mesh the rows of a group share their prompt, on one device they do not. In one pass in bfloat16 they
    do on both: there measured 7e-8 and 4e-4 apart, and .05 and .08 from float32.
    """
    found = json_lines(PROGRAM, json.dumps(MESHES), devices=8, quick=True, timeout=2400)
    assert [len(line) for line in found] == [12, 14]
    bounds = {"importance/bfloat16": 5e-3, "gradients/bfloat16": 8e-3}
    # The gate stretches a row's scores, and their rounding with them.
    bounds |= dict.fromkeys(("weights/oar_p", "weights/oar_g", "gradients/fused"), 1e-4)
    for line in found:
        print(line)
        assert line["same_tokens"], line
        for name in line.keys() - {"mesh", "rollout.tensor", "same_tokens"}:
            assert line[name] < bounds.get(name, 1e-5), line
