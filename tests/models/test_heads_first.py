"""Attention in the order of a TPU's kernels equals attention of flat products: norms, biases, adapters, few angles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oarjax.models.layers import Adapted, Attention
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.rope import inverse_frequencies, rotation

ROWS, LENGTH, HEADS, KV, WIDTH, STREAM = 2, 7, 4, 2, 16, 24
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": STREAM,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": WIDTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
KINDS = {
    "norms": FIELDS,
    "biases": FIELDS | {"model_type": "qwen2"},
    "adapters": FIELDS,
    "every bias": FIELDS | {"attention_bias": True},
    "few angles": FIELDS,
}


def attention(kind: str, dtype, *, heads_first: bool):
    """(x, arrays) -> [result, keys, values], and arrays of random numbers."""
    cfg, stream = QwenConfig.from_hf(KINDS[kind]), jnp.promote_types(dtype, jnp.float32)

    def linear(_, into, out, **options):
        made = partial(Adapted, scale=0.5) if kind == "adapters" else nnx.Linear
        return made(into, out, dtype=dtype, preferred_element_type=stream, **options)

    norm = partial(nnx.RMSNorm, epsilon=cfg.rms_norm_eps, dtype=stream)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Attention(cfg, linear=linear, norm=norm, rngs=nnx.Rngs(0), heads_first=heads_first))
    )
    draw = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: jnp.asarray(0.3 * draw.normal(size=leaf.shape), leaf.dtype), state)
    angles = inverse_frequencies(WIDTH // (2 if kind == "few angles" else 1), theta=1e4, yarn=None)
    places = jnp.arange(LENGTH) + jnp.array([[0], [3]])
    cos, sin = rotation(places, angles, scale=1.0, dtype=stream)

    def mix(q, k, v):
        k, v = (jnp.repeat(heads, HEADS // KV, axis=2).astype(stream) for heads in (k, v))
        p = jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", q.astype(dtype).astype(stream), k), axis=-1)
        return jnp.einsum("bhnm,bmhd->bnhd", p, v)

    def run(x, state):
        out, (k, v) = nnx.merge(graph, state)(x, cos, sin, mix, compute_dtype=dtype)
        return out, k.astype(stream), v.astype(stream)

    return run, state


def results(kind: str, dtype, *, heads_first: bool) -> list[np.ndarray]:
    """The attention, its gradients, and a tangent."""
    run, state = attention(kind, dtype, heads_first=heads_first)
    points = np.random.default_rng(2).normal(size=(2, ROWS, LENGTH, STREAM)).astype(np.float32)
    x, dx = (jnp.asarray(each, jnp.promote_types(dtype, jnp.float32)) for each in points)

    def loss(x, state):
        return sum(jnp.sum(jnp.sin(part)) for part in run(x, state))

    @jax.jit
    def parts(x, dx, state):
        gradient, tangent = jax.grad(loss, argnums=(0, 1)), partial(jax.jvp, lambda x: run(x, state)[0])
        return run(x, state), gradient(x, state), tangent((x,), (dx,))

    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(parts(x, dx, state))]


def error(found, expected) -> float:
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_before_positions_change_nothing(kind, x64, highest_precision):
    exact = results(kind, jnp.float64, heads_first=False)
    assert error(results(kind, jnp.float64, heads_first=True), exact) < 1e-13
    for dtype in (jnp.float32, jnp.bfloat16)[kind != "norms" :]:  # the kinds differ in nothing that a type decides
        flat, first = (error(results(kind, dtype, heads_first=order), exact) for order in (False, True))
        print(f"{kind}, {jnp.dtype(dtype)}: {flat:.2g} flat, {first:.2g} heads first")
        assert first < 1.5 * flat


def test_no_array_holds_half_heads():
    """A TPU has 128 lanes, and pads an array of halves of 64 to them."""
    run, state = attention("norms", jnp.bfloat16, heads_first=True)
    jaxpr = jax.make_jaxpr(run)(jnp.zeros((ROWS, LENGTH, STREAM)), state)
    shapes = [tuple(v.aval.shape) for e in jaxpr.eqns for v in e.outvars]
    assert (ROWS, HEADS, LENGTH, WIDTH) in shapes
    assert not any(shape[-1] == WIDTH // 2 for shape in shapes if len(shape) == 4)
