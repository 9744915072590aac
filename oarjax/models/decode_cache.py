"""Hold the keys and values of rows that are being decoded, in the order in which a decode step reads them.

A rollout has one such cache, of its most rows and slots. A decode program reads and writes the first rows of every
block and the first slots, its window; between programs rows move within the cache. So nothing of its size is copied:
a step's scores are [kv, rows, queries, C], one product per key head and row, and compilers want keys as [kv B h C] and
values as [kv B C h] for them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oarjax.types import DecodeCache, HybridCache, KVCache, Window

Cache = KVCache | DecodeCache


def heads_first(cache: KVCache) -> DecodeCache:
    """Return the same keys and values in the order of a decode step."""
    state = cache.state if isinstance(cache, HybridCache) else None
    k, v = cache.k.transpose(0, 3, 1, 4, 2), cache.v.transpose(0, 3, 1, 2, 4)
    return DecodeCache(k, v, cache.valid, cache.length, state)


def opened(cache: DecodeCache, window: Window) -> DecodeCache:
    """Return a cache whose rows and slots are those of a window; no key or value is copied."""
    state = jax.tree.map(partial(_first_rows, axis=1, window=window), cache.state)
    return replace(cache, state=state, window=window)


def closed(cache: DecodeCache, part: DecodeCache) -> DecodeCache:
    """Return the whole cache after its window's rows were decoded: the inverse of ``opened``."""
    assert part.window is not None
    write = partial(_with_first_rows, axis=1, window=part.window)
    return replace(part, state=jax.tree.map(write, cache.state, part.state), window=None)


def layer(cache: DecodeCache, number: Int[Array, ""]) -> tuple[Float[Array, "kv b h c"], Float[Array, "kv b c h"]]:
    """Read one layer's keys and values of the window's rows and slots."""
    window = cache.window

    def read(x: Array, axis: int) -> Array:
        if window is None:
            return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
        split = _blocks(x, 2, window)
        sizes = [1, *split.shape[1:]]
        sizes[3], sizes[axis + 1] = window.rows, window.slots
        zero = jnp.zeros_like(number)
        part = jax.lax.dynamic_slice(split, (number, *[zero] * (split.ndim - 1)), sizes)
        return part.reshape(part.shape[1], -1, *part.shape[4:])

    return read(cache.k, 4), read(cache.v, 3)


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

    def write(x: Array, new: Array, rows: int, slots: int) -> Array:
        split, at = _blocks(x, rows, window), [jnp.zeros_like(cache.length)] * (x.ndim + 1)
        at[slots + 1] = cache.length
        return jax.lax.dynamic_update_slice(split, _blocks(new, rows, window), at).reshape(x.shape)

    return replace(
        cache,
        k=write(cache.k, k, 2, 4),
        v=write(cache.v, v, 2, 3),
        valid=write(cache.valid, valid, 0, 1),
        length=cache.length + valid.shape[1],
    )


def take_rows(cache: DecodeCache, rows: Int[Array, "*D r"]) -> DecodeCache:
    """Return some rows of a cache as another one, as ``policy.take_rows`` does."""
    return replace(
        cache,
        k=taken(cache.k, rows, axis=2),
        v=taken(cache.v, rows, axis=2),
        valid=taken(cache.valid, rows, axis=0) & (rows.reshape(-1) >= 0)[:, None],
        state=jax.tree.map(lambda x: taken(x, rows, axis=1), cache.state),
    )


def move(cache: DecodeCache, rows: Int[Array, "D R"], drop: Int[Array, ""] | None) -> DecodeCache:
    """Move rows within a cache, as ``policy.move_rows`` does."""
    return replace(
        cache,
        k=moved(cache.k, rows, drop, axis=2, slots=4),
        v=moved(cache.v, rows, drop, axis=2, slots=3),
        state=jax.tree.map(lambda x: moved(x, rows, None, axis=1), cache.state),
        **moved_marks(cache, rows, drop),
    )


# Arrays --------------------------------------------------------------------------------------------------------------


def taken(x: Array, rows: Int[Array, "*D r"], *, axis: int) -> Array:
    """Take rows of one array: with ``rows`` [D, r] block d of the result from block d, by the number within it."""
    if rows.ndim == 1 or rows.shape[0] == 1:
        return jnp.take(x, rows.reshape(-1), axis=axis, mode="clip")
    split = x.reshape(*x.shape[:axis], rows.shape[0], -1, *x.shape[axis + 1 :])
    out = jax.vmap(partial(jnp.take, axis=axis, mode="clip"), in_axes=(axis, 0), out_axes=axis)(split, rows)
    return out.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def moved(
    x: Array, rows: Int[Array, "D R"], drop: Int[Array, ""] | None, *, axis: int, slots: int | None = None
) -> Array:
    """Take all rows of an array [L, ...] anew and move slots forward by ``drop``, layer by layer in the same memory."""

    def one(number: Array, x: Array) -> Array:
        new = taken(jax.lax.dynamic_index_in_dim(x, number, keepdims=False), rows, axis=axis - 1)
        if slots is not None and drop is not None:
            new = jnp.roll(new, -drop, axis=slots - 1)
        return jax.lax.dynamic_update_index_in_dim(x, new, number, axis=0)

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


def _with_first_rows(x: Array, new: Array, *, axis: int, window: Window) -> Array:
    """Write the window's rows of an array."""
    split = jax.lax.dynamic_update_slice_in_dim(_blocks(x, axis, window), _blocks(new, axis, window), 0, axis + 1)
    return split.reshape(x.shape)
