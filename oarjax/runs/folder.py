"""Create a run folder, or resume it with the same config; hold it against other processes. Imports no jax."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oarjax.config import Config, ConfigError, flatten, parse_config
from oarjax.runs.durable import FolderTaken, cannot_read, cannot_write, exists, guarded, write_durably
from oarjax.yaml_tree import read_yaml

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
"""Fields that may differ when a run resumes: they do not change what it learns. run_dir: folders may be moved."""

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
    "sft.json",
    "checkpoints.json",
    "checkpoints/*",
    "seed*/start",
    "seed*/sft.json",
    "*/checkpoints.json",
    "*/*/checkpoints.json",
)
"""Files of a run that is on disk to be resumed: from the first of them on, its config and inputs are fixed."""

UNSEALED = ("start.json", "metrics.jsonl", "completions.jsonl")
"""Files that a run without progress may have left, and that another config does not take over."""

SHOWN = 5
"""Differences that are spelt out."""


def start_folder(run: Path, name: str) -> Path | None:
    """Return a folder that a run begins with: in its own, or beside it for runs of --compare and of studies."""
    return next((place for place in (run / name, run.parent / name) if place.is_dir()), None)


def changed(section: Any, **changes: Any) -> Any:
    """Return a config section with fields changed, validated again."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section)(**(fields | changes))


class Differences(NamedTuple):
    """Fields or inputs that differ, as "name was this, is that"."""

    refused: list[str]
    rounding: list[str]  # allowed, and the run ends otherwise than it would have, if only by rounding
    harmless: list[str]

    def words(self) -> str:
        """Return all that are allowed, in a line; empty where there are none."""
        parts = []
        if self.rounding:
            parts.append(f"{listed(self.rounding)} (allowed, but the run will not end bit for bit as it would have)")
        if self.harmless:
            parts.append(f"{listed(self.harmless)} (harmless)")
        return "; ".join(parts)

    def __add__(self, other: Differences) -> Differences:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Differences(*(a + b for a, b in zip(self, other)))


NO_DIFFERENCES = Differences([], [], [])


def listed(texts: list[str]) -> str:
    """Join differences, and count those beyond the first few."""
    rest = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + rest


def differences(before: Mapping[str, Any], cfg: Config) -> Differences:
    """Compare a config that was saved as a tree with this one."""
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
    """Return a saved config with newer fields at their defaults, or as it is where it cannot be read."""
    try:
        return parse_config(dict(before)).model_dump(mode="json")
    except ConfigError:
        return before


def refuse_another_config(before: Mapping[str, Any], cfg: Config, *, what: str) -> Differences:
    """Compare configs, and return the differences that are allowed.

    Raises:
        ConfigError: with the fields that would make ``what`` another run, and those that might differ.
    """
    found = differences(before, cfg)
    if found.refused:
        others = f"; these may differ: {found.words()}" if found.words() else ""
        raise ConfigError(
            f"run_dir: {what} holds a run of another config ({listed(found.refused)}); "
            f"give another run_dir=..., that config to resume it, or --restart to put it aside and start anew{others}"
        )
    return found


def has_progress(folder: Path) -> bool:
    """Tell whether a folder holds work that another config must not touch.

    That is a checkpoint or a warm start, and of runs without checkpoints the lines of metrics.jsonl. Of a run that
    ended before its first checkpoint nothing is kept, so that a changed field is taken.
    """
    runs = [folder, *folder.glob("seed*/*")]
    return any(any(folder.glob(part)) for part in PROGRESS) or any(_counts_by_lines(run) for run in runs)


