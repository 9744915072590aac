"""Compute causal self-attention in blocks, forward and reverse, over a mesh: with Pallas' TPU kernels or without.

It saves memory and time over ``attention.attend``: scores exist for one block at a time, forward and backward.
``splash`` are Pallas' TPU kernels ("splash attention"), which skip blocks above the diagonal as well; on TPUs they are
compiled, elsewhere Pallas' interpreter runs them, far too slowly for anything but tests. ``blocked`` is plain XLA, 128
queries at a time, on every platform. ``cudnn`` are NVIDIA's kernels, in bfloat16, which tests only lower.

Derivatives. The public kernel has reverse mode only, and OAR-G needs a linearisation as well. So a derivative here is
a ``linear_pair``: cotangents go through the kernel's own backward pass (dq, and dk with dv), which reuses what the
forward pass saved, and tangents go through a kernel of their own (``kernels.attention_tangent``), or but for splash
through blocked XLA. Gradients touch neither.

Blocks. The kernels need lengths that are multiples of their blocks, and blocks that are multiples of 128, the lanes of
a TPU. Lengths are padded; ``block_of`` weighs the work wasted on padding and on blocks across the diagonal against
larger tiles, which keep the matrix unit busier. Up to 640 x 640 float32 scores with their operands fit the 16 MiB of
VMEM that a kernel gets by default, forward and backward, as libtpu 0.0.42 compiles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from oarjax.kernels.attention import BlockedKind
from oarjax.kernels.attention_tangent import LANES, device_tangent
from oarjax.kernels.linear_pair import linear_pair
from oarjax.kernels.precision import full_precision, product_of
from oarjax.kernels.remat import ATTENTION, kept

EFFICIENCY = {LANES: 0.5, 256: 0.64, 384: 0.8, 512: 0.9, 640: 0.93}
"""Block -> share of the matrix unit's peak: assumed until measured (``oarjax accept`` times blocks of 128 and 512)."""
CUDNN = "cudnn"
"""Implementation of ``jax.nn.dot_product_attention``; a test without a GPU takes another."""
HEADS = "tensor"
"""Mesh axis that shards heads; all others shard rows."""


def splash(
    q: Float[Array, "B N heads h"],
    k: Float[Array, "B M kv h"],
    v: Float[Array, "B M kv h"],
    valid: Bool[Array, "B M"],
    *,
    mesh: Mesh,
    blocks: tuple[int, int] | None = None,
    kernel: BlockedKind = "splash",
) -> Float[Array, "B N heads h"]:
    """Compute softmax(q k^T / sqrt(h)) v like ``attend`` for the M - N keys of a prefix and the N queries' own.

    Query i sees the valid keys among the first M - N + i + 1; one that sees none, which is padding, gives a mean of
    padding: zeros in its place would take a pass over the result. Head i reads key head i // (heads / kv). The result
    has the dtype of ``k``, in which q is rounded after scaling; scores, sums and the product with v are float32 inside
    the kernel.

    Rows are sharded over the axes of ``mesh`` other than "tensor" (padded to divide), heads over "tensor", with key
    heads repeated only as far as needed. ``blocks`` of queries and keys: None, by ``block_of``; 128 but for splash.

    Raises:
        ValueError: "tensor" does not divide the heads, or float64.
    """
    rows, queries, heads, width = q.shape
    keys, kv = k.shape[1:3]
    check_splash(heads, k.dtype, mesh, kernel)
    tensor = mesh.shape.get(HEADS, 1)
    repeats = _key_repeats(heads, kv, tensor)
    has_key = jnp.cumsum(valid, axis=1)[:, keys - queries :] > 0
    # Equal ids see each other: 1 for real keys and queries that see one. Padding sees padding, so no softmax is empty.
    ids_q, ids_k = has_key.astype(jnp.int32), valid.astype(jnp.int32)
    parts = mesh.size // tensor
    block_q, block_k = blocks or ((block_of(queries), block_of(keys)) if kernel == "splash" else (LANES, LANES))

    def heads_first(x: Array, block: int) -> Array:
        return _pad(x.transpose(0, 2, 1, 3), (parts, 1, block, 1))

    scaled_q = (q * jnp.asarray(width**-0.5, q.dtype)).astype(k.dtype)
    out = _attention(mesh, keys - queries, block_q, block_k, kernel)(
        heads_first(scaled_q, block_q),
        heads_first(jnp.repeat(k, repeats, axis=2), block_k),
        heads_first(jnp.repeat(v, repeats, axis=2), block_k),
        _pad(ids_q, (parts, block_q)),
        _pad(ids_k, (parts, block_k)),
    )
    return out[:rows, :, :queries].transpose(0, 2, 1, 3)


