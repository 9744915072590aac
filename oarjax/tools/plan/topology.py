"""TPU slices that are not here: the real compiler of libtpu on a machine without a TPU.

A topology has devices that programs can be compiled for and not run on. Names are libtpu's (``v5e:4x4``) or the
products' (``v5e-16``; of v4, v5p and v7x the product's number counts cores, two per chip).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from oarjax.errors import UserError
from oarjax.system.chips import CHIPS, Chip

SHAPES: Mapping[str, tuple[str, ...]] = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v7x": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
}
"""Slices that are sold. libtpu itself takes any shape."""

CORES = {"v5e": 1, "v6e": 1, "v5p": 2, "v4": 2, "v7x": 2}
"""What a product's number counts per chip."""

DEVICES = {"v7x": 2}
"""JAX's devices per chip where there are several."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Before JAX starts: no look for a TPU or for a cloud's metadata, and several compilers at a time."""


class TopologyError(UserError, RuntimeError):
    """An unknown slice, or a missing compiler."""


@dataclass(frozen=True)
class Slice:
    """One kind of slice."""

    family: str  # v5e
    shape: str  # 4x4

    @property
    def name(self) -> str:
        """libtpu's name."""
        return f"{'tpu7x' if self.family == 'v7x' else self.family}:{self.shape}"

    @property
    def product(self) -> str:
        """The name that it is ordered by."""
        return f"{self.family}-{self.chips * CORES[self.family]}"

    @property
    def chips(self) -> int:
        count = 1
        for side in self.shape.split("x"):
            count *= int(side)
        return count

    @property
    def devices(self) -> int:
        return self.chips * DEVICES.get(self.family, 1)

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]


def find_slice(name: str) -> Slice:
    """Find a slice by libtpu's or the product's name; v5litepod is v5e, tpu7x is v7x.

    Raises:
        TopologyError: it is not one that is sold, with those that are.
    """
    spelling = name.strip().lower().replace("v5litepod", "v5e").replace("tpu7x", "v7x")
    known_slices = [Slice(family, shape) for family, shapes in SHAPES.items() for shape in shapes]
    for candidate in known_slices:
        if spelling in (f"{candidate.family}:{candidate.shape}", candidate.product):
            return candidate
    family = spelling.replace(":", "-").split("-")[0]
    similar = [s for s in known_slices if s.family == family] or known_slices
    raise TopologyError(
        f"topology {name} is not known; accepted: {', '.join(f'{s.product} or {s.name}' for s in similar)}"
    )


def slice_devices(target: Slice, *, slices: int = 1) -> list[Any]:
    """Return the devices of ``slices`` such slices, for which programs can be compiled. Nothing runs on them.

    Raises:
        TopologyError: libtpu is not installed.
    """
    settings: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if target.chips == 1:
        settings["chips_per_host_bounds"] = (1, 1, 1)
    if target.product in ("v5e-8", "v6e-8"):
        settings["chips_per_host_bounds"] = (2, 4, 1)  # one host
    if target.family == "v4":
        settings["chip_config_name"] = "megacore"  # one device per chip
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target.name, **settings)
    except RuntimeError as error:
        raise TopologyError(
            f'topology {target.name}: libtpu, the TPU compiler, does not load ({error}); pip install "oarjax[aot]", or '
            "set TPU_LIBRARY_PATH to a libtpu.so"
        ) from error
    return list(topology.devices)


def compiler_version() -> str:
    """Return libtpu's version if it is known, else that of the file.

    Raises:
        TopologyError: no libtpu is here.
    """
    library_path = os.environ.get("TPU_LIBRARY_PATH")
    if library_path:
        library = Path(library_path)
        if not library.is_file():
            raise TopologyError(f"TPU_LIBRARY_PATH: no file {library_path}; name a libtpu.so, or unset it")
        infos = sorted(library.parent.parent.glob("libtpu-*.dist-info"))
        return infos[-1].name.removeprefix("libtpu-").removesuffix(".dist-info") if infos else f"file {library.name}"
    if find_spec("libtpu") is None:
        raise TopologyError(
            'plan compiles with libtpu, the TPU compiler, which is not installed; pip install "oarjax[aot]" (no TPU is '
            "needed), or set TPU_LIBRARY_PATH to a libtpu.so"
        )
    return importlib.metadata.version("libtpu")
