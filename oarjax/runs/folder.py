"""The folder of a run: claimed by one config, gone on with by the same one, refused to any other. Imports no jax."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oarjax.config import Config, ConfigError, flatten, parse_config
from oarjax.runs.durable import cannot_write, write_durably

HARMLESS = (
    "run_dir",
    "compilation_cache",
    "profile",
    "loss.reference",
    "checkpoint.",
    "health.",
    "report.",
    "export.",
    "grading.workers",
    "eval.batch",
    "distributed.",
    "plan.",
    "lab.",
)
"""Fields that may differ when a run goes on: they do not change what it learns. run_dir: folders may be moved."""

ROUNDING = (
    "device",
    "mesh.",
    "policy.remat",
    "policy.head_chunk",
    "update.microbatch",
    "sft.microbatch",
    "credit.masking.chunk",
    "credit.masking.buckets",
    "grading.deadline",
    "grading.memory_mb",
)
"""Fields that may differ too, and change results by the order of sums, or by which answers are graded in time."""

PROGRESS = (
    "start",
    "start.json",
    "sft.json",
    "checkpoints.json",
    "checkpoints/*",
    "seed*/start",
    "seed*/start.json",
    "seed*/sft.json",
    "seed*/*/metrics.jsonl",
    "metrics.jsonl",
)
"""What is in a folder that has got anywhere."""


def start_folder(run: Path, name: str) -> Path | None:
    """A folder that a run begins with: in its own, or beside it for runs of --compare and of studies."""
    return next((place for place in (run / name, run.parent / name) if place.is_dir()), None)


def changed(section: Any, **changes: Any) -> Any:
    """A config section with fields changed, validated again."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section)(**(fields | changes))


class Differences(NamedTuple):
    """Fields of two configs that differ, as "name was this, is that"."""

    refused: list[str]
    rounding: list[str]  # allowed, and the run ends otherwise than it would have, if only by rounding
    harmless: list[str]

    def words(self) -> str:
        """All that are allowed, in a line; empty where there are none."""
        parts = []
        if self.rounding:
            parts.append(f"{'; '.join(self.rounding)} (allowed, but the run will not end bit for bit as it would have)")
        if self.harmless:
            parts.append(f"{'; '.join(self.harmless)} (harmless)")
        return "; ".join(parts)


def differences(before: Mapping[str, Any], cfg: Config) -> Differences:
    """What differs between a config that was saved as a tree, and this one."""
    was, now = flatten(_complete(before)), flatten(cfg.model_dump(mode="json"))
    found = Differences([], [], [])
    for name in sorted(was | now):
        if was.get(name) == now.get(name):
            continue
        # More iterations are the same run for longer, unless its learning rate was to reach 0 by the old end.
        longer = name == "iterations" and cfg.optim.schedule == "constant" and now[name] > was.get(name, 0)
        kind = found.harmless if name.startswith(HARMLESS) else found.refused
        kind = found.rounding if longer or name.startswith(ROUNDING) else kind
        kind.append(f"{name} was {was.get(name)!r}, is {now.get(name)!r}")
    return found


def _complete(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved config with the fields that have come since at their defaults; as it is where it cannot be read."""
    try:
        return parse_config(dict(before)).model_dump(mode="json")
    except ConfigError:
        return before


def refuse_another_config(before: Mapping[str, Any], cfg: Config, *, what: str) -> Differences:
    """Refuse to go on with ``what`` under a config that would make another run of it.

    Raises:
        ConfigError: with the fields that differ, and those that might.
    """
    found = differences(before, cfg)
    if found.refused:
        others = f"; these may differ: {found.words()}" if found.words() else ""
        raise ConfigError(
            f"run_dir: {what} holds a run of another config ({'; '.join(found.refused)}); "
            f"give another run_dir=..., or that config to go on with it{others}"
        )
    return found


def refuse_another_run(folder: Path, cfg: Config) -> Differences:
    """The same command goes on with its run; any other must not touch one that has got anywhere.

    Gives the differences that are allowed.

    Raises:
        ConfigError: with the fields that differ.
    """
    known = folder / "config.yaml"
    if not known.exists() or not any(any(folder.glob(part)) for part in PROGRESS):
        return Differences([], [], [])
    return refuse_another_config(yaml.safe_load(known.read_text()), cfg, what=str(folder))


def claim(folder: Path, cfg: Config) -> Path:
    """Make the run's folder and write its whole config there.

    Raises:
        ConfigError: it holds another run, or cannot be written to.
    """
    refuse_another_run(folder, cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "config.yaml", yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"run_dir: cannot write to {folder}: {error}; give another run_dir=...") from error
    return folder


LOCK = "lock"


@contextmanager
def locked(folder: Path, *, given: str = "run_dir=...") -> Iterator[None]:
    """Hold a folder against other processes. The system lets go of it when the process ends, however it ends.

    The file that is locked stays; by itself it locks nothing. On network file systems the lock holds between hosts
    where the file system passes it on (NFS does, mounted buckets do not). ``given`` is how the user named the folder.

    Raises:
        ConfigError: another process holds it; with its number and host.
        StorageError: the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{given.removesuffix('=...')}: {folder} is in use by {_holder(path)}; wait until it has ended, stop "
                f"it, or give another {given}"
            ) from None
        except OSError as error:  # a file system without locks
            raise cannot_write(path, error) from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just taken it
        return "another process"
