"""Stage of the attention kernels: compare splash, and the decode kernel, with plain attention in float32."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from oarjax.kernels.attention import BlockedKind, Segment, attend, segment_mixer
from oarjax.kernels.decode_attention import kernel_mixer
from oarjax.kernels.decode_cache import layer as layer_of
from oarjax.kernels.decode_cache import rounded, written
from oarjax.kernels.precision import full_precision
from oarjax.kernels.splash import splash
from oarjax.models import delta_kernel
from oarjax.models.delta_net import recurrent
from oarjax.tools.accept.check import Check, at_most, measured, not_applicable
from oarjax.tools.accept.setting import StageSetting, best_seconds
from oarjax.types import DecodeCache

ERRORS = {"forward": 0.01, "backward": 0.02, "linearised": 0.02}
"""Bounds on errors of bfloat16 kernels, as shares of the largest number; docs/numerics.md has the interpreter's."""
STATES = 1e-5
"""Bound on the error of states and results in float32."""
CASES = (*itertools.product((64, 128), (576, 640, 1344, 1536), (128, 512)),)
CASES += ((128, 1536, 256), (128, 1536, 384), (128, 1280, 640), (256, 1344, 256), (256, 1536, 512))
"""Widths of a head, tokens, and sizes of blocks; the last ones are what the shipped configs use."""
SMALL = ((64, 130, 128), (128, 130, 128))
ON_GPUS: tuple[tuple[BlockedKind, int, int], ...] = (*itertools.product(("blocked", "cudnn"), (64, 128), (576, 1344)),)
"""Kernels of attention on GPUs, widths of a head, tokens."""


def attention(s: StageSetting) -> list[Check]:
    """Compare the kernels with plain attention, and their times; a CPU interprets them at small sizes."""
    checks = []
    if s.platform == "gpu":  # the other kernels are for TPUs
        for kind, width, length in ON_GPUS:
            checks += _compare(s, width, length, None, kind)
        return checks
    for width, length, block in SMALL if s.small else CASES:
        checks += _compare(s, width, length, block)
    for width, int8 in itertools.product((64,) if s.small else (64, 128, 256), (False, True)):
        checks += _decode(s, width, int8=int8)
    return [*checks, _states(s)]


def _states(s: StageSetting) -> Check:
    """Compare the kernel of a delta net's step with its definition, in float32."""
    mesh = Mesh(np.asarray(jax.local_devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    rows, heads = (2, 8) if s.small else (16, 32)
    keys = jax.random.split(jax.random.key(3), 6)
    q, k, v = (jax.random.normal(key, (rows, 1, heads, 128)) / 128**0.5 for key in keys[:3])
    decay, rate = (jax.random.uniform(key, (rows, 1, heads)) for key in keys[3:5])
    states = jax.random.normal(keys[5], (2, rows, heads, 128, 128))
    inputs, number = (q, k, v, -decay, rate), jnp.ones((), jnp.int32)
    out, new_states = jax.jit(partial(delta_kernel.step, mesh=mesh))(*inputs, states, number=number)
    want = jax.jit(recurrent)(*inputs, states[1])
    error = _error((out, new_states[1], new_states[0]), (*want, states[0]))
    return at_most("a step of delta nets", error, STATES, note="largest error, of the largest number")


def _compare(s: StageSetting, width: int, length: int, block: int | None, kind: BlockedKind = "splash") -> list[Check]:
    name = f"{kind}, head width {width}, {length} tokens" + (f", blocks of {block}" if block else "")
    devices = np.asarray(jax.local_devices()[:1])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    rows, heads, kv = (1, 2, 1) if s.small else (4, 8, 2)
    keys = jax.random.split(jax.random.key(width + length), 7)
    shapes = [(rows, length, n, width) for n in (heads, kv, kv)]
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]
    tangents = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys[3:], shapes)]
    cotangent = jax.random.normal(keys[6], shapes[0], jnp.bfloat16)
    valid = jnp.arange(length)[None] >= 7 * (1 + jnp.arange(rows)[:, None])

    def kernel(q: Any, k: Any, v: Any) -> Any:
        out = splash(q, k, v, valid, mesh=mesh, blocks=(block, block) if block else None, kernel=kind)
        return jnp.where(valid[:, :, None, None], out, 0)  # padding sees no key, and gives anything

    def plain(q: Any, k: Any, v: Any) -> Any:
        mask = valid[:, None, :] & jnp.tril(jnp.ones((length, length), bool))
        return attend(q, (Segment.of(k, v, mask),))

    results = _three(kernel, inputs, tangents, cotangent)
    wide = partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    with full_precision(jnp.float32):
        reference = _three(plain, wide(inputs), wide(tangents), wide(cotangent))
    checks = [
        at_most(
            f"{name}: {part}",
            _error(results[part], reference[part]),
            bound,
            note="largest error, of the largest number",
        )
        for part, bound in ERRORS.items()
    ]
    if s.small:
        return [*checks, not_applicable(f"{name}: time", "the kernels are interpreted here")]
    seconds = {
        side: best_seconds(partial(_gradient(function), inputs, cotangent), repeats=5)
        for side, function in (("kernel", kernel), ("plain", plain))
    }
    computed = 7 * rows * heads * length**2 * width  # 2 products forward, 5 backward, over the half that is seen
    return [
        *checks,
        measured(f"{name}: forward and backward", computed / seconds["kernel"] / 1e12, unit="TFLOP/s"),
        measured(f"{name}: time of plain attention over it", seconds["plain"] / seconds["kernel"]),
    ]


