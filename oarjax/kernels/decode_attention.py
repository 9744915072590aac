"""Read a resident cache for one new token per row with a Pallas TPU kernel, only as far as a row has written it.

Plain attention of a decode step (``attention.attend``) reads every slot of a program's window, of every row. The
kernel reads, by copies of its own from HBM, the blocks of 128 slots that a row's range covers, and nothing of rows
that draw no token. It takes the cache as it lies, [L kv B h C] and [L kv B C h] of all layers: nothing is sliced or
copied before. int8 blocks become operands of products in VMEM; their steps scale scores and weights. On TPUs it is
compiled, elsewhere Pallas' interpreter runs it, for tests.

A range is the first slot and the one behind the last: prompts are padded on the left, rows write from the slot where
they began to the one where they ended. Prompts that several rows share are read once for all of them.

Work. The rows of a device are divided into tiles of neighbours, whose key heads together fill the matrix units and
1 MiB of keys and values. ``schedule`` lists, once per step for all layers, the pairs (tile, block) that some row needs;
copies run ahead of the products by ``DEPTH`` - 1 pairs, from tile to tile. The first grid axis halves the tiles: chips
with two cores share them.

JAX's own kernels do not fit. ``paged_attention`` and ``ragged_paged_attention`` want keys as [.. slots, h] of one
layer, so that the cache would be copied in every step, begin each row at slot 0, and keep the maximum and the sum to
themselves, without which a prompt that a group shares cannot be joined; ``splash_attention`` reads 128 queries at a
time and skips nothing by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, Real

from oarjax.kernels.decode_cache import SLOT_AXES, each_array, written
from oarjax.kernels.precision import product_of
from oarjax.types import DecodeCache

DecodeKind = Literal["plain", "kernel"]
SLOTS = 128
"""Slots of a block, the lanes of a TPU."""
TILE_BYTES = 2**20
"""Keys and values of a block of a tile's rows: enough for copies at full speed."""
BUFFERS = 8 * 2**20
"""Bytes of VMEM for blocks under way, of the 16 MiB that a kernel gets by default."""
DEPTH = 4
"""Most blocks under way, the one that is multiplied included."""
NAME = "decode_attention"
"""Start of the kernel's names in programs: ``_rows`` reads the rows' own cache, ``_prompts`` what they share."""
HEADS = "tensor"
"""Mesh axis that shards key heads; all others shard rows."""
LOWEST = float(jnp.finfo(jnp.float32).min)


class Schedule(NamedTuple):
    """List what the rows of a cache need, per device; the same for all layers of a step."""

    start: Int32[Array, "R"]  # a row's first slot
    end: Int32[Array, "R"]  # behind its last one; 0 for rows that are not read
    first: Int32[Array, "T1"]  # pair of each tile, and behind them the number of pairs
    tiles: Int32[Array, "pairs"]  # the tile of each pair
    blocks: Int32[Array, "pairs"]  # its block of slots


def padded_slots(slots: int) -> int:
    """Round the slots of a cache up to whole blocks."""
    return -(-slots // SLOTS) * SLOTS


def padded(cache: DecodeCache) -> DecodeCache:
    """Return a cache with empty slots behind its own, up to whole blocks."""
    padding = padded_slots(cache.valid.shape[1]) - cache.valid.shape[1]

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, padding if at == axis else 0) for at in range(x.ndim)])

    return replace(cache, **each_array(cache, pad), valid=pad(cache.valid, 1))


