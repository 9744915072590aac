"""How far bfloat16 matmuls move the log-probs of each family: the table in docs/models.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import json_lines

from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.rollout.logps import token_logps

KINDS = {"qwen2_untied": 0.02, "qwen3_untied": 0.02, "moe_untied": 0.1, "delta_untied": 0.1}
KINDS |= {"moe_delta_untied": 0.1, "next_untied": 0.1}
"""Checkpoint -> bound on the mean difference, in nats: amplified random weights, far from a trained model's."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mean_difference_of_log_probs(kind, data):
    cfg, folder = read_config(data / "policy" / kind)
    params, ids = load_params(folder, cfg), jnp.asarray(np.load(folder / "golden.npz")["ids"])

    @jax.jit
    def gaps(params, ids):
        valid = jnp.ones(ids.shape, bool)
        settings = {"completion_length": ids.shape[1] - 1, "temperature": 1.0, "head_chunk": 512}
        policies = [make_policy(cfg, remat="none", compute_dtype=dtype) for dtype in ("float32", "bfloat16")]
        exact, rounded = (token_logps(policy, params, ids, valid, **settings)[0] for policy in policies)
        return jnp.abs(exact - rounded)

    found = np.asarray(gaps(params, ids))
    print(f"{kind}: mean {found.mean():.4f}, 99% {np.quantile(found, 0.99):.4f}, max {found.max():.4f} nats")
    assert 0 < found.mean() < KINDS[kind]


SAMPLED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.rollout.logps import token_logps
from oarjax.rollout.sampler import sample
from oarjax.types import PromptBatch
from tiny import init

fields = dict(model_type="qwen2", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
    tie_word_embeddings=False, initializer_range=0.06)
model = QwenConfig.from_hf(fields)
mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 4), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
params = init(model, jax.random.key(0))

def place(path, x):
    names = [str(getattr(key, "key", key)) for key in path]
    axes = [None] * x.ndim
    if "layers" in names and "kernel" in names:
        axes[-2 if {"o", "down"} & set(names) else -1] = "tensor"
    return NamedSharding(mesh, PartitionSpec(*axes))

laid = jax.device_put(params, jax.tree_util.tree_map_with_path(place, params))
tokens = jax.random.randint(jax.random.key(1), (16, 8), 0, 512)
prompts = PromptBatch(tokens, jnp.ones(tokens.shape, bool), jnp.arange(16))
how = dict(group_size=4, max_new=24, temperature=1.0, top_k=0, top_p=1.0, stop_ids=(), pad_id=0)

def policy(dtype, **options):
    return make_policy(model, compute_dtype=dtype, remat="none", **options)

def drawn(dtype):
    run = jax.jit(lambda params, key: sample(policy(dtype, mesh=mesh), params, prompts, key, **how))
    lines = run.lower(laid, jax.random.key(2)).as_text().splitlines()
    sums = [line for line in lines if "dot_general" in line and "-> tensor<64x256xbf16>" in line]
    return jax.device_get(run(laid, jax.random.key(2))), len(sums)

def scores(rollout, dtype):
    settings = dict(completion_length=24, temperature=1.0, head_chunk=512)
    score = jax.jit(lambda params: token_logps(policy(dtype), params, rollout.tokens, rollout.valid, **settings)[0])
    return np.asarray(score(params))

def gap(a, b):
    return float(np.abs(a - b).mean())

(exact, none), (rounded, sums) = drawn("float32"), drawn("bfloat16")
wide, narrow = scores(rounded, "float32"), scores(rounded, "bfloat16")
print(json.dumps({
    "sums": [none, sums], "exact": gap(exact.behaviour_logps, scores(exact, "float32")), "products": gap(narrow, wide),
    "sampler": gap(rounded.behaviour_logps, wide), "apart": gap(rounded.behaviour_logps, narrow),
}))
"""


@pytest.mark.slow
def test_sums_over_devices_in_bfloat16_move_the_sampler_little():
    """A layer's two sums over four devices while decoding, see docs/numerics.md; none in float32 or prefill."""
    (found,) = json_lines(SAMPLED, devices=4, quick=True)
    print(found)
    assert found["sums"] == [0, 2]
    assert found["exact"] < 1e-5
    assert 0 < found["apart"] < found["products"]
    assert found["sampler"] < 1.2 * found["products"]
