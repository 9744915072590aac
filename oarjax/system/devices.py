"""Choose devices; set up threads, the compilation cache and host memory; look up peak FLOPs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from oarjax.errors import UserError
from oarjax.system.chips import CHIPS
from oarjax.system.compiled import cache_on_every_process, remove_broken_entries

TPU_KINDS = {  # JAX's device kinds -> chips of oarjax.system.chips
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}
PEAK_FLOPS = {  # dense bf16, per jax device, from the vendors' data sheets
    **{kind: CHIPS[chip].flops for kind, chip in TPU_KINDS.items()},
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
GPU_BANDWIDTH = {  # of their memory, bytes per second, from the same sheets
    "NVIDIA H100 80GB HBM3": 3350e9,
    "NVIDIA H200": 4800e9,
    "NVIDIA B200": 8000e9,
    "NVIDIA L4": 300e9,
    "NVIDIA A100-SXM4-80GB": 2039e9,
    "NVIDIA A100-SXM4-40GB": 1555e9,
}


class DeviceError(UserError, RuntimeError):
    """Raised when devices, the mesh or other processes do not fit the config."""


def choose_platform(device: str) -> str:
    """Select JAX's platform ("auto": JAX chooses) and return its name; call before anything touches a device.

    Raises:
        DeviceError: this machine has no such device, or JAX cannot reach it.
    """
    if device == "cpu" or (device == "auto" and not getattr(jax.config, "jax_platforms", None) and only_cpu()):
        jax.config.update("jax_platforms", "cpu")
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        raise DeviceError(f"device: JAX finds no usable device: {error}") from error
    if device not in ("auto", platform):
        install = 'Install the extra (pip install "oarjax[{}]"), free the device'
        remedy = {"tpu": install.format("tpu"), "gpu": install.format("cuda")}.get(device, "Set JAX_PLATFORMS=cpu")
        setting = os.environ.get("JAX_PLATFORMS")
        raise DeviceError(
            f"device: expected {device}, but JAX finds {platform} ({jax.devices()[0].device_kind}). "
            f"{remedy}, or set device: {platform}{f'; JAX_PLATFORMS={setting} chooses it' if setting else ''}"
        )
    return platform


SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY", "TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION"}
"""Variables that importing JAX sets on any machine where libtpu is installed."""


def only_cpu(root: Path = Path("/")) -> bool:
    """Return True if libtpu alone could bring a device, and nothing speaks for a chip of Google's.

    JAX would choose the CPU too, after libtpu has printed errors about cloud metadata. A chip shows on the PCI bus, as
    a device file where a container hides that, or in variables that TPU machines set.
    """
    plugins = entry_points(group="jax_plugins") or find_spec("jax_plugins")
    harmless = {*SET_BY_JAX, "TPU_MIN_LOG_LEVEL"}
    settings = [name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU")) and name not in harmless]
    files = [*root.glob("dev/accel*"), *root.glob("dev/vfio/*")]
    if find_spec("libtpu") is None or plugins or settings or files:
        return False
    try:
        vendors = {path.read_text().strip() for path in root.glob("sys/bus/pci/devices/*/vendor")}
    except OSError:
        return False
    return bool(vendors) and "0x1ae0" not in vendors


CACHED_FROM = 0.2  # seconds of compilation; quicker programs are compiled again
THREADS = "NPROC"
"""Environment variable that sets the number of threads of XLA's CPU client."""


def cpu_threads() -> int:
    """Return the number of threads of XLA's CPU client: NPROC, else the cores that the process may use.

    Sums are split over the threads, so the rounding of results depends on their number.
    """
    setting = os.environ.get(THREADS, "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pin_cpu_threads(count: int) -> None:
    """Set the number of threads of XLA's CPU client, on any machine, unless NPROC is already set.

    Call before anything touches a device; later it has no effect.
    """
    os.environ.setdefault(THREADS, str(count))


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for new processes in which glibc asks Linux for large memory pages.

    XLA's CPU client allocates new buffers in every step, and pages of 4 KiB cost a small policy two fifths of it
    (docs/speed.md). Only glibc from 2.35 on reads the setting, when a process starts; a setting that is there already
    stays.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return dict(environment)
    return {**environment, "GLIBC_TUNABLES": f"{tunables}:glibc.malloc.hugetlb=1".lstrip(":")}


def use_compilation_cache(folder: str | None) -> Path | None:
    """Cache compiled programs on disk, so that the next run starts in seconds; None turns the cache off.

    Raises:
        DeviceError: the folder cannot be created.
    """
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"compilation_cache: cannot write to {path}: {error}; set another folder or null") from error
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_FROM)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    process_folder = cache_on_every_process(path)
    remove_broken_entries(process_folder)
    return process_folder


def peak_flops(dtype: Any, *, seconds: float = 0.0) -> tuple[float, str]:
    """Return the peak FLOP/s of all devices together, and the number's source.

    For known accelerators it comes from the data sheet; for others (CPUs) from the fastest square matrix product in
    ``dtype`` of five, or of as many as take ``seconds``: on a busy machine few are undisturbed.
    """
    kind = jax.devices()[0].device_kind
    if kind in PEAK_FLOPS:
        return PEAK_FLOPS[kind] * jax.device_count(), "data sheet"
    x = jnp.ones((1024, 1024), dtype)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    fastest = fastest_run(lambda: jax.block_until_ready(product(x)), seconds=seconds)
    return 2 * 1024**3 / fastest, "measured on 1024 x 1024 products"


def fastest_run(work: Callable[[], Any], *, seconds: float) -> float:
    """Return the seconds of the fastest of five runs of the work, or of as many as take ``seconds``."""
    first_start, times = time.perf_counter(), []
    while len(times) < 5 or time.perf_counter() - first_start < seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def to_host_memory(tree: Any) -> Any:
    """Move arrays to their hosts' memory with the same sharding; ``to_device_memory`` brings them back."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), tree))


def to_device_memory(tree: Any) -> Any:
    """Move arrays that lie in their hosts' memory to their devices; others stay where they are."""
    return jax.device_put(tree, jax.tree.map(lambda x: NamedSharding(x.sharding.mesh, x.sharding.spec), tree))


def memory_limit(device: Any) -> int | None:
    """Return the bytes that programs may use on a device; None if it does not report them (CPUs)."""
    return (device.memory_stats() or {}).get("bytes_limit")
