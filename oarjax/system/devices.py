"""Devices, meshes, host memory, the compilation cache and peak FLOPs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from oarjax.costs import CHIPS
from oarjax.errors import UserError
from oarjax.models.sharding import AXES, ROLLOUT_AXES
from oarjax.system.compiled import cache_on_every_process

TPU_KINDS = {  # JAX's device kinds -> chips of oarjax.costs
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
PEAK_FLOPS = {  # dense bf16, per jax device, from the vendors' data sheets
    **{kind: CHIPS[chip].flops for kind, chip in TPU_KINDS.items()},
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}


class DeviceError(UserError, RuntimeError):
    """Devices, a mesh or other processes are not as the config needs them."""


def choose_platform(wanted: str) -> str:
    """Select JAX's platform ("auto": JAX's own choice) and return its name; call before anything touches a device.

    Raises:
        DeviceError: this machine has no such device, or JAX cannot reach it.
    """
    if wanted == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        found = jax.devices()[0].platform
    except RuntimeError as error:
        raise DeviceError(f"device: JAX finds no usable device: {error}") from error
    if wanted not in ("auto", found):
        install = 'Install the extra (pip install "oarjax[{}]"), free the device'
        remedy = {"tpu": install.format("tpu"), "gpu": install.format("cuda")}.get(wanted, "Set JAX_PLATFORMS=cpu")
        raise DeviceError(
            f"device: expected {wanted}, and JAX finds {found} ({jax.devices()[0].device_kind}). "
            f"{remedy}, or set device: {found}"
        )
    return found


THREADS = "NPROC"
"""The environment variable by which XLA's CPU client takes its number of threads, where it is set."""


def cpu_threads() -> int:
    """Return how many threads XLA's CPU client divides its work over: the cores that the process may use, or NPROC.

    Sums are divided as the work is, so that results depend on it by rounding.
    """
    told = os.environ.get(THREADS, "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pin_cpu_threads(count: int) -> None:
    """Let XLA's CPU client have so many threads on any machine, unless NPROC says otherwise already.

    Call before anything touches a device; later it changes nothing.
    """
    os.environ.setdefault(THREADS, str(count))


def use_compilation_cache(folder: str | None) -> Path | None:
    """Cache compiled programs on disk, so that the next run starts in seconds; None turns the cache off.

    Raises:
        DeviceError: the folder cannot be made.
    """
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"compilation_cache: cannot write to {path}: {error}; give another folder or null") from error
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return cache_on_every_process(path)


def make_mesh(*, slice: int, data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Build a mesh over all devices, or over ``devices``; one axis may be -1 and takes the devices that are left.

    On TPUs in several slices, the axis ``slice`` has one place per slice; elsewhere it is an ordinary outermost axis.
    Neighbours on the last axes are neighbours in the hardware.

    Raises:
        DeviceError: the axes do not multiply to the number of devices, or ``slice`` is not the number of slices.
    """
    axes = {"slice": slice, "data": data, "fsdp": fsdp, "tensor": tensor}
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    fixed = math.prod(n for n in axes.values() if n != -1)
    open_axes = [name for name, n in axes.items() if n == -1]
    if len(open_axes) > 1 or any(n < 1 and n != -1 for n in axes.values()):
        raise DeviceError(f"mesh: expected positive sizes and at most one -1, got {axes}")
    if count % fixed:
        raise DeviceError(
            f"mesh: {axes} does not multiply to the {count} devices here: {fixed} does not divide {count}; give sizes "
            "that do, and -1 for what is left"
        )
    if open_axes:
        axes[open_axes[0]] = count // fixed
    if math.prod(axes.values()) != count:
        raise DeviceError(f"mesh: {axes} does not multiply to the {count} devices here; set one axis to -1")
    # Devices of a single-slice topology (ahead-of-time compilation only) have no slice_index.
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    if slices > 1 and axes["slice"] != slices:
        raise DeviceError(
            f"mesh.slice: {axes['slice']}, and the {count} devices are in {slices} slices; set mesh.slice={slices}"
        )
    sizes = tuple(axes.values())
    if slices > 1:
        inner = (1, *sizes[1:])
        placed = _split_where_needed(
            partial(mesh_utils.create_hybrid_device_mesh, inner, (slices, 1, 1, 1), devices=devices)
        )
    else:
        placed = _split_where_needed(partial(mesh_utils.create_device_mesh, sizes, devices))
    # Auto: shardings are hints to the compiler, as jax.jit has always taken them.
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _split_where_needed(place: Callable[..., np.ndarray]) -> np.ndarray:
    """Arrange devices as a mesh, splitting a physical torus axis between two mesh axes only if necessary."""
    try:
        return place(allow_split_physical_axes=False)
    except NotImplementedError:
        return place(allow_split_physical_axes=True)


def rollout_mesh(mesh: Mesh, *, tensor: int) -> Mesh:
    """Reshape a mesh to (data, tensor), devices in the same order: one program can take arrays of both meshes.

    Raises:
        DeviceError: ``tensor`` does not divide the number of devices.
    """
    if mesh.size % tensor:
        raise DeviceError(
            f"rollout.tensor: {tensor} does not divide the {mesh.size} devices; set a divisor, or null for mesh.tensor"
        )
    devices = mesh.devices.reshape(-1, tensor)
    return Mesh(devices, ROLLOUT_AXES, axis_types=(AxisType.Auto,) * len(ROLLOUT_AXES))


def peak_flops(dtype: Any) -> tuple[float, str]:
    """Return the peak FLOP/s of all devices together, and the number's source.

    Known accelerators: the data sheet. Others (CPUs): the fastest of a few square matrix products in ``dtype``.
    """
    kind = jax.devices()[0].device_kind
    if kind in PEAK_FLOPS:
        return PEAK_FLOPS[kind] * jax.device_count(), "data sheet"
    x = jnp.ones((1024, 1024), dtype)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(product(x))
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds), "measured on 1024 x 1024 products"


def to_host_memory(tree: Any) -> Any:
    """Move arrays to their hosts' memory with the same sharding; ``jax.device_put`` brings them back."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), tree))


def memory_limit(device: Any) -> int | None:
    """Return the bytes that programs may use on a device, None where it does not report them (CPUs)."""
    return (device.memory_stats() or {}).get("bytes_limit")
