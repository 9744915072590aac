"""Hold the keys and values of rows that are being decoded, in the order in which a decode step reads them.

A rollout has one such cache, of its most rows and slots. A decode program reads and writes the first rows of every
block and the first slots, its window; between programs rows move within the cache. So nothing of its size is copied:
a step's scores are [kv, rows, queries, C], one product per key head and row, and compilers want keys as [kv B h C] and
values as [kv B C h] for them.

Keys and values may be int8, with a step per layer, key head, row and slot: see ``rounded``. They are never multiplied
out: a step scales the scores by the keys' steps, and the weights by the values'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.types import DecodeCache, DeltaState, HybridCache, KVCache, Window

Cache = KVCache | DecodeCache
SLOT_AXES = {"k": 4, "v": 3, "steps": 4}
"""Axis of the slots in the arrays of a ``DecodeCache``; their rows are axis 2."""


def each_array(cache: DecodeCache, change: Callable[[Array, int], Array]) -> dict[str, Array]:
    """Apply ``change`` to keys, values and steps, each with its axis of slots."""
    arrays = {name: (getattr(cache, name), axis) for name, axis in SLOT_AXES.items()}
    return {name: change(x, axis) for name, (x, axis) in arrays.items() if x is not None}


def rounded(k: Float[Array, "L kv b h N"], v: Float[Array, "L kv b N h"]) -> dict[str, Any]:
    """Round keys and values to int8: ``k``, ``v`` and ``steps`` of a ``DecodeCache``.

    A step is the largest of the h numbers of a head / 127, in bfloat16. It is rounded before it divides them, so that
    a number is off by half of it at most: by 1 / 253 of the largest.
    """

    def one(x: Array, axis: int) -> tuple[Array, Array]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # Compilers may leave out casts to bfloat16 and back, but not this.
        step = jax.lax.reduce_precision(jnp.max(jnp.abs(wide), axis, keepdims=True) / 127, 8, 7)
        return jnp.round(wide / jnp.where(step == 0, 1, step)).astype(jnp.int8), step.astype(jnp.bfloat16)

    (k, k_steps), (v, v_steps) = one(k, 3), one(v, 4)
    return {"k": k, "v": v, "steps": jnp.concatenate([k_steps, v_steps.swapaxes(3, 4)], axis=3)}


def heads_first(cache: KVCache, *, int8: bool = False) -> DecodeCache:
    """Return the same keys and values, or int8, in the order of a decode step."""
    state = cache.state if isinstance(cache, HybridCache) else None
    k, v = cache.k.transpose(0, 3, 1, 4, 2), cache.v.transpose(0, 3, 1, 2, 4)
    arrays: dict[str, Any] = rounded(k, v) if int8 else {"k": k, "v": v}
    return DecodeCache(**arrays, valid=cache.valid, length=cache.length, state=state)


def opened(cache: DecodeCache, window: Window) -> DecodeCache:
    """Return a cache whose rows and slots are those of a window; no key or value is copied."""
    state = jax.tree.map(partial(_first_rows, axis=1, window=window), cache.state)
    return replace(cache, state=state, window=window)


def begun(cache: DecodeCache, prefix: DecodeCache | None) -> DecodeCache:
    """Return a cache in which rows without a token have the state of their prefix, so that no step looks for it."""
    if cache.state is None or cache.begun:
        return cache
    prefix_state = None if prefix is None else prefix.state
    state = state_before(
        cache.state, written(cache).any(1), prefix_state, jax.tree.map(jnp.zeros_like, cache.state), axis=1
    )
    return replace(cache, state=state, begun=True)


def state_before(
    stored: DeltaState | None,
    begun: Bool[Array, "B"] | None,
    prefix: DeltaState | None,
    empty: DeltaState,
    *,
    axis: int = 0,
) -> DeltaState:
    """Return the state before the new tokens: a row's own where it has begun, else that of its prefix.

    Row b continues prefix row b // G, or starts from ``empty`` where there is no prefix. ``axis`` is that of rows: 0 in
    one layer's state, 1 in all layers'.
    """
    rows = empty.tail.shape[axis]
    start = empty
    if prefix is not None:
        start = jax.tree.map(lambda x: jnp.repeat(x, rows // x.shape[axis], axis=axis), prefix)
    if stored is None or begun is None:
        return start
    return jax.tree.map(lambda x, y: jnp.where(begun.reshape(-1, *[1] * (x.ndim - axis - 1)), x, y), stored, start)


def closed(cache: DecodeCache, part: DecodeCache) -> DecodeCache:
    """Return the whole cache after its window's rows were decoded: the inverse of ``opened``."""
    assert part.window is not None
    write = partial(_with_first_rows, axis=1, window=part.window)
    return replace(part, state=jax.tree.map(write, cache.state, part.state), window=None, begun=False)


def layer(cache: DecodeCache, number: Int[Array, ""]) -> tuple[Array, ...]:
    """Read one layer's keys [kv b h c], values [kv b c h] and steps [kv b 2 c], if any, of the window's slots."""
    window = cache.window

    def read(x: Array, axis: int) -> Array:
        if window is None:
            return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
        blocks = _blocks(x, 2, window)
        sizes = [1, *blocks.shape[1:]]
        sizes[3], sizes[axis + 1] = window.rows, window.slots
        zero = jnp.zeros_like(number)
        part = jax.lax.dynamic_slice(blocks, (number, *[zero] * (blocks.ndim - 1)), sizes)
        return part.reshape(part.shape[1], -1, *part.shape[4:])

    return tuple(each_array(cache, read).values())


