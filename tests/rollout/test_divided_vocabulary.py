"""A decode step of a policy whose vocabulary is divided over devices: no device ever holds all logits of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from conftest import json_lines

from oarjax.rollout.sampler import BLOCK, DEVICES, invert_cdf

PROGRAM = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from oarjax.data.tasks.arithmetic import VOCABULARY, builtin_config
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import ROLLOUT, param_specs
from oarjax.models.weights import abstract_params, logical_axes
from oarjax.rollout.sampler import Decoding, Rows, decode_step

ROWS = 8
fields = builtin_config(hidden=16, layers=2, heads=8, kv_heads=8, ffn=32, vocab=VOCABULARY)
model = QwenConfig.from_hf(fields)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def laid(shape, spec):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

policy = make_policy(model, mesh=mesh)
specs = param_specs(logical_axes(model), rules=ROLLOUT)
params = jax.tree.map(laid, abstract_params(model, dtype=jnp.float32), specs)
row = lambda shape: laid(shape, PartitionSpec("data", *[None] * (len(shape.shape) - 1)))
rows = jax.eval_shape(lambda: Rows(jax.random.split(jax.random.key(0), ROWS), *[jnp.zeros(ROWS, jnp.int32)] * 3,
                                   *[jnp.zeros(ROWS, bool)] * 2))
rows = jax.tree.map(row, rows)
cache = jax.eval_shape(lambda: policy.init_cache(ROWS, 4))
how = Decoding(8, 1.0, 0, float(sys.argv[1]), (), 0)

def step(params, rows, cache, prefix):
    return decode_step(policy, policy.head(params), rows, cache, prefix, how)

text = jax.jit(step).lower(params, rows, cache, cache).compile().as_text()
sizes = []
for line in text.splitlines():
    found = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)", line)
    if found:
        for shape in re.findall(r"\\[([\\d,]*)\\]", found[1]):
            size = 1
            for number in filter(None, shape.split(",")):
                size *= int(number)
            sizes.append(size)
print(json.dumps({"share": VOCABULARY * ROWS // 8, "largest": max(sizes), "count": len(sizes)}))
"""


def test_no_logits_are_gathered():
    """The largest collective is a small part of a device's own logits, with and without top-p's bisection."""
    (found,) = json_lines(PROGRAM, "0.9", devices=8, quick=True)
    assert found["count"] > 0
    assert found["largest"] < found["share"] / 8, found


def test_empty_blocks_change_no_draw():
    """A large vocabulary has empty blocks behind its own: the token is the one without them."""
    vocab = 8 * BLOCK * DEVICES + 5 * BLOCK + 3
    logits = jax.random.normal(jax.random.key(0), (64, vocab)) * 3
    uniforms = jax.random.uniform(jax.random.key(1), (64, 2))
    token = np.asarray(invert_cdf(logits, uniforms))
    mass = np.exp(np.asarray(logits, np.float64) - np.asarray(logits.max(-1, keepdims=True), np.float64))
    padded = np.pad(mass, ((0, 0), (0, -vocab % BLOCK))).reshape(64, -1, BLOCK)
    block = (np.cumsum(padded.sum(-1), 1) > np.asarray(uniforms)[:, :1] * mass.sum(-1, keepdims=True)).argmax(1)
    inside = padded[np.arange(64), block]
    place = (np.cumsum(inside, 1) > np.asarray(uniforms)[:, 1:] * inside.sum(-1, keepdims=True)).argmax(1)
    assert (token == block * BLOCK + place).mean() > 0.98  # the rest is rounding at an edge
    assert token.max() < vocab
    last = jnp.full((1, vocab), -jnp.inf).at[0, -1].set(0.0)
    assert int(invert_cdf(last, jnp.array([[0.999999, 0.999999]]))[0]) == vocab - 1
