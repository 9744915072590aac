"""The tangent's TPU kernel in Pallas' interpreter, against plain attention in float64 and the tangent in plain XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from oarjax.kernels.attention_tangent import BLOCK_BYTES, LANES, device_tangent, visible_pairs
from oarjax.kernels.splash import _push, block_of
from oarjax.tools.plan.hlo import executed
from oarjax.tools.plan.roofline import kernel_flops
from oarjax.tools.plan.topology import ENVIRONMENT, TopologyError, find_slice, slice_devices

ROWS, DRAWS = 2, 2


def attention(q, k, v, seen):
    """Softmax over the keys that are seen, at whatever precision the arrays have."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.where(seen, jnp.einsum("bhnd,bhmd->bhnm", q, k), -jnp.inf)
    return jnp.einsum("bhnm,bhmd->bhnd", jax.nn.softmax(scores, axis=-1), v)


def problem(seed, *, heads, kv, width, block, dtype):
    """Lengths at random, padded to blocks; row 0 begins with padding, others have gaps. Tangents of two draws.

    Returns the arguments, the queries that see a key, the offset, and output and tangents in float64.
    """
    draw = np.random.default_rng(seed)
    new, offset = int(draw.integers(block + 1, 2 * block)), int(draw.integers(1, 2 * block))
    whole, keys = (-(-n // block) * block for n in (new, new + offset))
    shapes = {"q": (ROWS, heads, whole, width), "k": (ROWS, kv, keys, width)}
    q, k, v = (jnp.asarray(draw.normal(size=shapes[n]), dtype) for n in "qkk")
    q = q / width**0.5
    dq, dk, dv = (jnp.asarray(draw.normal(size=(DRAWS, *shapes[n])), dtype) for n in "qkk")
    ids_k = (np.arange(keys) < new + offset) & (draw.random((ROWS, keys)) < 0.9)
    ids_k[0, : draw.integers(1, offset + block)] = False
    ids_q = np.zeros((ROWS, whole), bool)
    ids_q[:, :new] = np.cumsum(ids_k, axis=1)[:, offset : offset + new] > 0
    causal = np.arange(whole)[:, None] + offset >= np.arange(keys)
    seen = (causal & (ids_q[:, :, None] == ids_k[:, None]))[:, None]
    some = seen.any(-1, keepdims=True)  # others are padding, whose result is not defined
    with jax.enable_x64(True):
        f = partial(attention, seen=seen | ~some)
        push = jax.vmap(lambda *x: jax.jvp(f, x[:3], x[3:]), in_axes=(None,) * 3 + (0,) * 3, out_axes=(None, 0))
        out, tangents = map(np.asarray, jax.jit(push)(*(np.asarray(x, np.float64) for x in (q, k, v, dq, dk, dv))))
    ids = (jnp.asarray(x, jnp.int32) for x in (ids_q, ids_k))
    return (q, k, v, *ids, jnp.asarray(out, dtype), dq, dk, dv), some, offset, tangents


def over_draws(tangent):
    return jax.jit(jax.vmap(tangent, in_axes=(None,) * 6 + (0,) * 3))


def furthest(found, expected, where):
    """The largest difference as a share of the largest number."""
    assert np.isfinite(np.asarray(found, np.float32)).all()  # of padding too
    difference = np.abs(np.asarray(found, np.float64) - expected) * where
    return float(difference.max() / np.abs(expected * where).max())


@pytest.mark.parametrize(
    ("heads", "kv", "width", "block"),
    [
        (7, 1, 8, 128),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 2, 64, 256), (8, 2, 128, 128), (1, 1, 256, 128))),
    ],
)
def test_the_kernel_equals_plain_attention_and_the_plain_tangent(heads, kv, width, block):
    args, some, offset, expected = problem(heads, heads=heads, kv=kv, width=width, block=block, dtype=jnp.float32)
    sizes = {"block_q": block, "block_k": block, "interpret": True}
    found = over_draws(partial(device_tangent, offset=offset, **sizes))(*args)
    plain = over_draws(partial(_push, offset=offset))(*args)
    ours, theirs = (furthest(x, expected, some) for x in (found, plain))
    assert ours < max(2 * theirs, 1e-6)
    assert theirs < 2e-6