def written(cache: KVCache | DecodeCache) -> Bool[Array, "b c"]:
    """Mark the slots that hold a real token, of the window's rows where there is one."""
    valid, window = cache.valid, getattr(cache, "window", None)
    if window is not None:
        valid = _first_rows(valid[:, : window.slots], axis=0, window=window)
    return valid & (jnp.arange(valid.shape[1]) < cache.length)


def append(
    cache: DecodeCache, k: Float[Array, "L kv b h N"], v: Float[Array, "L kv b N h"], valid: Bool[Array, "b N"]
) -> DecodeCache:
    """Write all layers' new keys and values behind those that are there, touching no other slot."""
    window = cache.window or Window(1, valid.shape[0], cache.valid.shape[1])
    arrays = {"k": k, "v": v} if cache.steps is None else rounded(k, v)

    def write(x: Array, update: Array, rows: int, slots: int) -> Array:
        blocks, at = _blocks(x, rows, window), [jnp.zeros_like(cache.length)] * (x.ndim + 1)
        at[slots + 1] = cache.length
        return jax.lax.dynamic_update_slice(blocks, _blocks(update, rows, window), at).reshape(x.shape)

    return replace(
        cache,
        **{name: write(getattr(cache, name), x, 2, SLOT_AXES[name]) for name, x in arrays.items()},
        valid=write(cache.valid, valid, 0, 1),
        length=cache.length + valid.shape[1],
    )


def take_rows(cache: DecodeCache, rows: Int[Array, "*D r"]) -> DecodeCache:
    """Return some rows of a cache as another one, as ``policy.take_rows`` does."""
    return replace(
        cache,
        **each_array(cache, lambda x, _: taken(x, rows, axis=2)),
        valid=taken(cache.valid, rows, axis=0) & (rows.reshape(-1) >= 0)[:, None],
        state=jax.tree.map(lambda x: taken(x, rows, axis=1), cache.state),
    )


def move(cache: DecodeCache, rows: Int[Array, "D R"], drop: Int[Array, ""] | None) -> DecodeCache:
    """Move rows within a cache, as ``policy.move_rows`` does."""
    return replace(
        cache,
        **each_array(cache, lambda x, slots: moved(x, rows, drop, axis=2, slots=slots)),
        state=jax.tree.map(lambda x: moved(x, rows, None, axis=1), cache.state),
        **moved_marks(cache, rows, drop),
    )


# Arrays --------------------------------------------------------------------------------------------------------------


def taken(x: Array, rows: Int[Array, "*D r"], *, axis: int) -> Array:
    """Take rows of one array: with ``rows`` [D, r] block d of the result from block d, by the number within it."""
    if rows.ndim == 1 or rows.shape[0] == 1:
        return jnp.take(x, rows.reshape(-1), axis=axis, mode="clip")
    blocks = x.reshape(*x.shape[:axis], rows.shape[0], -1, *x.shape[axis + 1 :])
    out = jax.vmap(partial(jnp.take, axis=axis, mode="clip"), in_axes=(axis, 0), out_axes=axis)(blocks, rows)
    return out.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def moved(
    x: Array, rows: Int[Array, "D R"], drop: Int[Array, ""] | None, *, axis: int, slots: int | None = None
) -> Array:
    """Take all rows of an array [L, ...] anew and move slots forward by ``drop``, layer by layer in the same memory."""

    def one(number: Array, x: Array) -> Array:
        layer_rows = taken(jax.lax.dynamic_index_in_dim(x, number, keepdims=False), rows, axis=axis - 1)
        if slots is not None and drop is not None:
            layer_rows = jnp.roll(layer_rows, -drop, axis=slots - 1)
        return jax.lax.dynamic_update_index_in_dim(x, layer_rows, number, axis=0)

    return jax.lax.fori_loop(0, x.shape[0], one, x)


def moved_marks(cache: Any, rows: Int[Array, "D R"], drop: Int[Array, ""] | None) -> dict[str, Array]:
    """Return ``valid`` and ``length`` of a cache after its rows moved; slots behind the length hold old tokens."""
    valid = taken(cache.valid, rows, axis=0) & (rows.reshape(-1) >= 0)[:, None]
    if drop is None:
        return {"valid": valid, "length": cache.length}
    return {"valid": jnp.roll(valid, -drop, axis=1), "length": cache.length - drop}


def _blocks(x: Array, axis: int, window: Window) -> Array:
    """Split the axis of rows into blocks and the rows of each."""
    return x.reshape(*x.shape[:axis], window.blocks, -1, *x.shape[axis + 1 :])


def _first_rows(x: Array, *, axis: int, window: Window) -> Array:
    """Return the window's rows of an array."""
    part = jax.lax.slice_in_dim(_blocks(x, axis, window), 0, window.rows, axis=axis + 1)
    return part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _with_first_rows(x: Array, update: Array, *, axis: int, window: Window) -> Array:
    """Write the window's rows of an array."""
    blocks = jax.lax.dynamic_update_slice_in_dim(_blocks(x, axis, window), _blocks(update, axis, window), 0, axis + 1)
    return blocks.reshape(x.shape)