def _decode(s: StageSetting, width: int, *, int8: bool) -> list[Check]:
    """Compare the decode kernel with plain attention, of rows that have written up to half of their slots."""
    rows, kv, slots = (2, 1, 256) if s.small else (64, 4, 8192)
    name = f"decode{' of int8' if int8 else ''}, head width {width}, {slots // 2} of {slots} slots"
    mesh = Mesh(np.asarray(jax.local_devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    shapes = (
        (1, kv, rows, width, slots),
        (1, kv, rows, slots, width),
        *((rows, 1, n, width) for n in (4 * kv, kv, kv)),
    )
    k, v, *new = (
        jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(jax.random.split(jax.random.key(1), 5), shapes)
    )
    valid = jnp.arange(slots)[None] >= 7 * jnp.arange(rows)[:, None]
    arrays: dict[str, Any] = rounded(k, v) if int8 else {"k": k, "v": v}
    store = DecodeCache(**arrays, valid=valid, length=jnp.int32(slots // 2))
    alive, layer = jnp.ones((rows, 1), bool), jnp.int32(0)
    sides = {
        "kernel": lambda store, *new: kernel_mixer([store], alive, mesh)([layer], *new),
        "plain": lambda store, *new: segment_mixer([written(store)[:, None]], alive)([layer_of(store, layer)], *new),
    }
    sides = {side: jax.jit(function) for side, function in sides.items()}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (store, *new))
    with full_precision(jnp.float32):
        error = _error([sides["kernel"](store, *new)], [sides["plain"](*wide)])
    checks = [at_most(f"{name}: forward", error, ERRORS["forward"], note="largest error, of the largest number")]
    if s.small:
        return [*checks, not_applicable(f"{name}: time", "the kernel is interpreted here")]
    seconds = {side: best_seconds(partial(function, store, *new), repeats=20) for side, function in sides.items()}
    bytes_read = sum(x.nbytes for x in arrays.values()) / 2
    return [
        *checks,
        measured(f"{name}: read", bytes_read / seconds["kernel"] / 1e9, unit="GB/s"),
        measured(f"{name}: time of plain attention over the kernel", seconds["plain"] / seconds["kernel"]),
    ]


def _three(function: Any, inputs: Any, tangents: Any, cotangent: Any) -> dict[str, Any]:
    @jax.jit
    def all_three(inputs: Any, tangents: Any, cotangent: Any) -> dict[str, Any]:
        out, pull = jax.vjp(function, *inputs)
        push = jax.jvp(function, tuple(inputs), tuple(tangents))[1]
        return {"forward": [out], "backward": pull(cotangent), "linearised": [push]}

    return all_three(inputs, tangents, cotangent)


def _gradient(function: Any) -> Any:
    return jax.jit(lambda inputs, cotangent: jax.vjp(function, *inputs)[1](cotangent))


def _error(values: Any, reference: Any) -> float:
    pairs = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in zip(values, reference)]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)
