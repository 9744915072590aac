"""Create a run folder, or resume it with the same config; hold it against other processes. Imports no jax."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oarjax.config.changes import in_yaml
from oarjax.config.loading import parse_config, read_tree
from oarjax.config.schema import Config
from oarjax.config.section import flatten
from oarjax.credit.registry import unread_settings
from oarjax.errors import ConfigError
from oarjax.storage.durable import FolderTaken, cannot_read, cannot_write, exists, guarded, names_in, write_durably
from oarjax.storage.manifest import read_manifest
from oarjax.system.paths import open_no_link
from oarjax.system.yaml_tree import read_yaml

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
    "rollout.devices",
    "rollout.tensor",
    "compile_ahead",
    "policy.remat",
    "policy.unroll",
    "policy.head_chunk",
    "update.microbatch",
    "rollout.completion_bucket",
    "sft.microbatch",
    "sft.completion_bucket",
    "credit.masking.chunk",
    "credit.masking.buckets",
    "grading.deadline",
    "grading.memory_mb",
)
"""Fields that may also differ; they change the order of sums, or which answers are graded in time."""

PROGRESS = ("start", "sft.json", "checkpoints.json", "checkpoints/*", "*/checkpoints.json", "*/*/checkpoints.json")
"""Files that make a run resumable: once one of them exists, the run's config and inputs are fixed."""

UNSEALED = ("start.json", "metrics.jsonl", "completions.jsonl", "samples/*.json", "rollouts/*.jsonl")
"""Files that a run without progress may have left; another config removes them."""

SHOWN = 5  # differences that are listed in full


def start_folder(run: Path, name: str) -> Path | None:
    """Return a run's start folder: below its own folder, or beside it for runs of studies."""
    return next((folder for folder in (run / name, run.parent / name) if folder.is_dir()), None)


class Differences(NamedTuple):
    """Fields or inputs that differ, as "name was this, is that"."""

    refused: list[str]
    rounding: list[str]  # allowed, but they change the run's results, if only by rounding
    harmless: list[str]

    def words(self) -> str:
        """List all allowed differences in a line; empty without any."""
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
    """Join the first few differences, and count the others."""
    more_note = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more_note


REMOVED = ("report.controls",)
"""Fields that saved configs may have and that a config has not; a run does not need them to resume."""


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config without removed fields."""
    result = dict(tree)
    for section, _, field in (name.partition(".") for name in REMOVED):
        if isinstance(result.get(section), Mapping):
            result[section] = {name: value for name, value in result[section].items() if name != field}
    return result


def saved_config(folder: Path) -> Config:
    """Read the config of a run's folder.

    Raises:
        ConfigError: the file is missing or is not a config.
    """
    path = folder / "config.yaml"
    return parse_config(without_removed(read_tree(path)), source=str(path))


def differences(before: Mapping[str, Any], cfg: Config, *, extend: bool = False) -> Differences:
    """Compare a saved config with this one; with ``extend`` more iterations are allowed whatever the schedule."""
    saved, current = flatten(_complete(before)), flatten(cfg.model_dump(mode="json"))
    result, unread = Differences([], [], []), tuple(f"credit.{name}." for name in unread_settings(cfg.credit.method))
    for name in sorted(saved | current):
        if saved.get(name) == current.get(name):
            continue
        # More iterations are the same run for longer, unless its learning rate was to reach 0 by the old end.
        allowed = extend or cfg.optim.schedule == "constant"
        longer = allowed and name == "iterations" and current[name] > saved.get(name, 0)
        kind = result.harmless if name.startswith((*HARMLESS, *unread)) else result.refused
        kind = result.rounding if longer or name.startswith(ROUNDING) else kind
        kind.append(f"{name} was {in_yaml(saved.get(name))}, is {in_yaml(current.get(name))}")
    return result


def _complete(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved config with newer fields at their defaults, or unchanged if it cannot be read."""
    try:
        return parse_config(without_removed(before)).model_dump(mode="json")
    except ConfigError:
        return before


def refuse_another_config(before: Mapping[str, Any], cfg: Config, *, what: str, extend: bool = False) -> Differences:
    """Compare configs, and return the allowed ``differences``.

    Raises:
        ConfigError: ``what`` holds another run; lists the fields that differ, and those that may.
    """
    changes = differences(before, cfg, extend=extend)
    if changes.refused:
        harmless = f"; these may differ: {changes.words()}" if changes.words() else ""
        hint = "--extend takes more, not fewer: " if extend and "iterations was" in str(changes.refused) else ""
        if not differences(before, cfg, extend=True).refused:
            hint = f"rates by optim.schedule={cfg.optim.schedule} end with iterations: pass --extend to train longer, "
        raise ConfigError(
            f"run_dir: {what} holds a run of another config ({listed(changes.refused)}); {hint}set another "
            f"run_dir=..., restore that config to resume it, or pass --restart to move it aside and start "
            f"over{harmless}"
        )
    return changes