def kernel_problem(kv: int, width: int, dtype: DTypeLike, mesh: Mesh | None) -> str | None:
    """Say what the kernel does not support of ``kv`` key heads of ``width`` on this mesh, and the remedy, or None."""
    if mesh is None:
        return "kernel runs per device of a mesh, got mesh=None; give mesh= or use plain"
    if mesh.devices.flat[0].platform == "gpu":
        return "kernel is for TPUs, got a GPU; use plain"
    if jnp.dtype(dtype) == jnp.float64:
        return "kernel computes in float32, got float64; use plain"
    tensor = mesh.shape.get(HEADS, 1)
    if kv % tensor:
        return f"kernel gives every device whole key heads, got {kv} on mesh axis {HEADS} = {tensor}; use plain"
    if 2 * (size := _row_bytes(kv // tensor, width, dtype)) > BUFFERS:
        return (
            f"kernel holds two blocks of a row in {BUFFERS} bytes, got {size} each for {kv // tensor} key heads of "
            f"{width} per device in {jnp.dtype(dtype)}; shard them over a larger axis {HEADS}, or use plain"
        )
    return None


def kernel_mixer(stores: Sequence[DecodeCache], alive: Bool[Array, "B 1"], mesh: Mesh) -> Callable[..., Array]:
    """Return a function (layer numbers of the stores, q, own k, own v) -> attention of one new token per row.

    Neighbouring rows share a row of a store with fewer. Rows that are not ``alive`` read nothing and give 0.

    Raises:
        ValueError: rows that the mesh does not divide.
    """
    rows = alive.shape[0]
    alive = alive[:, 0]
    schedules = [_schedule(store, alive.reshape(-1, rows // _rows(store)).any(1), mesh) for store in stores]

    def mix(
        numbers: Sequence[Array],
        q: Float[Array, "B 1 heads h"],
        k: Float[Array, "B 1 kv h"],
        v: Float[Array, "B 1 kv h"],
    ) -> Float[Array, "B 1 heads h"]:
        kv, width = k.shape[2:]
        by_head = q.astype(k.dtype).reshape(rows, kv, -1, width).transpose(1, 0, 2, 3)
        product = product_of(k.dtype)
        own_scores = product("kbgh,bkh->kbg", by_head, k[:, 0])[..., None] * width**-0.5
        mask = alive[:, None, None]
        parts = [
            (v[:, 0].transpose(1, 0, 2)[:, :, None].astype(jnp.float32), jnp.where(mask, own_scores, LOWEST), mask)
        ]
        for store, schedule, number in zip(stores, schedules, numbers, strict=True):
            queries = by_head.reshape(kv, _rows(store), -1, width)  # queries of rows that share, side by side
            part = "rows" if store is stores[-1] else "prompts"
            partials = _read(queries, store, number, schedule, mesh, name=f"{NAME}_{part}")
            value, stats = (x.reshape(kv, rows, -1, x.shape[-1]) for x in partials)
            parts.append((value, stats[..., :1], stats[..., 1:2]))
        peak = jnp.stack([top for _, top, _ in parts]).max(0)
        scaled_parts = [(value, jnp.exp(top - peak), total) for value, top, total in parts]
        total = sum(total * scale for _, scale, total in scaled_parts)
        out = sum(value * jnp.where(mask, scale, 0.0) for value, scale, _ in scaled_parts)
        out = out / jnp.where(total > 0, total, 1.0)
        return out.transpose(1, 0, 2, 3).reshape(q.shape).astype(k.dtype)

    return mix


def _rows(store: DecodeCache) -> int:
    """Count the rows of a cache's window."""
    return store.valid.shape[0] if store.window is None else store.window.blocks * store.window.rows


def _row_bytes(kv: int, width: int, dtype: DTypeLike) -> int:
    """Count the bytes of one row's block, keys, values and steps of int8, as VMEM holds them."""
    lanes, steps = -(-width // SLOTS) * SLOTS, 2 * 2 if jnp.dtype(dtype) == jnp.int8 else 0
    return kv * SLOTS * ((width + lanes) * jnp.dtype(dtype).itemsize + steps)


def tile_rows(rows: int, kv: int, width: int, dtype: DTypeLike) -> int:
    """Return the rows of a tile: the largest divisor of ``rows`` whose block has at most ``TILE_BYTES``."""
    limit = max(TILE_BYTES // _row_bytes(kv, width, dtype), 1)
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= limit)


def _parts(mesh: Mesh) -> int:
    """Count the parts into which a mesh divides rows."""
    return mesh.size // mesh.shape.get(HEADS, 1)


def _row_spec(mesh: Mesh) -> Any:
    return tuple(axis for axis in mesh.axis_names if axis != HEADS)


def _schedule(store: DecodeCache, alive: Bool[Array, "R"], mesh: Mesh) -> Schedule:
    rows, cache_rows, parts = _rows(store), store.valid.shape[0], _parts(mesh)
    even = store.window is None or rows == cache_rows or store.window.blocks % parts == 0
    if rows % parts or cache_rows % parts or not even:
        raise ValueError(
            f"decode: kernel runs on the rows of each of {parts} devices, got {rows} of {cache_rows} rows; use "
            "numbers that they divide, or plain"
        )
    kv, width = store.v.shape[1] // mesh.shape.get(HEADS, 1), store.v.shape[-1]
    tile = tile_rows(rows // parts, kv, width, store.v.dtype)
    make = partial(schedule, tile=tile, blocks=store.v.shape[3] // SLOTS)
    row = PartitionSpec(_row_spec(mesh))
    sharded_schedule = jax.shard_map(make, mesh=mesh, in_specs=(row, row), out_specs=row, check_vma=False)
    return sharded_schedule(written(store), alive)


def schedule(valid: Bool[Array, "R C"], alive: Bool[Array, "R"], *, tile: int, blocks: int) -> Schedule:
    """Plan the reads of one device's rows; ``valid`` marks one range per row, empty where there is none."""
    slots = jnp.arange(valid.shape[1], dtype=jnp.int32)
    valid = valid & alive[:, None]
    start = jnp.min(jnp.where(valid, slots, valid.shape[1]), axis=1)
    end = jnp.max(jnp.where(valid, slots + 1, 0), axis=1)
    low = jnp.where(end > 0, start // SLOTS, blocks).reshape(-1, tile).min(1)
    high = (-(-end // SLOTS)).reshape(-1, tile).max(1)
    count = jnp.maximum(high - low, 0)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    pairs = jnp.arange(count.shape[0] * blocks, dtype=jnp.int32)
    tiles = jnp.sum(pairs[:, None] >= first[1:], axis=1, dtype=jnp.int32).clip(0, count.shape[0] - 1)
    return Schedule(start, end, first, tiles, (pairs - first[tiles] + low[tiles]).clip(0, blocks - 1))


def _read(
    q: Float[Array, "kv R n h"], store: DecodeCache, number: Int[Array, ""], plan: Schedule, mesh: Mesh, *, name: str
) -> tuple[Float[Array, "kv R n h"], Float[Array, "kv R n 128"]]:
    """Return of the stored keys, per query, the weighted sum of values, and the maximum and the sum of weights."""
    row, window = _row_spec(mesh), store.window
    heads = HEADS if HEADS in mesh.axis_names else None
    cache, queries = PartitionSpec(None, heads, row), PartitionSpec(heads, row)
    rows, cache_rows, parts = _rows(store), store.valid.shape[0], _parts(mesh)
    arrays = [*each_array(store, lambda x, _: x).values()]
    blocks = 1 if window is None or rows == cache_rows else window.blocks // parts
    on_device = partial(
        device_kernel,
        name=name,
        span=rows // parts // blocks,
        stride=cache_rows // parts // blocks,
        interpret=mesh.devices.flat[0].platform != "tpu",
    )
    sharded_read = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(row), queries, *[cache] * len(arrays)),
        out_specs=queries,
        check_vma=False,
    )
    return sharded_read(jnp.reshape(number, (1,)).astype(jnp.int32), plan, q, *arrays)


def device_kernel(
    number: Int32[Array, "1"],
    plan: Schedule,
    q: Float[Array, "kv R n h"],
    k: Real[Array, "L kv B h C"],
    v: Real[Array, "L kv B C h"],
    *steps: Float[Array, "L kv B 2 C"],
    name: str,
    span: int,
    stride: int,
    interpret: bool,
) -> tuple[Float[Array, "kv R n h"], Float[Array, "kv R n 128"]]:
    """Read the cache for one device's rows: row r of the queries is row r // span * stride + r % span of the cache."""
    kv, rows, queries, width = q.shape
    arrays, blocks_of = (k, v, *steps), ((width, SLOTS), (SLOTS, width), (2, SLOTS))
    count = plan.first.shape[0] - 1
    tile = rows // count
    size = tile * _row_bytes(kv, width, k.dtype)
    depth = max(min(BUFFERS // size, DEPTH), 2)
    rows_at_once = max(n for n in range(1, tile + 1) if tile % n == 0 and (n == 1 or kv * n * -(-queries // 8) <= 16))
    cores = 2 if count % 2 == 0 else 1

    def kernel(number, start, end, first, tiles, blocks, q, *refs):
        n = len(arrays)
        cache_refs, (out, stats, totals), buffers, semaphores = refs[:n], refs[n : n + 3], refs[n + 3 : -1], refs[-1]
        core, step = pl.program_id(0), pl.program_id(1)
        per_core = count // cores
        at = core * per_core + step
        begin, stop = first[core * per_core], first[(core + 1) * per_core]

        def by_row(body: Callable[[Any, Any], Any]) -> None:
            jax.lax.fori_loop(0, tile, body, 0, unroll=not interpret)

        def copies(pair: Any, do: Callable[[Any], None]) -> None:
            """Start or await the copies of a pair's rows, of those that need its block."""
            slot, block = jax.lax.rem(pair, depth), blocks[pair]
            slots = pl.ds(pl.multiple_of(block * SLOTS, SLOTS), SLOTS)

            def of_row(j: Any, carry: Any) -> Any:
                row = tiles[pair] * tile + j
                cache_row = row if span == stride else jax.lax.div(row, span) * stride + jax.lax.rem(row, span)

                @pl.when((start[row] < (block + 1) * SLOTS) & (end[row] > block * SLOTS))
                def _():
                    for ref, buffer, axis in zip(cache_refs, buffers, SLOT_AXES.values()):
                        source = ref.at[(number[0], slice(None), cache_row, *[slice(None)] * (axis - 3), slots)]
                        do(pltpu.make_async_copy(source, buffer.at[slot, :, j], semaphores.at[slot]))

                return carry

            by_row(of_row)

        def prefetch(pair: Any) -> None:
            pl.when(pair < stop)(lambda: copies(pair, lambda copy: copy.start()))

        @pl.when(step == 0)
        def _():
            # What no copy fills has weight 0, and must be a number: of int8 it is, but its steps need not be.
            buffers[-1][...] = jnp.zeros_like(buffers[-1])
            for n in range(depth - 1):
                prefetch(begin + n)

        out[...], totals[...] = jnp.zeros_like(out), jnp.zeros_like(totals)
        stats[...] = jnp.full_like(stats, LOWEST)  # the maximum so far, in every lane
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, SLOTS), 3)

        def body(pair: Any, carry: Any) -> Any:
            prefetch(pair + depth - 1)
            copies(pair, lambda copy: copy.wait())
            slot, slots = jax.lax.rem(pair, depth), blocks[pair] * SLOTS + lane
            for low in range(0, tile, rows_at_once):
                part = pl.ds(low, rows_at_once)
                row_numbers = [at * tile + low + j for j in range(rows_at_once)]
                visible = jnp.concatenate([(slots >= start[row]) & (slots < end[row]) for row in row_numbers], axis=1)
                cache_block = [buffer[slot, :, part] for buffer in buffers]
                sums = _joined(q[:, part], out[:, part], stats[:, part], totals[:, part], visible, *cache_block)
                for ref, x in zip((out, stats, totals), sums):
                    ref[:, part] = x
            return carry

        jax.lax.fori_loop(first[at], first[at + 1], body, 0)
        total = totals[...].sum(-1, keepdims=True)
        stats[...] = jnp.where(lane == 0, stats[...], total)

    def by_tile(*last: int) -> pl.BlockSpec:
        return pl.BlockSpec((kv, tile, *last), lambda core, step, *_: (0, core * (count // cores) + step, 0, 0))

    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=6,
        grid=(cores, count // cores),
        in_specs=[by_tile(queries, width), *[any_memory] * len(arrays)],
        out_specs=[by_tile(queries, width), by_tile(queries, SLOTS)],
        scratch_shapes=[
            pltpu.VMEM((kv, tile, queries, SLOTS), jnp.float32),
            *(pltpu.VMEM((depth, kv, tile, *size), x.dtype) for x, size in zip(arrays, blocks_of)),
            pltpu.SemaphoreType.DMA((depth,)),
        ],
    )
    shapes = [jax.ShapeDtypeStruct((kv, rows, queries, n), jnp.float32) for n in (width, SLOTS)]
    call = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=grid,
        name=name,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
    )
    value, stats = call(number, plan.start, plan.end, plan.first, plan.tiles, plan.blocks, q, *arrays)
    return value, stats


def _joined(
    q: Float[Array, "kv r n h"],
    value: Float[Array, "kv r n h"],
    top: Float[Array, "kv r n 128"],
    total: Float[Array, "kv r n 128"],
    visible: Bool[Array, "#kv r #n 128"],
    k: Real[Array, "kv r h 128"],
    v: Real[Array, "kv r 128 h"],
    *steps: Float[Array, "kv r 2 128"],
) -> tuple[Float[Array, "kv r n h"], Float[Array, "kv r n 128"], Float[Array, "kv r n 128"]]:
    """Add a block of some rows to their running softmax: weighted values, maximum in every lane, sums by lane."""
    width = q.shape[-1]

    def product(a: Array, b: Array) -> Array:
        x, y = (z.reshape(-1, *z.shape[2:]) for z in (a, b))
        return product_of(a.dtype)("bnh,bhs->bns", x, y).reshape(*a.shape[:3], b.shape[-1])

    def in_steps(x: Array, of: int) -> Array:
        return x * steps[0][:, :, of : of + 1].astype(x.dtype) if steps else x

    scores = jnp.where(visible, in_steps(product(q, k.astype(q.dtype)) * width**-0.5, 0), LOWEST)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - new_top), 0.0)
    scale = jnp.exp(top - new_top)
    wide_scale = scale[..., :width] if width <= SLOTS else jnp.concatenate([scale] * (width // SLOTS), axis=-1)
    block_value = product(in_steps(weights, 1).astype(q.dtype), v.astype(q.dtype))
    return value * wide_scale + block_value, new_top, total * scale + weights