def _counts_by_lines(run: Path) -> bool:
    """Tell whether metrics.jsonl is all that there will ever be: the run saves nothing else, or it has ended."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        cfg = read_yaml((run / "config.yaml").read_text(encoding="utf-8"))
        if not lines:
            return False
        if not isinstance(cfg, Mapping) or cfg["checkpoint"]["every"] == 0:
            return True
        return json.loads(lines[-1])["iteration"] >= cfg["iterations"]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise cannot_read(run, error) from error
    except (ValueError, KeyError, TypeError, RecursionError):  # not ours to throw away
        return True


def refuse_another_run(folder: Path, cfg: Config) -> Differences:
    """Compare the folder's config with this one, once it has progress, and return the differences that are allowed.

    Raises:
        ConfigError: with the fields that differ.
        StorageError: the folder's config cannot be read.
    """
    known = folder / "config.yaml"
    if not exists(known) or not has_progress(folder):
        return NO_DIFFERENCES
    try:
        before = read_yaml(known.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_read(known, error) from error
    except ValueError as error:  # not UTF-8, or not YAML
        before = str(error).splitlines()[0]
    if not isinstance(before, Mapping):
        raise ConfigError(
            f"run_dir: {known} is not the config that the run wrote ({before}); put a good copy there, or give "
            "another run_dir=..."
        )
    return refuse_another_config(before, cfg, what=str(folder))


def claim(folder: Path, cfg: Config) -> Path:
    """Create the run's folder with its whole config and its id, or resume it with the same config.

    Call with the folder's lock held. Without progress in the folder any config is taken, and what an earlier attempt
    left of another one is removed.

    Raises:
        ConfigError: it holds another run, or cannot be written to.
    """
    refuse_another_run(folder, cfg)
    text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    known = folder / "config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if exists(known) and not has_progress(folder) and known.read_bytes() != text.encode():
            for path in (p for name in UNSEALED for at in ("", "seed*/", "seed*/*/") for p in folder.glob(at + name)):
                path.unlink()
        if not exists(folder / ID):
            write_durably(folder / ID, json.dumps({"id": secrets.token_hex(16)}) + "\n")
        write_durably(known, text)
    except OSError as error:
        if error.errno not in IMPOSSIBLE or has_progress(folder):  # it starts or resumes once its storage is back
            raise cannot_write(known, error) from error
        raise ConfigError(f"run_dir: cannot write to {folder}: {error}; give another run_dir=...") from error
    return folder


ID = "run.json"


def run_id(folder: Path) -> str | None:
    """Return the id that a run folder got when it was created, or None where it has none.

    Raises:
        StorageError: the file that holds it cannot be read.
    """
    try:
        found = json.loads((folder / ID).read_text(encoding="utf-8"))["id"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cannot_read(folder / ID, error) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def put_aside(folder: Path) -> Path | None:
    """Rename a run folder, so that a new run can start at its path; return its new path, None where there is none.

    Raises:
        ConfigError: a process is using it, or one of the runs in it.
        StorageError: it cannot be renamed.
    """
    if not exists(folder):
        return None
    names = (folder.with_name(f"{folder.name}.old{n}") for n in ("", *(f"-{n}" for n in range(2, 10_000))))
    with ExitStack() as stack:
        for lock in sorted({folder / LOCK, *folder.glob(f"*/{LOCK}"), *folder.glob(f"*/*/{LOCK}")}):
            stack.enter_context(locked(lock.parent))
        target = next(name for name in names if not exists(name))
        try:
            folder.rename(target)
        except OSError as error:
            raise cannot_write(target, error) from error
    return target


LOCK = "lock"


@contextmanager
def locked(folder: Path, *, given: str = "run_dir=...") -> Iterator[None]:
    """Hold a folder against other processes. The system lets go of it when the process ends, however it ends.

    The file that is locked stays; by itself it locks nothing. On network file systems the lock holds between hosts
    where the file system passes it on (NFS does, mounted buckets do not). ``given`` is how the user named the folder.
    While it is held, every write below the folder first checks that the lock at its path is still the held one, so
    that a process whose folder was moved away writes nothing into a new run at the old path.

    Raises:
        ConfigError: another process holds it, with its number and host; or the folder cannot be created.
        StorageError: the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        if error.errno in IMPOSSIBLE and not exists(folder):
            name = given.removesuffix("=...")
            raise ConfigError(f"{name}: cannot write to {folder}: {error}; give another {given}") from error
        raise cannot_write(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(file.fileno())
        except BlockingIOError:
            raise ConfigError(
                f"{given.removesuffix('=...')}: {folder} is in use by {_holder(path)}; wait until it has ended, stop "
                f"it, or give another {given}"
            ) from None
        except OSError as error:  # a file system without locks
            raise cannot_write(path, error) from error

        def check() -> None:
            try:
                there = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                there = None
            except OSError as error:
                raise cannot_write(path, error) from error
            if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
                raise FolderTaken(
                    f"{folder}: the folder was moved, replaced or unmounted while this process used it; nothing was "
                    "written to what is there now. Resume with run_dir= where the folder is"
                )

        check()
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except OSError as error:  # a full disk: the lock holds all the same, without a name
            if error.errno not in FULL:
                raise cannot_write(path, error) from error
        with guarded(folder, check):
            yield


FULL = {errno.ENOSPC, errno.EDQUOT}
IMPOSSIBLE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG}
"""Why a folder cannot be made that the user had better name otherwise."""


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just taken it
        return "another process"