def test_bfloat16_is_as_far_from_float64_as_the_plain_tangent_is():
    args, some, offset, expected = problem(3, heads=4, kv=2, width=64, block=128, dtype=jnp.bfloat16)
    found = over_draws(partial(device_tangent, offset=offset, block_q=128, block_k=128, interpret=True))(*args)
    plain = over_draws(partial(_push, offset=offset))(*args)
    ours, theirs = (furthest(x, expected, some) for x in (found, plain))
    assert 1e-3 < ours < min(1.2 * theirs, 0.02)


@pytest.mark.parametrize(
    ("queries", "keys", "offset", "block_q", "block_k"),
    [(3, 3, 0, 128, 128), (2, 5, 300, 256, 128), (4, 2, 20, 128, 384), (2, 3, 1000, 128, 128)],
)
def test_pairs_are_the_blocks_that_the_diagonal_leaves(queries, keys, offset, block_q, block_k):
    seen = np.arange(queries * block_q)[:, None] + offset >= np.arange(keys * block_k)
    blocks = seen.reshape(queries, block_q, keys, block_k).any((1, 3))
    of_queries, of_keys, last = visible_pairs(queries, keys, offset=offset, block_q=block_q, block_k=block_k)
    assert list(zip(of_queries, of_keys)) == [tuple(pair) for pair in np.argwhere(blocks)]
    assert (last == [n + 1 == blocks[i].sum() for i, n in zip(of_queries, of_keys)]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "dtype", "new", "keys"),
    [
        ("v5e:1x1", 64, "bfloat16", 512, 640),
        ("v6e:1x1", 128, "bfloat16", 1280, 1920),
        ("v5p:2x2x1", 128, "float32", 1280, 1280),
        ("v5p:2x2x1", 256, "float32", 640, 1280),  # queries by 128
    ],
)
def test_the_kernel_fits_chips_and_a_plan_counts_what_it_does(name, width, dtype, new, keys, monkeypatch):
    """Two draws at once; products of the blocks that are seen, and keys as often as blocks of queries read them."""
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    try:
        devices = slice_devices(find_slice(name))[:1]
    except TopologyError:
        pytest.skip("libtpu is not installed (extra aot)")
    mesh, heads, kv = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,)), 64, 16  # more than VMEM holds
    block_q, block_k = block_of(new), block_of(keys)
    dtype = jnp.dtype(dtype)
    place = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    q, k = (ROWS, heads, new, width), (ROWS, kv, keys, width)
    ids = shape(ROWS, new, dtype=jnp.int32), shape(ROWS, keys, dtype=jnp.int32)
    arrays = shape(*q), shape(*k), shape(*k), *ids, shape(*q), shape(DRAWS, *q), shape(DRAWS, *k), shape(DRAWS, *k)
    kernel = partial(device_tangent, offset=keys - new, block_q=block_q, block_k=block_k, interpret=False)
    everywhere = PartitionSpec()
    divided = partial(jax.shard_map, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    program = jax.jit(jax.vmap(divided(kernel), in_axes=(None,) * 6 + (0,) * 3))
    jax.config.update("jax_enable_compilation_cache", False)  # there are no devices to load programs on
    try:
        text = program.lower(*arrays).compile().as_text()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    found = executed(text)
    ((called, times),) = found.kernels.items()
    assert times == 1
    if block_q * width * dtype.itemsize > BLOCK_BYTES:
        return
    pairs = visible_pairs(new // block_q, keys // block_k, offset=keys - new, block_q=block_q, block_k=block_k)
    over = DRAWS * ROWS * heads * pairs.shape[1] * block_k * width
    assert kernel_flops(called.name, called.operands, block=block_of) == 5 * 2 * block_q * over
    least = dtype.itemsize * (4 * over + DRAWS * 4 * ROWS * heads * new * width)
    if width == LANES:  # narrower arrays are copied into another layout, and then lie on the chip
        assert least <= found.moved < 1.02 * least  # and ids, and the list of pairs
