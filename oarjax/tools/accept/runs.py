"""Stages of whole runs: a run learns, is stopped by SIGTERM and resumed; storage is measured."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from oarjax.config.schema import Config
from oarjax.config.section import changed
from oarjax.report.files import read_metrics
from oarjax.storage.checkpoint import Checkpoints
from oarjax.storage.stop import Stop, Stopped
from oarjax.system.background import compiling
from oarjax.system.processes import only_first
from oarjax.tools.accept.check import Check, at_most, holds, measured, not_applicable
from oarjax.tools.accept.setting import StageSetting, mesh, run_config
from oarjax.tools.bench.measure import counted_compilations
from oarjax.training.command import train_once
from oarjax.types import TrainState

ITERATIONS = 20
HOST = ("grade_wait", "spans")
"""Phases in which the devices wait for the host."""


def iterations(s: StageSetting) -> list[Check]:
    """Train for 20 iterations: no compilation after the first one, finite metrics, a rising reward."""
    folder = s.folder / "run"
    only_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    counts: list[int] = []
    with counted_compilations() as compilations:

        def after_iteration() -> None:
            while compiling():  # the iterations are shorter than it takes
                time.sleep(0.01)
            counts.append(compilations.count)

        train_once(run_of(s), Console(quiet=True), Stop(), after_iteration)
    records = read_metrics(folder / "metrics.jsonl")
    rewards = [record["reward"] for record in records]
    numbers = [x for record in records for x in record.values()]
    third = max(len(rewards) // 3, 1)
    total = sum(r["seconds/total"] for r in records[2:])
    host = sum(r.get(f"seconds/{phase}", 0.0) for r in records[2:] for phase in HOST)
    first_mean, last_mean = statistics.mean(rewards[:third]), statistics.mean(rewards[-third:])
    return [
        holds("all iterations are recorded", len(records) == ITERATIONS, value=len(records)),
        holds("every metric is finite", all(x is not None for x in numbers)),
        at_most("programs compiled after the first iteration", counts[-1] - counts[0], 0),
        holds("the reward rises", last_mean > first_mean, value=last_mean, note=f"{first_mean:.3f} in the first third"),
        measured("host idle share", host / total, note="grading and spans, while devices wait"),
        measured("seconds per iteration", total / max(len(records) - 2, 1)),
    ]


REPEATS = "deterministic_ops"
"""What XLA_FLAGS has where a GPU's sums have an order."""


def resume(s: StageSetting) -> list[Check]:
    """Stop the same run by SIGTERM half way and resume it: its export must be the same, byte for byte.

    On a GPU it only is where XLA was asked for sums in a fixed order.
    """
    export, folder = s.folder / "run" / "export", s.folder / "stopped-run"
    if not export.is_dir():
        return [holds("the stage iterations has left an export", False)]
    only_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    cfg, steps = changed(run_of(s), run_dir=str(folder)), []

    def stop_half_way() -> None:
        steps.append(1)
        if len(steps) == ITERATIONS // 2:
            os.kill(os.getpid(), signal.SIGTERM)

    code = None
    with Stop() as stop:
        try:
            train_once(cfg, Console(quiet=True), stop, stop_half_way)
        except Stopped as stopped:
            code = stopped.code
    if code is not None:
        with Stop() as stop:
            train_once(cfg, Console(quiet=True), stop)
    names = sorted(path.name for path in export.iterdir())
    different = [name for name in names if _digest(export / name) != _digest(folder / "export" / name)]
    numbers = [r["iteration"] for r in read_metrics(folder / "metrics.jsonl")]
    checks = [
        holds("SIGTERM ends it with exit code 75", code == 75, value=code),
        holds("no iteration is missing or double", numbers == list(range(1, ITERATIONS + 1))),
    ]
    if s.platform == "gpu" and REPEATS not in os.environ.get("XLA_FLAGS", ""):
        ask = "a GPU adds up in any order; XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true makes runs repeat"
        return [*checks, not_applicable("both exports are equal", ask, value=not different)]
    return [*checks, holds("both exports are equal", not different, note=", ".join(different))]


def run_of(s: StageSetting) -> Config:
    """Return the config of both stages."""
    return run_config(s, "run", iterations=ITERATIONS)


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def storage(s: StageSetting) -> list[Check]:
    """Save and restore a state in the stages' folder and on the bucket, and measure the speed."""
    checks = _storage(s, s.folder / "storage", "folder")
    if s.bucket is None:
        return [*checks, not_applicable("bucket", "no bucket; give --bucket FOLDER")]
    return [*checks, *_storage(s, s.bucket / "oarjax-accept", "bucket")]


def _storage(s: StageSetting, folder: Path, name: str) -> list[Check]:
    only_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    only_first(lambda: folder.mkdir(parents=True))
    everywhere = NamedSharding(mesh(), PartitionSpec())
    rows = NamedSharding(mesh(), PartitionSpec("fsdp"))
    size = 2**18 if s.small else 2**26
    count = mesh().shape["fsdp"]
    values = np.random.default_rng(0).standard_normal((count, size), np.float32)
    params = {"w": jax.make_array_from_callback(values.shape, rows, values.__getitem__)}
    opt_state: Any = jax.device_put(optax.EmptyState(), everywhere)
    step, key = jax.jit(lambda: (jnp.int32(1), jax.random.key(0)), out_shardings=everywhere)()
    state = TrainState(step=step, params=params, opt_state=opt_state, key=key)
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        start = time.perf_counter()
        checkpoints.save(1, state, {})
        checkpoints.settle()
        save_end = time.perf_counter()
        trusted = checkpoints.trusted(lambda _: None)
        check_end = time.perf_counter()
        restored, _ = checkpoints.restore(1, like=state)
        jax.block_until_ready(restored.params)
        restore_end = time.perf_counter()
    shards = restored.params["w"].addressable_shards
    equal = all(bool((np.asarray(shard.data) == values[shard.index]).all()) for shard in shards)
    mebibytes = values.nbytes / 2**20
    only_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    return [
        holds(f"{name}: a checkpoint is trusted", trusted == 1),
        holds(f"{name}: the restored state equals the saved one", equal),
        measured(f"{name}: saved and sealed", mebibytes / (save_end - start), unit="MiB/s"),
        measured(f"{name}: checked", mebibytes / (check_end - save_end), unit="MiB/s"),
        measured(f"{name}: restored", mebibytes / (restore_end - check_end), unit="MiB/s"),
    ]
