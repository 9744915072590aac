"""Compute what a run needs besides HBM: chip-hours, disk of every host, room in the bucket, and time to save.

Arithmetic over sizes and stated assumptions; no measurement.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from oarjax.config.schema import Config
from oarjax.costs import Number
from oarjax.data.hf import SHARD_BYTES
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import parameter_count
from oarjax.run.adapters import trained_count, trained_shapes
from oarjax.run.custom import find_optimizer
from oarjax.step.programs import make_optimizer
from oarjax.tools.plan.topology import Slice

HOST_CHIPS = 4
SINGLE_HOST = 8  # v5e and v6e slices of up to so many chips have one host
SOFTWARE = 10e9  # bytes of a host's disk: Python, packages, compiled programs
WRITE_RATE = 500e6  # bytes per second that one host writes into a mounted bucket
NOTICE = 30.0  # seconds between the notice that a spot machine is taken away and its end


def hosts_of(where: Slice, *, slices: int = 1) -> int:
    """Return the number of hosts of a run."""
    if where.chips <= HOST_CHIPS or (where.family in ("v5e", "v6e") and where.chips <= SINGLE_HOST):
        return slices
    return slices * (where.chips // HOST_CHIPS)


def _moment_bytes(optimizer: optax.GradientTransformation, trained: Any) -> int:
    """Return the bytes of the optimizer's state without its counts: moments, and a reference that moves."""
    arrays = jax.tree.leaves(jax.eval_shape(optimizer.init, trained))
    return sum(x.size * x.dtype.itemsize for x in arrays if x.ndim)


def needs_of(cfg: Config, model: QwenConfig, where: Slice, *, seconds: Number | None) -> dict[str, Any]:
    """Compute a run's needs, from ``seconds`` per iteration; None where they are not known.

    A checkpoint holds the trained parameters and the optimizer's moments. Every host keeps the policy's files, of 2
    bytes per parameter, and what is on its way into the bucket; the bucket keeps the newest checkpoints, the best, the
    one that is being written, and the export.
    """
    slices = max(cfg.mesh.slice, 1)
    parameters = parameter_count(model)
    trained = trained_count(cfg.lora, model) if cfg.lora.rank else parameters
    optimizer, _ = make_optimizer(cfg, function=find_optimizer(cfg.optim))
    checkpoint = float(trained * 4 + _moment_bytes(optimizer, trained_shapes(cfg.lora, model)))
    hosts = hosts_of(where, slices=slices)
    width = {"float32": 4, "bfloat16": 2, None: 2 if cfg.lora.rank else 4}[cfg.export.dtype]
    exported = float(parameters * width) if cfg.export.folder is not None else 0.0
    copies = cfg.checkpoint.keep + 1 + (cfg.checkpoint.best is not None and cfg.data.eval is not None)
    hours = None if seconds is None else cfg.iterations * seconds / 3600
    return {
        "iterations": cfg.iterations,
        "hosts": hosts,
        "hours": hours,
        "chip_hours": None if hours is None else hours * where.chips * slices,
        "weights": 2.0 * parameters,
        "disk": SOFTWARE + max(checkpoint / hosts, min(exported, SHARD_BYTES)),
        "checkpoint": checkpoint,
        "bucket": copies * checkpoint + exported if cfg.checkpoint.every else exported,
        "saving": checkpoint / hosts / WRITE_RATE,
    }
