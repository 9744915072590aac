"""Stages of the machine itself: list its parts, and compare its speed with its data sheet."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import statistics
import time
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from oarjax.system.devices import TPU_KINDS, memory_limit
from oarjax.system.processes import wait_for_all
from oarjax.tools.accept.check import Check, at_least, at_most, fast, holds, measured, not_applicable, quick
from oarjax.tools.accept.setting import RATES, StageSetting, best_seconds, mesh
from oarjax.tools.plan.links import Ways, closed_sides, groups_of, ways_of
from oarjax.tools.plan.topology import DEVICES, SHAPES, Slice

PACKAGES = ("oarjax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "orbax-checkpoint")
PRODUCTS, COPIES, LINKS = {"tpu": 0.85, "gpu": 0.75}, 0.8, 0.8
"""Expected shares: of the data sheet's products and memory, and of the links that an axis of the mesh has.

By the compiler's cycles TPUs reach 92 to 98% of the products; an H100, whose power is limited, was measured at 78%.
"""
UNEVEN = 1.1
"""Expected time of the slowest device, of the median's."""
SIDES = {family: shapes[0].count("x") + 1 for family, shapes in SHAPES.items()}
"""Sides of a slice: v5e and v6e are flat."""
BARRIERS = 20
NO_PEAK = "no published peak for this device"


