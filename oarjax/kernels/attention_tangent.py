"""Compute the tangent of causal attention with a Pallas TPU kernel, in one pass over the keys that queries see.

With s = q k^T, p = softmax(s) and ds = dq k^T + q dk^T the tangent is p dv + (p ds) v - (p . ds) out. It is summed
block by block, as attention itself is: relative to a running maximum of s, e = exp(s), e ds and e dv + (e ds) v. Scores
exist for one block at a time, on the chip. Off TPUs Pallas' interpreter runs the kernel, for tests.

Work. The last grid axis lists the pairs (block of queries, block of keys) with a key at or below the diagonal: those
above it cost no products, no copies and no step. Blocks below it are not masked by it. The two products of ds are one
of twice the width, which fills a matrix unit of 256 with heads of 128.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from oarjax.kernels.precision import product_of

LANES = 128
NAME = "attention_tangent"
"""Part of the kernel's name in programs."""
BLOCK_BYTES = 384 * 2**10
"""Most bytes of a block of queries, else it has 128 of them: VMEM of 16 MiB holds 16 blocks and a block's scores."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def device_tangent(
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
    block_q: int,
    block_k: int,
    interpret: bool,
) -> Float[Array, "B heads N h"]:
    """Compute one device's tangent, N and M in whole blocks: query i sees the keys up to i + ``offset`` of its id."""
    rows, heads, length, width = q.shape
    group = heads // k.shape[1]
    block_q = block_q if block_q * width * q.dtype.itemsize <= BLOCK_BYTES else LANES
    pairs = visible_pairs(length // block_q, k.shape[2] // block_k, offset=offset, block_q=block_q, block_k=block_k)
    of_queries = pl.BlockSpec((1, 1, block_q, width), lambda row, head, at, pairs: (row, head, pairs[0, at], 0))
    of_keys = pl.BlockSpec(
        (1, 1, block_k, width), lambda row, head, at, pairs: (row, jax.lax.div(head, group), pairs[1, at], 0)
    )
    ids = [
        pl.BlockSpec((1, 1, block_q), lambda row, _, at, pairs: (row, 0, pairs[0, at])),
        pl.BlockSpec((1, 1, block_k), lambda row, _, at, pairs: (row, 0, pairs[1, at])),
    ]
    call = pl.pallas_call(
        partial(_kernel, offset=offset),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, heads, pairs.shape[1]),
            in_specs=[of_queries, of_keys, of_keys, *ids, of_queries, of_queries, of_keys, of_keys],
            out_specs=of_queries,
            scratch_shapes=[
                pltpu.VMEM((block_q, LANES), jnp.int32),
                *[pltpu.VMEM((block_q, n), jnp.float32) for n in (LANES, LANES, LANES, width)],
            ],
        ),
        name=NAME,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )
    return call(jnp.asarray(pairs), q, k, v, ids_q[:, None], ids_k[:, None], out, dq, dk, dv)


def visible_pairs(queries: int, keys: int, *, offset: int, block_q: int, block_k: int) -> np.ndarray:
    """List which of so many blocks of queries sees which of keys: rows are these, and 1 at a block of queries' end."""
    visible = [min((i * block_q + block_q - 1 + offset) // block_k, keys - 1) + 1 for i in range(queries)]
    return np.array([(i, j, j == n - 1) for i, n in enumerate(visible) for j in range(n)], np.int32).T


def _kernel(pairs, q, k, v, ids_q, ids_k, out, dq, dk, dv, tangent, ids, top, total, change, value_sum, *, offset: int):
    """Add a block of keys to the sums of a block of queries, those of scores by lane, and divide them at the end."""
    (block_q, width), block_k = q.shape[2:], k.shape[2]
    score, weigh = (partial(product_of(q.dtype), axes) for axes in ("nh,mh->nm", "nm,mh->nh"))
    at = pl.program_id(2)
    i, j = pairs[0, at], pairs[1, at]
    last_key = i * block_q + offset - j * block_k  # the last key of this block that the first query sees

    @pl.when(j == 0)
    def _():
        ids[...] = jnp.broadcast_to(ids_q[0], (LANES, block_q)).T
        top[...] = jnp.full_like(top, LOWEST)  # in every lane
        for x in (total, change, value_sum):
            x[...] = jnp.zeros_like(x)

    def add(*, crossed: bool) -> None:
        visible = _wide(ids[...], block_k) == ids_k[0]
        if crossed:
            index = partial(jax.lax.broadcasted_iota, jnp.int32, (block_q, block_k))
            visible &= index(1) - index(0) <= last_key
        s = jnp.where(visible, score(q[0, 0], k[0, 0]), LOWEST)
        ds = score(jnp.concatenate([dq[0, 0], q[0, 0]], 1), jnp.concatenate([k[0, 0], dk[0, 0]], 1))
        new_top = jnp.maximum(top[...], s.max(1, keepdims=True))
        scale = jnp.exp(top[...] - new_top)
        e = jnp.exp(s - _wide(new_top, block_k))
        top[...] = new_top
        for sums, x in ((total, e), (change, e * ds)):
            sums[...] = sums[...] * scale + sum(x[:, n : n + LANES] for n in range(0, block_k, LANES))
        value = weigh(e.astype(v.dtype), dv[0, 0]) + weigh((e * ds).astype(v.dtype), v[0, 0])
        value_sum[...] = value_sum[...] * _wide(scale, width) + value

    below_diagonal = last_key >= block_k - 1
    pl.when(below_diagonal)(partial(add, crossed=False))
    pl.when(~below_diagonal)(partial(add, crossed=True))

    @pl.when(pairs[2, at] == 1)
    def _():
        inverse = 1 / total[...].sum(1, keepdims=True)
        mean_change = change[...].sum(1, keepdims=True) * inverse
        tangent[0, 0] = (value_sum[...] * inverse - mean_change * out[0, 0]).astype(tangent.dtype)


def _wide(x: Array, width: int) -> Array:
    """Repeat 128 equal lanes to a width, or cut them to it."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)