def has_progress(folder: Path) -> bool:
    """Return True if a folder holds work that another config must not touch.

    That is a checkpoint or a warm start, and for runs without checkpoints the lines of metrics.jsonl. A run that ended
    before its first checkpoint keeps nothing, so its config may change.

    Raises:
        StorageError: the folder cannot be read, so it may hold such work.
    """
    return any(any(_matches(folder, part)) for part in PROGRESS) or counts_by_lines(folder)


def _matches(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the paths below a folder that match; unlike pathlib's glob fail where the storage does."""
    part, _, remaining = pattern.partition("/")
    for name in names_in(folder) if "*" in part else [part]:
        if not fnmatchcase(name, part) or name == "lost+found":  # of a disk, which users may not read
            continue
        if remaining:
            yield from _matches(folder / name, remaining)
        elif exists(folder / name):
            yield folder / name


def counts_by_lines(run: Path) -> bool:
    """Return True if metrics.jsonl counts as progress: the run saves nothing else, or it has ended."""
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


def refuse_another_run(folder: Path, cfg: Config, *, extend: bool = False) -> Differences:
    """Compare the folder's config with this one, once it has progress, and return the allowed ``differences``.

    Raises:
        ConfigError: the folder holds another run; lists the fields that differ.
        StorageError: the folder's config cannot be read.
    """
    config_file = folder / "config.yaml"
    if not exists(config_file) or not has_progress(folder):
        return NO_DIFFERENCES
    try:
        saved = read_yaml(config_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_read(config_file, error) from error
    except ValueError as error:  # not UTF-8, or not YAML
        saved = str(error).splitlines()[0]
    if not isinstance(saved, Mapping):
        raise ConfigError(
            f"run_dir: {config_file} is not the config that the run wrote ({saved}); put a good copy there, or give "
            "another run_dir=..."
        )
    return refuse_another_config(saved, cfg, what=str(folder), extend=extend)


def claim(folder: Path, cfg: Config, *, extend: bool = False) -> Path:
    """Create the run's folder with its whole config and its id, or resume it with the same config.

    Call with the folder's lock held. A folder without progress accepts any config; files of an earlier attempt with
    another config are removed. A folder with progress keeps its config.yaml until ``record_config``.

    Raises:
        ConfigError: the folder holds another run, or cannot be written to.
    """
    refuse_another_run(folder, cfg, extend=extend)
    text, config_file = _as_text(cfg.model_dump(mode="json")), folder / "config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if exists(config_file) and not has_progress(folder) and config_file.read_bytes() != text.encode():
            for path in (p for name in UNSEALED for p in folder.glob(name)):
                path.unlink()
        if not exists(folder / ID):
            write_durably(folder / ID, json.dumps({"id": _sealed_id(folder) or secrets.token_hex(16)}) + "\n")
        if not exists(config_file) or not has_progress(folder):
            write_durably(config_file, text)
    except OSError as error:
        if error.errno not in IMPOSSIBLE or has_progress(folder):  # it starts or resumes once its storage is back
            raise cannot_write(config_file, error) from error
        cause = "it is a file" if folder.is_file() else str(error)
        raise ConfigError(f"run_dir: cannot write to {folder}: {cause}; set another run_dir=...") from error
    return folder


def record_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the config of a run that resumes, once nothing can refuse it any more."""
    write_durably(folder / "config.yaml", _as_text(fields))


def _as_text(fields: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(fields), sort_keys=False)


ID = "run.json"


def mend_id(folder: Path) -> str | None:
    """Write run.json again if it holds no id; return what was done, None if nothing. Call with the lock held.

    Raises:
        ConfigError: its checkpoints are of several runs.
        StorageError: the file cannot be read or written.
    """
    if not exists(folder / ID) or run_id(folder) is not None:
        return None
    sealed = _sealed_id(folder)
    try:
        write_durably(folder / ID, json.dumps({"id": sealed or secrets.token_hex(16)}) + "\n")
    except OSError as error:
        raise cannot_write(folder / ID, error) from error
    outcome = (
        "the id of its checkpoints is in it again" if sealed else "it has a new id, since no checkpoint has the old one"
    )
    return f"{folder / ID} held no id, as after an interrupted copy: {outcome}"


def _sealed_id(folder: Path) -> str | None:
    """Return the run id that all checkpoints of a folder carry, whose own file was lost; None without such an id.

    Raises:
        ConfigError: they are of several runs.
    """
    manifests = (read_manifest(folder / "checkpoints" / name) for name in names_in(folder / "checkpoints"))
    ids = {manifest.get("run") for manifest in manifests if manifest is not None} - {None}
    if len(ids) > 1:
        ids_text = ", ".join(sorted(str(value)[:8] for value in ids))
        raise ConfigError(
            f"run_dir: {folder / ID} holds no id, and checkpoints beside it are of several runs ({ids_text}); remove "
            "those that were copied there"
        )
    return ids.pop() if ids else None


def run_id(folder: Path) -> str | None:
    """Return the id of a run folder, or None if it has none.

    Raises:
        StorageError: its file cannot be read.
    """
    try:
        saved_id = json.loads((folder / ID).read_text(encoding="utf-8"))["id"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cannot_read(folder / ID, error) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return saved_id if isinstance(saved_id, str) else None


def put_aside(folder: Path) -> Path | None:
    """Rename a run folder, so that a new run can start at its path; return the new path, or None without a folder.

    Raises:
        ConfigError: a process is using the folder, or a run in it; or it holds other files than a run's.
        StorageError: the folder cannot be renamed.
    """
    if not exists(folder) or not (contents := set(names_in(folder)) - {LOCK}):
        return None
    if not contents & RECORDS:
        raise ConfigError(
            f"run_dir: {folder} is not the folder of a run (it has no config.yaml), so --restart leaves it as it is; "
            "set another run_dir=..."
        )
    names = (folder.with_name(f"{folder.name}.old{n}") for n in ("", *(f"-{n}" for n in range(2, 10_000))))
    with ExitStack() as stack:
        inside = [at.parent for name in RECORDS for depth in ("*", "*/*") for at in folder.glob(f"{depth}/{name}")]
        for run in sorted({folder, *inside}):
            stack.enter_context(locked(run))
        target = next(name for name in names if not exists(name))
        try:
            folder.rename(target)
        except OSError as error:
            raise cannot_write(target, error) from error
    return target


def put_back(aside: Path, folder: Path) -> bool:
    """Rename a folder back that was put aside, if the new run at its path ended before it had a config."""
    if exists(folder / "config.yaml"):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return True


LOCK = "lock"
RECORDS = {"config.yaml", "run.json", "inputs.json"}
"""Files that every run's folder has, at least one of them."""


@contextmanager
def locked(folder: Path, *, option: str = "run_dir=...") -> Iterator[None]:
    """Lock a folder against other processes. The system releases the lock when the process ends.

    The lock's file stays; by itself it locks nothing. On network file systems the lock holds between hosts if the file
    system supports it (NFS does, mounted buckets do not). ``option`` names the folder in errors. While the lock is
    held, every write below the folder first checks that the file at its path is still the locked one, so that a process
    whose folder was moved away writes nothing into a new run at the old path.

    Raises:
        ConfigError: another process holds the lock (with its number and host), or the folder cannot be created.
        StorageError: the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_no_link(path, "a+", encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR) or (error.errno in IMPOSSIBLE and not exists(folder)):
            name = option.removesuffix("=...")
            raise ConfigError(f"{name}: cannot write to {folder}: {error}; set another {option}") from error
        raise cannot_write(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked_stat = os.fstat(file.fileno())
        except BlockingIOError:
            holder = lock_holder(path)
            process = "process {} on {}".format(*holder) if holder else "another process"
            raise ConfigError(
                f"{option.removesuffix('=...')}: {folder} is in use by {process}; wait until it has ended, stop "
                f"it, or set another {option}"
            ) from None
        except OSError as error:  # a file system without locks
            raise cannot_write(path, error) from error

        def check() -> None:
            try:
                current = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                current = None
            except OSError as error:
                raise cannot_write(path, error) from error
            if current is None or (current.st_dev, current.st_ino) != (locked_stat.st_dev, locked_stat.st_ino):
                raise FolderTaken(
                    f"{folder}: the folder was moved, replaced or unmounted while this process used it; nothing was "
                    "written to its path since. Resume with run_dir= where the folder is now"
                )

        check()
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except OSError as error:  # a full disk: the lock holds, but does not name its process
            if error.errno not in FULL:
                raise cannot_write(path, error) from error
        with guarded(folder, check):
            yield


FULL = {errno.ENOSPC, errno.EDQUOT}
IMPOSSIBLE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG}
"""Reasons why a folder cannot be created, for which the user should choose another."""


def lock_holder(path: Path) -> tuple[int, str] | None:
    """Return number and host of the process that last held a lock; None if it has not written them."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