def facts(s: StageSetting) -> list[Check]:
    """List the machine, versions and devices, and check the disk space for a small run."""
    devices = jax.devices()
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    free = min(shutil.disk_usage(folder).free for folder in (s.folder, Path.home())) / 2**30
    checks = [measured(name, number) for name, number in versions.items() if number is not None]
    limit = memory_limit(jax.local_devices()[0])
    checks += [
        measured("machine", platform.node()),
        measured("time", datetime.now(UTC).isoformat(timespec="seconds")),
        measured("device kind", devices[0].device_kind),
        measured("devices of this host", "; ".join(map(place_of, jax.local_devices()))),
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


def peaks(s: StageSetting) -> list[Check]:
    """Measure products, copies and all-reduces against what this chip and its links can reach, and check their results.

    Writes the rates of products and copies for the stage that compares whole phases with them.
    """
    products, flops = _products(s)
    copies, bandwidth = _copies(s)
    (s.folder / RATES).write_text(json.dumps({"products": flops, "copies": bandwidth}))
    firsts = [next(d for d in jax.devices() if d.process_index == host) for host in range(jax.process_count())]
    return [*products, *copies, *_each_device(s), *_all_reduces(s, mesh()), *between_hosts(s, firsts)]


def _products(s: StageSetting) -> tuple[list[Check], float]:
    error, rate = 0.0, 0.0
    for size, times in ((256, 2),) if s.small else ((4096, 64), (8192, 16)):  # chips differ in which is faster
        x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5
        rows = np.asarray(x[:4], np.float64) @ np.asarray(x, np.float64)
        off = np.abs(np.asarray(multiplied(x[:4], x), np.float64) - rows).max() / np.abs(rows).max()
        seconds = best_seconds(partial(many_products, x, times), repeats=5)
        error, rate = max(error, float(off)), max(rate, 2 * size**3 * times / seconds)
    checks = [
        at_most("error of bfloat16 products", error, 0.02, note="as a share of the largest"),
        _of_peak("bfloat16 products", rate / 1e12, s.peaks.flops, 1e12, PRODUCTS.get(s.platform, 0.85), "TFLOP/s"),
    ]
    return checks, rate


@partial(jax.jit, static_argnums=1)
def many_products(x: Any, times: int) -> Any:
    """Multiply by the matrix x an even number of times, two a turn: each product has a buffer that is free."""
    return jax.lax.fori_loop(0, times // 2, lambda _, y: multiplied(multiplied(y, x), x), x)


def multiplied(x: Any, y: Any) -> Any:
    """Multiply matrices as the stage does."""
    return x @ y


def _copies(s: StageSetting) -> tuple[list[Check], float]:
    size, times = (2**21, 2) if s.small else (2**29, 8)
    buffer = [jnp.zeros((size // 4,), jnp.float32)]

    def many() -> Any:
        buffer[0] = many_copies(buffer[0], times)
        return buffer[0]

    exact = bool((np.asarray(many()[:: max(size // 4096, 1)]) == times).all())
    rate = 2 * size * times / best_seconds(many, repeats=5)
    checks = [
        holds("copies are exact", exact),
        _of_peak("copies in memory", rate / 1e9, s.peaks.bandwidth, 1e9, COPIES, "GB/s"),
    ]
    return checks, rate


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def many_copies(x: Any, times: int) -> Any:
    """Add 1 as often, in place: each turn reads and writes the whole array."""
    return jax.lax.fori_loop(0, times, lambda _, y: y + 1, x)


def _each_device(s: StageSetting) -> list[Check]:
    """Run the same products on every device of this host: their bits are equal, and no device is much slower."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return [not_applicable("equal results on every device", "a single device")]
    results = {place_of(device): on_device(s, device) for device in devices}
    common = Counter(digest for digest, _ in results.values()).most_common(1)[0][0]
    unequal = [name for name, (digest, _) in results.items() if digest != common]
    slowest = max(results, key=lambda name: results[name][1])
    ratio = results[slowest][1] / statistics.median(seconds for _, seconds in results.values())
    title = "slowest device over the median"
    return [
        holds("equal results on every device", not unequal, note=f"others on {'; '.join(unequal)}" if unequal else ""),
        not_applicable(title, f"{NO_PEAK}; {slowest}", value=ratio)
        if s.peaks.flops is None
        else quick(title, ratio, UNEVEN, note=slowest),
    ]


def on_device(s: StageSetting, device: Any) -> tuple[str, float]:
    """Run products on one device; return a digest of their bits, and the shortest time."""
    size, times = (256, 2) if s.small else (4096, 32)
    values = np.random.default_rng(0).standard_normal((size, size), np.float32) / size**0.5
    x = jax.device_put(jnp.asarray(values, jnp.bfloat16), device)
    digest = hashlib.sha256(np.asarray(many_products(x, times), np.float32).tobytes()).hexdigest()
    return digest, best_seconds(lambda: many_products(x, times), repeats=3)


def place_of(device: Any) -> str:
    """Name a device by its number and, on a TPU, its coordinates in the slice."""
    coords = getattr(device, "coords", None)
    return f"device {device.id}" + ("" if coords is None else f" at {','.join(map(str, coords))}")


def _all_reduces(s: StageSetting, devices: Mesh) -> list[Check]:
    checks = []
    for axis, count in devices.shape.items():
        if count > 1:
            checks += _all_reduce(s, devices, str(axis), count)
    return checks or [not_applicable("all-reduce", "a single device")]


def _all_reduce(s: StageSetting, devices: Mesh, axis: str, count: int) -> list[Check]:
    """Sum 64 MiB (1 MiB on a CPU) over the axis, filled with each device's own number."""
    size = 2**18 if s.small else 2**24
    sharding = NamedSharding(devices, PartitionSpec(axis))

    def shard(index: Any) -> np.ndarray:
        return np.full(size, (index[0].start or 0) // size, np.float32)

    x = jax.make_array_from_callback((count * size,), sharding, shard)
    add = partial(jax.shard_map, mesh=devices, in_specs=PartitionSpec(axis), out_specs=PartitionSpec(axis))
    all_reduce = jax.jit(add(lambda share: added(share, axis)))
    parts = [np.asarray(shard.data) for shard in all_reduce(x).addressable_shards]
    exact = all(bool((part == count * (count - 1) / 2).all()) for part in parts)
    rate = 2 * (count - 1) / count * 4 * size / best_seconds(lambda: all_reduce(x), repeats=5)
    ways = None if s.peaks.link is None else ways_over(devices, axis)
    link = None if ways is None or s.peaks.link is None else ways.ring * s.peaks.link
    return [
        holds(f"all-reduce over {axis} adds up", exact),
        _of_peak(f"all-reduce over {axis}", rate / 1e9, link, 1e9, LINKS, "GB/s"),
    ]


def between_hosts(s: StageSetting, firsts: list[Any]) -> list[Check]:
    """Sum over the first device of every host, and time how long all hosts wait for each other."""
    if len(firsts) == 1:
        return [not_applicable("between hosts", "a single host")]
    wait_for_all("accept")
    start = time.perf_counter()
    for _ in range(BARRIERS):
        wait_for_all("accept")
    seconds = (time.perf_counter() - start) / BARRIERS
    devices = Mesh(np.asarray(firsts, dtype=object), ("hosts",))
    barrier = measured("all hosts wait for each other", 1e3 * seconds, unit="ms")
    return [barrier, *_all_reduce(s, devices, "hosts", len(firsts))]


def added(part: Any, axis: str) -> Any:
    """Sum over a mesh axis as the stage does."""
    return jax.lax.psum(part, axis)


def ways_over(devices: Mesh, axis: str) -> Ways | None:
    """Return the links that the slowest group of an axis sends over; None across slices or without coordinates."""
    flat_devices = list(devices.devices.flat)
    if any(coordinates(d) is None for d in flat_devices) or flat_devices[0].device_kind not in TPU_KINDS:
        return None
    family = TPU_KINDS[flat_devices[0].device_kind]
    places = [coordinates(d) or () for d in flat_devices]
    sides = [1 + max(position[i] for position in places) for i in range(SIDES[family])]
    closed_axes = closed_sides(Slice(family, "x".join(map(str, sides))))
    groups = groups_of(devices, (axis,))
    if any(len({getattr(d, "slice_index", 0) for d in group}) > 1 for group in groups):
        return None
    coordinates_of = [[(coordinates(d) or ())[: len(sides)] for d in group] for group in groups]
    per_chip = DEVICES.get(family, 1)
    ways = [ways_of(group, sides=sides, closed=closed_axes, devices=per_chip) for group in coordinates_of]
    return min(ways, key=lambda w: (w.ring, -w.hops))


def coordinates(device: Any) -> tuple[int, ...] | None:
    """Return where a chip lies in its slice; None for devices without a place."""
    coords = getattr(device, "coords", None)
    return None if coords is None else tuple(coords)


def _of_peak(name: str, rate: float, peak: float | None, unit: float, share: float, word: str) -> Check:
    if peak is None:
        return not_applicable(name, NO_PEAK, value=rate, unit=word)
    note = f"{rate:.4g} {word}; {peak / unit:g} {word} can be reached"
    return fast(f"{name}, of what can be reached", rate * unit / peak, share, note=note)
