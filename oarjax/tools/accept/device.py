"""Stages of the machine itself: list its parts, and compare its speed with its data sheet."""

from __future__ import annotations

import os
import platform
import shutil
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from oarjax.system.devices import memory_limit
from oarjax.tools.accept.check import Check, at_least, at_most, holds, measured, not_applicable
from oarjax.tools.accept.setting import Setting, best_seconds, mesh

PACKAGES = ("oarjax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "orbax-checkpoint")
PRODUCTS, COPIES, LINKS = 0.85, 0.8, 0.8
"""Expected shares of the peak, of bfloat16 products, copies within memory, and all-reduces."""
NO_PEAK = "no published peak for this device"


def facts(s: Setting) -> list[Check]:
    """List versions and devices, and check the disk space for a small run."""
    devices = jax.devices()
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    free = min(shutil.disk_usage(place).free for place in (s.folder, Path.home())) / 2**30
    checks = [measured(name, number) for name, number in versions.items() if number is not None]
    limit = memory_limit(jax.local_devices()[0])
    checks += [
        measured("device kind", devices[0].device_kind),
        measured("devices", len(devices)),
        measured("processes", jax.process_count()),
        measured("host cores", os.cpu_count()),
        measured("memory per device", None if limit is None else limit / 2**30, unit="GiB"),
        holds("one kind of device", len({d.device_kind for d in devices}) == 1),
        at_least("free disk", free, 1.0 if s.small else 20.0, unit="GiB"),
    ]
    return checks


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def peaks(s: Setting) -> list[Check]:
    """Measure bfloat16 products, copies and all-reduces against the device's peaks, and check their results."""
    return [*_products(s), *_copies(s), *_all_reduces(s, mesh())]


def _products(s: Setting) -> list[Check]:
    size, times = (256, 2) if s.small else (8192, 16)
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
    rows = np.asarray(x[:4], np.float64) @ np.asarray(x, np.float64)
    error = float(np.abs(np.asarray(multiplied(x[:4], x), np.float64) - rows).max() / np.abs(rows).max())

    @jax.jit
    def many(x: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, y: multiplied(y, x), x)

    rate = 2 * size**3 * times / best_seconds(lambda: many(x), repeats=5)
    return [
        at_most("error of bfloat16 products", error, 0.02, note="as a share of the largest"),
        _of_peak("bfloat16 products", rate / 1e12, s.peaks.flops, 1e12, PRODUCTS, "TFLOP/s"),
    ]


def multiplied(x: Any, y: Any) -> Any:
    """Multiply matrices as the stage does."""
    return x @ y


def _copies(s: Setting) -> list[Check]:
    size, times = (2**21, 2) if s.small else (2**29, 8)
    x = jnp.zeros((size // 4,), jnp.float32)

    @jax.jit
    def many(x: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, y: y + 1, x)

    right = bool((np.asarray(many(x)[:: max(size // 4096, 1)]) == times).all())
    rate = 2 * size * times / best_seconds(lambda: many(x), repeats=5)
    return [
        holds("copies are exact", right),
        _of_peak("copies in memory", rate / 1e9, s.peaks.bandwidth, 1e9, COPIES, "GB/s"),
    ]


def _all_reduces(s: Setting, devices: Mesh) -> list[Check]:
    checks = []
    for axis, count in devices.shape.items():
        if count > 1:
            checks += _all_reduce(s, devices, str(axis), count)
    return checks or [not_applicable("all-reduce", "a single device")]


def _all_reduce(s: Setting, devices: Mesh, axis: str, count: int) -> list[Check]:
    """Sum 64 MiB (1 MiB on a CPU) over the axis, filled with each device's own number."""
    size = 2**18 if s.small else 2**24
    where = NamedSharding(devices, PartitionSpec(axis))

    def shard(index: Any) -> np.ndarray:
        return np.full(size, (index[0].start or 0) // size, np.float32)

    x = jax.make_array_from_callback((count * size,), where, shard)
    add = partial(jax.shard_map, mesh=devices, in_specs=PartitionSpec(axis), out_specs=PartitionSpec(axis))
    summed = jax.jit(add(lambda own: added(own, axis)))
    parts = [np.asarray(shard.data) for shard in summed(x).addressable_shards]
    right = all(bool((part == count * (count - 1) / 2).all()) for part in parts)
    rate = 2 * (count - 1) / count * 4 * size / best_seconds(lambda: summed(x), repeats=5)
    link = None if s.peaks.link is None else 2 * s.peaks.link  # both directions of a ring
    return [
        holds(f"all-reduce over {axis} adds up", right),
        _of_peak(f"all-reduce over {axis}", rate / 1e9, link, 1e9, LINKS, "GB/s"),
    ]


def added(part: Any, axis: str) -> Any:
    """Sum over a mesh axis as the stage does."""
    return jax.lax.psum(part, axis)


def _of_peak(name: str, rate: float, peak: float | None, unit: float, share: float, word: str) -> Check:
    if peak is None:
        return not_applicable(name, NO_PEAK, value=rate, unit=word)
    note = f"peak {peak / unit:g} {word}"
    return at_least(f"{name}, of peak", rate * unit / peak, share, note=f"{rate:.4g} {word}; {note}")
