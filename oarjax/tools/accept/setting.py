"""Choose the sizes of the stages: real ones on an accelerator, small ones on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.system.chips import CHIPS
from oarjax.system.devices import GPU_BANDWIDTH, PEAK_FLOPS, TPU_KINDS
from oarjax.system.mesh import make_mesh

RATES = "rates.json"
"""File of the measured rates of products and copies, for later stages."""


class Peaks(NamedTuple):
    """Published peaks of one device; None if unknown or absent."""

    flops: float | None  # bfloat16 products, per second
    bandwidth: float | None  # bytes of memory per second
    link: float | None  # bytes per second, one way over one link


@dataclass(frozen=True)
class StageSetting:
    """Folders and platform of the stages."""

    folder: Path  # for their files
    bucket: Path | None  # a mounted bucket to measure
    platform: str  # cpu, gpu or tpu
    peaks: Peaks

    @property
    def small(self) -> bool:
        """True on a CPU, where only the numbers matter and the sizes are small."""
        return self.platform == "cpu"


def peaks_of(kind: str) -> Peaks:
    """Return the peaks of a device kind as JAX names it."""
    if kind in TPU_KINDS:
        chip = CHIPS[TPU_KINDS[kind]]
        return Peaks(float(chip.flops), float(chip.bandwidth), float(chip.link))
    return Peaks(PEAK_FLOPS.get(kind), GPU_BANDWIDTH.get(kind), None)


def mesh_sizes() -> dict[str, int]:
    """Return the mesh of the stages that use all devices: a tensor axis of 2 if there are enough devices."""
    devices = jax.devices()
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    slice_devices = len(devices) // slices
    return {"slice": slices, "data": 1, "fsdp": -1, "tensor": 2 if slice_devices % 2 == 0 and slice_devices > 2 else 1}


def mesh() -> Any:
    """Arrange all devices."""
    sizes: Any = mesh_sizes()
    return make_mesh(**sizes)


def run_config(s: StageSetting, name: str, *, iterations: int) -> Config:
    """Return the config of a short run that learns within seconds: any answer at all is rewarded."""
    rows = 8 * max(1, len(jax.devices()) // 8)
    return parse_config(
        {
            "run_dir": str(s.folder / name),
            "iterations": iterations,
            "policy": {"path": "builtin:arithmetic", "remat": "none"},
            "mesh": mesh_sizes(),
            "data": {
                "template": "plain",
                "max_prompt": 16,
                "train": {
                    "source": "builtin:arithmetic",
                    "split": "train",
                    "limit": 64,
                    "arithmetic": {"terms": 3, "highest": 9},
                },
            },
            "rollout": {
                "prompts": rows,
                "group_size": 4,
                "max_new": 16,
                "prompt_bucket": 4,
                "completion_bucket": 8,
                "cache_bucket": 8,
            },
            "grading": {"rewards": [{"name": "format"}], "workers": 1},
            "credit": {"answer": {"style": "hash"}},
            "update": {"microbatch": 2 * rows},
            "optim": {"lr": 1e-2, "warmup": 0, "schedule": "constant"},
            "checkpoint": {"every": 0, "best": None},
            "report": {"html": False},
            "compilation_cache": str(s.folder / "compiled"),
            "compile_ahead": "on",
        }
    )


def best_seconds(work: Callable[[], Any], *, repeats: int) -> float:
    """Return the shortest time of some warm runs of ``work``, including the wait for its result."""
    jax.block_until_ready(work())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start)
    return min(seconds)
