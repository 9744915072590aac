"""Devices, the mesh, where arrays live, the compilation cache, and what a device can do at best."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

PEAK_FLOPS = {  # dense bf16, per jax device, from the vendors' data sheets
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}


class DeviceError(RuntimeError):
    """A device that was asked for is not there."""


def choose_platform(wanted: str) -> str:
    """Make JAX use the wanted platform, "auto" being JAX's own choice; call before anything touches a device.

    Raises:
        DeviceError: no such device on this machine, or JAX cannot reach it.
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
            f"device: {wanted} was asked for and JAX finds {found} ({jax.devices()[0].device_kind}). "
            f"{remedy}, or set device: {found}"
        )
    return found


def use_compilation_cache(folder: str | None) -> Path | None:
    """Keep compiled programs on disk, so that the next run starts in seconds. None turns it off.

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
    return path


def make_mesh(*, data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over all devices; one axis may be -1 and takes what is left.

    Raises:
        DeviceError: the axes do not multiply to the number of devices.
    """
    axes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    count = jax.device_count()
    fixed = int(np.prod([n for n in axes.values() if n != -1]))
    open_axes = [name for name, n in axes.items() if n == -1]
    if len(open_axes) > 1 or any(n < 1 and n != -1 for n in axes.values()):
        raise DeviceError(f"mesh: expected positive sizes and at most one -1, got {axes}")
    if open_axes and count % fixed == 0:
        axes[open_axes[0]] = count // fixed
    if int(np.prod(list(axes.values()))) != count:
        raise DeviceError(f"mesh: {axes} does not multiply to the {count} devices here; set one axis to -1")
    # Auto: shardings are hints to the compiler, as jax.jit has always taken them; make_mesh would choose Explicit.
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3)


def peak_flops(dtype: Any) -> tuple[float, str]:
    """Operations per second that all devices could do at best, and where the number is from.

    Known accelerators: the data sheet. Others (a CPU): the best of a few square matrix products of ``dtype``.
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