def causal_mixer(
    written: Sequence[Array], valid: Bool[Array, "B N"], mesh: Mesh, kernel: BlockedKind = "splash"
) -> Callable[..., Array]:
    """Return a function (stored keys and values, q, own k, own v) -> attention, causal among the new."""
    rows = valid.shape[0]

    def join(parts: Sequence[Array], new: Array) -> Array:
        """Put the stored before the new; what several rows share is repeated, for one layer at a time."""
        repeated = (x if x.shape[0] == rows else jnp.repeat(x, rows // x.shape[0], axis=0) for x in parts)
        return jnp.concatenate([*repeated, new], axis=1)

    valid_keys = join(written, valid)

    def mix(stored: Sequence[tuple[Array, Array]], q: Array, k: Array, v: Array) -> Array:
        keys, values = join([key for key, _ in stored], k), join([value for _, value in stored], v)
        return splash(q, keys, values, valid_keys, mesh=mesh, kernel=kernel)

    return mix


def check_splash(heads: int, dtype: DTypeLike, mesh: Mesh, kernel: BlockedKind = "splash") -> None:
    """Raise for inputs that ``splash`` does not support.

    Raises:
        ValueError: "tensor" does not divide the heads, float64, or for cudnn not bfloat16.
    """
    if jnp.dtype(dtype) == jnp.float64:
        raise ValueError(f"attention: {kernel} computes in float32, got float64; use xla")
    if kernel == "cudnn" and jnp.dtype(dtype) != jnp.bfloat16:
        raise ValueError(f"attention: cudnn multiplies in bfloat16, got {jnp.dtype(dtype)}; use blocked")
    if heads % mesh.shape.get(HEADS, 1):
        raise ValueError(
            f"attention: {kernel} gives every device whole heads, got {heads} heads on mesh axis {HEADS} = "
            f"{mesh.shape[HEADS]}; use a size that divides them, or xla"
        )


def _attention(mesh: Mesh, offset: int, block_q: int, block_k: int, kernel: BlockedKind) -> Any:
    """Return a function (q [B heads N h], k, v [B kv M h], ids of q [B N], of k [B M]) -> [B heads N h], all padded."""
    row = tuple(axis for axis in mesh.axis_names if axis != HEADS)
    heads = PartitionSpec(row, HEADS if HEADS in mesh.axis_names else None)
    ids = PartitionSpec(row)
    specs = (heads, heads, heads, ids, ids)
    # Everything outside the kernels is plain XLA, so only the kernels depend on the platform.
    interpret = mesh.devices.flat[0].platform != "tpu"
    sizes: Any = {"block_q": block_q, "block_k": block_k, "interpret": interpret}
    on_device = {"splash": partial(device_kernel, **sizes), "blocked": blocked_kernel, "cudnn": cudnn_kernel}[kernel]
    divide = partial(jax.shard_map, mesh=mesh, out_specs=heads, check_vma=False)
    forward: Any = divide(partial(on_device, offset=offset), in_specs=specs)
    push_on_device = partial(device_tangent, **sizes) if kernel == "splash" else _push
    push: Any = divide(partial(push_on_device, offset=offset), in_specs=(*specs, *(heads,) * 4))
    attention = jax.custom_jvp(forward)

    @attention.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        *qkv, ids_q, ids_k = primals
        dtype = qkv[0].dtype
        out, pullback = jax.vjp(lambda q, k, v: forward(q, k, v, ids_q, ids_k), *qkv)
        saved, tree = jax.tree.flatten(pullback)
        out, *saved = (x if any(x is p for p in primals) else kept(x, ATTENTION) for x in (out, *saved))
        residuals = [*primals, out, *saved]

        def tangent(*args: Array) -> tuple[Array, ...]:
            return (push(*args[: len(primals) + 1], *args[-len(qkv) :]),)

        def cotangent(*args: Array) -> tuple[Array, ...]:
            with full_precision(dtype):  # the backward kernels are traced here
                return jax.tree.unflatten(tree, args[len(primals) + 1 : -1])(args[-1])

        # cuDNN's kernels as JAX calls them take no batch of masks that heads share.
        pull = sequential_vmap(cotangent) if kernel == "cudnn" else cotangent
        return out, linear_pair(tangent, pull, residuals, tangents[: len(qkv)])[0]

    return attention


def device_kernel(
    q: Float[Array, "B heads N h"],
    k: Float[Array, "B kv M h"],
    v: Float[Array, "B kv M h"],
    ids_q: Int[Array, "B N"],
    ids_k: Int[Array, "B M"],
    *,
    offset: int,
    block_q: int,
    block_k: int,
    interpret: bool,
) -> Float[Array, "B heads N h"]:
    """Compute attention for the rows and heads of one device."""
    mask = CausalMask((q.shape[2], k.shape[2]), offset=offset)
    kernel = make_splash_mha(
        MultiHeadMask([mask] * q.shape[1]),
        block_sizes=BlockSizes(
            block_q=block_q,
            block_kv=block_k,
            block_q_dkv=block_q,
            block_kv_dkv=block_k,
            block_q_dq=block_q,
            block_kv_dq=block_k,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    with full_precision(q.dtype):
        out: Any = jax.vmap(kernel)(q, k, v, SegmentIds(ids_q, ids_k))
    return out


def blocked_kernel(
    q: Float[Array, "B heads N h"],
    k: Float[Array, "B kv M h"],
    v: Float[Array, "B kv M h"],
    ids_q: Int[Array, "B N"],
    ids_k: Int[Array, "B M"],
    *,
    offset: int,
) -> Float[Array, "B heads N h"]:
    """Compute attention for the rows and heads of one device, one block of queries at a time, again when it is pulled.

    Scores are [B, heads, block, M].
    """

    @jax.checkpoint
    def attend_block(first: Array, ids: Array, q: Array) -> Array:
        p = _probabilities(first + offset, ids, q, k, ids_k)
        return product_of(q.dtype)("bkgnm,bkmh->bkgnh", p.astype(v.dtype), v).astype(q.dtype)

    return _by_block(attend_block, k.shape[1], ids_q, q)


def cudnn_kernel(
    q: Float[Array, "B heads N h"],
    k: Float[Array, "B kv M h"],
    v: Float[Array, "B kv M h"],
    ids_q: Int[Array, "B N"],
    ids_k: Int[Array, "B M"],
    *,
    offset: int,
) -> Float[Array, "B heads N h"]:
    """Compute attention for the rows and heads of one device with cuDNN, from a mask [B, 1, N, M]."""
    causal = jnp.arange(q.shape[2])[:, None] + offset >= jnp.arange(k.shape[2])
    mask = (causal & (ids_q[:, :, None] == ids_k[:, None, :]))[:, None]
    points = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out = jax.nn.dot_product_attention(*points, mask=mask, scale=1.0, implementation=CUDNN)
    return out.transpose(0, 2, 1, 3)


def _push(
    q: Float[Array, "B heads N h"],
    k: Float[Array, "B kv M h"],
    v: Float[Array, "B kv M h"],
    ids_q: Int[Array, "B N"],
    ids_k: Int[Array, "B M"],
    out: Float[Array, "B heads N h"],
    dq: Float[Array, "B heads N h"],
    dk: Float[Array, "B kv M h"],
    dv: Float[Array, "B kv M h"],
    *,
    offset: int,
) -> Float[Array, "B heads N h"]:
    """Compute the tangent of attention's output: P dv + (P ds) v - (P . ds) out, ds = dq k + q dk.

    It takes a block of queries at a time: scores are [B, heads, block, M].
    """
    product = product_of(q.dtype)

    def tangent_of(first: Array, ids: Array, q: Array, out: Array, dq: Array) -> Array:
        p = _probabilities(first + offset, ids, q, k, ids_k)
        change = p * (product("bkgnh,bkmh->bkgnm", dq, k) + product("bkgnh,bkmh->bkgnm", q, dk))
        tangent = product("bkgnm,bkmh->bkgnh", p.astype(v.dtype), dv)
        tangent += product("bkgnm,bkmh->bkgnh", change.astype(v.dtype), v)
        return (tangent - change.sum(-1, keepdims=True) * out).astype(out.dtype)

    return _by_block(tangent_of, k.shape[1], ids_q, q, out, dq)


def _probabilities(
    first: Int[Array, ""],
    ids: Int[Array, "B block"],
    q: Float[Array, "B kv group block h"],
    k: Float[Array, "B kv M h"],
    ids_k: Int[Array, "B M"],
) -> Float[Array, "B kv group block M"]:
    """Compute the softmax of a block of queries, the first of which may see the keys up to ``first``."""
    visible = first + jnp.arange(ids.shape[1])[:, None] >= jnp.arange(k.shape[2])
    visible = (visible & (ids[:, :, None] == ids_k[:, None, :]))[:, None, None]
    scores = jnp.where(visible, product_of(q.dtype)("bkgnh,bkmh->bkgnm", q, k), jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def _by_block(
    f: Callable[..., Array], kv: int, ids_q: Int[Array, "B N"], *queries: Float[Array, "B heads N h"]
) -> Float[Array, "B heads N h"]:
    """Map (first query, ids [B, block], *queries [B, kv, group, block, h]) -> array like q over blocks of queries."""
    rows, heads, length, width = queries[0].shape
    blocks = length // LANES
    ids = jnp.moveaxis(ids_q.reshape(rows, blocks, LANES), 1, 0)
    parts = [jnp.moveaxis(x.reshape(rows, kv, heads // kv, blocks, LANES, width), 3, 0) for x in queries]
    out = jax.lax.map(lambda block: f(*block), (jnp.arange(blocks) * LANES, ids, *parts))
    return jnp.moveaxis(out, 0, 3).reshape(rows, heads, length, width)


def _key_repeats(heads: int, kv: int, tensor: int) -> int:
    """Return the smallest number of copies of each key head such that "tensor" divides all key heads."""
    group = heads // kv
    return next(n for n in range(1, group + 1) if group % n == 0 and kv * n % tensor == 0)


def block_of(length: int) -> int:
    """Return the fastest block for causal attention of this many tokens, by blocks visited over efficiency.

    The length padded to it has the same block. 576 and 640 tokens are one block of 640; 1,344 and 1,536 are three of
    512, which is cheaper than eleven or twelve of 128.
    """

    def cost(block: int) -> float:
        count = -(-length // block)
        return count * (count + 1) / 2 * block**2 / EFFICIENCY[block]

    return min(reversed(EFFICIENCY), key=cost)


def _pad(x: Array, multiples: tuple[int, ...]) -> Array:
    """Append zeros to each axis up to a multiple."""
    return jnp.pad(x, [(0, -size % multiple) for size, multiple in zip(x.shape, multiples)])
