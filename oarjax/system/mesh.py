"""Build the device meshes for training and for sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from oarjax.system.devices import DeviceError
from oarjax.system.tiles import compact_order
from oarjax.types import AXES, ROLLOUT_AXES


def make_mesh(
    *, slice: int, data: int, fsdp: int, tensor: int, expert: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Build a mesh over all devices, or over ``devices``; one axis may be -1 and takes the remaining devices.

    On TPUs in several slices, the axis ``slice`` has one position per slice; elsewhere it is an ordinary outermost
    axis. Neighbours on the last axes are neighbours in the hardware. A slice whose devices all lie on one axis is
    ordered tile by tile, see ``oarjax.system.tiles``: sampling divides the same order into tensor groups. Which axis
    a parameter is divided over is decided in ``oarjax.models.sharding``.

    Raises:
        DeviceError: the axes do not multiply to the number of devices, or ``slice`` is not the number of slices.
    """
    axes = {"slice": slice, "data": data, "expert": expert, "fsdp": fsdp, "tensor": tensor}
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    fixed = math.prod(n for n in axes.values() if n != -1)
    open_axes = [name for name, n in axes.items() if n == -1]
    if len(open_axes) > 1 or any(n < 1 and n != -1 for n in axes.values()):
        raise DeviceError(f"mesh: expected positive sizes and at most one -1, got {axes}")
    if count % fixed:
        raise DeviceError(
            f"mesh: {axes} does not multiply to the {count} devices here: {fixed} does not divide {count}; set sizes "
            "that do, and -1 for the remaining devices"
        )
    if open_axes:
        axes[open_axes[0]] = count // fixed
    if math.prod(axes.values()) != count:
        raise DeviceError(f"mesh: {axes} does not multiply to the {count} devices here; set one axis to -1")
    # Devices of a single-slice topology (ahead-of-time compilation only) have no slice_index.
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    if slices > 1 and axes["slice"] != slices:
        raise DeviceError(
            f"mesh.slice: expected {slices}, since the {count} devices are in {slices} slices, got {axes['slice']}; "
            f"set mesh.slice={slices}"
        )
    sizes = tuple(axes.values())
    flat = slices == 1 and devices[0].platform == "tpu" and sum(n > 1 for n in sizes) == 1
    tiles = compact_order(devices) if flat else None
    if tiles is not None:
        placed = np.array(tiles).reshape(sizes)
    elif slices > 1:
        inner = (1, *sizes[1:])
        placed = _split_where_needed(
            partial(mesh_utils.create_hybrid_device_mesh, inner, (slices, 1, 1, 1, 1), devices=devices)
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
    """Reshape a mesh to (data, expert, tensor), devices in the same order: one program can take arrays of both meshes.

    The axis ``expert`` is as large as the mesh's.

    Raises:
        DeviceError: ``tensor`` does not divide the number of devices, or those of one expert axis.
    """
    expert = mesh.shape["expert"]
    if mesh.size % (expert * tensor):
        of = f"the {mesh.size} devices" if expert == 1 else f"the {mesh.size // expert} devices that hold one expert"
        raise DeviceError(f"rollout.tensor: {tensor} does not divide {of}; set a divisor, or null to use mesh.tensor")
    devices = mesh.devices.reshape(-1, expert, tensor)
    return Mesh(devices, ROLLOUT_AXES, axis_types=(AxisType.Auto,) * len(ROLLOUT_AXES))
