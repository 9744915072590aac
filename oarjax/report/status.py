"""``oarjax status``: show a run's progress, read from its folder alone. Imports no jax."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from rich.table import Table

from oarjax.errors import ConfigError
from oarjax.report.files import make_console, read_metrics, short, visible
from oarjax.storage.durable import DamagedError, cannot_read, names_in, refuse_special
from oarjax.storage.folder import LOCK, lock_holder
from oarjax.storage.manifest import MANIFEST
from oarjax.system.yaml_tree import read_yaml

RECENT = 10
"""Iterations over which speed and reward are averaged."""


@dataclass(frozen=True)
class Status:
    """Progress of a run; None where it is not known yet."""

    run: str
    state: str  # before the first iteration, warm start, training, stopped in ..., finished, ...
    iteration: int
    iterations: int
    reward: float | None  # mean of the recent iterations
    pass_at_1: float | None  # of the last evaluation
    evaluated_at: int | None
    seconds_per_iteration: float | None  # median of the recent iterations
    seconds_left: float | None
    seconds_spent: float  # in iterations; a stopped run does not count its pause
    devices: str | None  # number and kind
    device_hours: float | None  # of the seconds spent; compilation and pauses are not in them
    seconds_since_written: float | None  # since the last line of metrics.jsonl
    checkpoint: int | None  # iteration of the newest sealed checkpoint
    skipped_in_a_row: int


def find_config(folder: Path, *, command: str) -> Path:
    """Return the config of a run, from its folder.

    Raises:
        ConfigError: the folder holds no run, or something that is neither file nor folder.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            f"{command}: {folder} holds no run (no config.yaml), or one that never began; "
            "pass the run_dir of oarjax train"
        )
    refuse_special(folder)
    return config


def run_status(folder: Path, *, now: float | None = None) -> Status:
    """Read a run's progress from its folder.

    Raises:
        ConfigError: the folder holds no run.
        StorageError: metrics.jsonl is damaged.
    """
    config = find_config(folder, command="status")
    try:
        cfg: Mapping[str, Any] = read_yaml(config.read_text(encoding="utf-8"))
        iterations, steps = int(cfg["iterations"]), (cfg.get("sft") or {}).get("steps")
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{config} is not the config that a run wrote ({error}); put a good copy there") from None
    except OSError as error:
        raise cannot_read(config, error) from error
    records = read_metrics(folder / "metrics.jsonl")
    trained = [r for r in records if r["iteration"] > 0]
    recent = trained[-RECENT:]
    rewards = [r["reward"] for r in recent if r.get("reward") is not None]
    seconds = [r["seconds/total"] for r in recent if r.get("seconds/total") is not None]
    evaluated = [r for r in records if r.get("pass_at_1") is not None]
    checkpoint = _newest_checkpoint(folder / "checkpoints")
    iteration = max(int(trained[-1]["iteration"]) if trained else 0, checkpoint or 0)  # metrics.jsonl may be lost
    spent = float(sum(r.get("seconds/total") or 0.0 for r in trained))
    devices = _devices(folder)
    pace = statistics.median(seconds) if seconds else None
    iterations_left = max(iterations - iteration, 0)
    return Status(
        run=str(folder),
        state=_state(folder, iteration, iterations, steps),
        iteration=iteration,
        iterations=iterations,
        reward=statistics.fmean(rewards) if rewards else None,
        pass_at_1=evaluated[-1]["pass_at_1"] if evaluated else None,
        evaluated_at=int(evaluated[-1]["iteration"]) if evaluated else None,
        seconds_per_iteration=pace,
        seconds_left=None if pace is None else pace * iterations_left,
        seconds_spent=spent,
        devices=None if devices is None else f"{devices[0]} x {devices[1]}",
        device_hours=None if devices is None else devices[0] * spent / 3600,
        seconds_since_written=(time.time() if now is None else now) - records[-1]["time"] if records else None,
        checkpoint=checkpoint,
        skipped_in_a_row=int(trained[-1].get("skipped_in_a_row") or 0) if trained else 0,
    )


def show_status(folder: Path, *, as_json: bool) -> None:
    """Print a run's status as a table, or as one JSON document."""
    status = run_status(folder)
    if as_json:
        print(json.dumps(asdict(status)))
        return
    console, table = make_console(), Table(show_header=False, box=None)
    for name, value in _lines(status).items():
        table.add_row(name, value)
    console.print(table)


def _lines(s: Status) -> dict[str, str]:
    evaluated = "not yet" if s.pass_at_1 is None else f"{s.pass_at_1:.1%} after iteration {s.evaluated_at}"
    pace = "not yet known" if s.seconds_per_iteration is None else f"{short(s.seconds_per_iteration)} s"
    lines = {
        "run": visible(s.run),
        "state": s.state,
        "iteration": f"{s.iteration} of {s.iterations}",
        "reward": "not yet known" if s.reward is None else f"{short(s.reward)} (mean of the last {RECENT})",
        "pass@1": evaluated,
        "per iteration": pace,
        "left": "not yet known" if s.seconds_left is None else duration(s.seconds_left),
        "spent": duration(s.seconds_spent) + _hours(s),
        "last line": "none" if s.seconds_since_written is None else f"{duration(s.seconds_since_written)} ago",
        "checkpoint": "none" if s.checkpoint is None else f"iteration {s.checkpoint}",
    }
    if s.skipped_in_a_row:
        lines["warning"] = f"the last {s.skipped_in_a_row} updates were skipped: their numbers were not finite"
    return lines


def _hours(s: Status) -> str:
    return "" if s.device_hours is None else f", {s.device_hours:,.1f} chip-hours on {visible(s.devices or '')}"


def duration(seconds: SupportsFloat) -> str:
    """Format seconds in days, hours, minutes and seconds: the two largest units that are not 0."""
    total = max(round(float(seconds)), 0)
    parts = [(total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s")]
    return " ".join(f"{n} {unit}" for n, unit in [p for p in parts if p[0]][:2]) or "0 s"


def _state(folder: Path, iteration: int, iterations: int, steps: int | None) -> str:
    if iteration >= iterations:
        exported = any((folder / name).is_file() for name in ("export/config.json", "summary.json"))
        return "finished" if exported else "all iterations done, not yet exported"
    if iteration or not (folder / "sft").exists():
        state = "training" if iteration else "before the first iteration"
    else:
        state = f"warm start, {_newest_checkpoint(folder / 'sft') or 0} of {steps} steps saved"
    return f"stopped in: {state}; the same command resumes" if _has_ended(folder / LOCK) else state


def _has_ended(lock: Path) -> bool:
    """Return True if the process that last held a run's lock was on this host and has ended."""
    holder = lock_holder(lock)
    if holder is None or holder[1] != socket.gethostname():
        return False
    try:
        os.kill(holder[0], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user, or no process's number
        return False
    return False


def _devices(folder: Path) -> tuple[int, str] | None:
    """Return the number and kind of the devices that the run began on; None where they are not recorded."""
    try:
        inputs = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))["inputs"]
        return int(inputs["device/count"]), str(inputs["device/kind"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _newest_checkpoint(folder: Path) -> int | None:
    sealed = (name for name in names_in(folder) if name.isdecimal() and (folder / name / MANIFEST).is_file())
    return max(map(int, sealed), default=None)
