"""Record what a run was made from in inputs.json, and compare it when the run resumes.

Every input has a name and a short value: a SHA-256, a version, a setting. The part of the name before the slash says
what a difference means:

    rows/ policy/ code/ start/ random/    another run: refused
    version/ setting/ environment/ device/    the same run up to rounding: allowed, and reported
    harmless/    allowed, and reported
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from oarjax.config import ConfigError
from oarjax.runs.durable import DamagedError, StorageError, cannot_read, check_guards, write_durably
from oarjax.runs.folder import NO_DIFFERENCES, Differences, has_progress, listed
from oarjax.system.devices import cpu_threads

FILE = "inputs.json"
REFUSED = ("rows/", "policy/", "code/", "start/", "random/")
HARMLESS = ("harmless/",)
LATER = ("start/",)
"""Inputs that the run makes itself, after the others were recorded."""

PACKAGES = ("oarjax", "jax", "jaxlib", "libtpu", "numpy", "optax", "tokenizers", "transformers", "math-verify", "sympy")
RANDOM = ("jax_default_prng_impl", "jax_threefry_partitionable", "jax_enable_x64")
"""Settings of JAX that change every random draw."""

SETTINGS = ("jax_default_matmul_precision", "jax_numpy_dtype_promotion")
ENVIRONMENT = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "TF_CUDNN_DETERMINISTIC",
)
SETTLED = 2.0
"""Seconds after its last change from which on a file's times tell it from a later content."""


class Stat(NamedTuple):
    """The metadata of a file whose content is known; ctime cannot be set back by ordinary means."""

    size: int
    mtime: int
    ctime: int
    inode: int
    device: int
    sha256: str


class Known(NamedTuple):
    """The content of inputs.json."""

    inputs: dict[str, str]
    files: dict[str, Stat]  # path -> what was hashed


def record_inputs(folder: Path, now: Mapping[str, str], files: Mapping[str, Stat] | None = None) -> Differences:
    """Fix a run's inputs, or compare them with those that were fixed, and return the differences that are allowed.

    They are fixed once the folder has progress: until then every call replaces them. Call with the lock held.

    Raises:
        ConfigError: with the inputs that make it another run.
        DamagedError: inputs.json is not what was written.
    """
    known = read_inputs(folder)
    if known is None or not has_progress(folder):
        _write(folder, Known(dict(now), dict(files or {})))
        return NO_DIFFERENCES
    found = compare(known.inputs, now)
    if found.refused:
        raise ConfigError(
            f"run_dir: {folder} was made from other inputs ({listed(found.refused)}); put them back to resume it, "
            "give another run_dir=..., or --restart to put it aside and start anew"
        )
    if files and files != known.files:
        _write(folder, Known(known.inputs, {**known.files, **files}))
    return found


def add_inputs(folder: Path, later: Mapping[str, str]) -> None:
    """Fix inputs that the run has just made itself, such as the weights of its warm start.

    Raises:
        StorageError: they cannot be written.
    """
    known = read_inputs(folder) or Known({}, {})
    _write(folder, Known(known.inputs | dict(later), known.files))


def compare(before: Mapping[str, str], now: Mapping[str, str]) -> Differences:
    """Sort the inputs that differ into those that are refused, those that matter by rounding, and the harmless ones."""
    found = Differences([], [], [])
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name) or (name.startswith(LATER) and name not in before):
            continue
        if name.startswith(LATER) and name not in now:  # compared where it is read, see ``check_files``
            continue
        was, is_now = (_shown(tree.get(name)) for tree in (before, now))
        kind = found.harmless if name.startswith(HARMLESS) else found.rounding
        kind = found.refused if name.startswith(REFUSED) else kind
        kind.append(f"{name} was {was}, is {is_now}")
    return found


def check_files(folder: Path, files: Mapping[str, Path]) -> None:
    """Read files that the run made itself, and compare them with what was recorded when they were written.

    Raises:
        DamagedError: with the first that differs.
        StorageError: one cannot be read.
    """
    known = read_inputs(folder)
    if known is None:
        return
    fixed = {name: value for name, value in known.inputs.items() if name.startswith(LATER)}
    if not fixed:
        return
    now, _ = digests(files)
    for name in sorted({*fixed, *now}):
        if fixed.get(name) != now.get(name):
            raise DamagedError(
                f"{folder / name}: {'is missing' if name not in now else 'is not what the warm start wrote'} (SHA-256 "
                f"was {_shown(fixed.get(name))}, is {_shown(now.get(name))}); put a good copy there, or --restart to "
                "put the run aside and start anew"
            )


def read_inputs(folder: Path) -> Known | None:
    """Return a run's recorded inputs, or None where there are none.

    Raises:
        DamagedError: the file is not what was written.
        StorageError: it cannot be read.
    """
    path = folder / FILE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        tree = json.loads(text)
        body = {"inputs": dict(tree["inputs"]), "files": dict(tree["files"])}
        if tree["sha256"] != _digest_of(body):
            raise ValueError("its own SHA-256 differs")
        return Known(body["inputs"], {name: Stat(*stat) for name, stat in body["files"].items()})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not what was written ({error}); put a good copy there, or remove it to resume without the "
            "comparison"
        ) from None


def _write(folder: Path, known: Known) -> None:
    body = {"inputs": known.inputs, "files": {name: list(stat) for name, stat in known.files.items()}}
    text = json.dumps({"sha256": _digest_of(body), **body}, indent=1, sort_keys=True)
    try:
        check_guards(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / FILE, text + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {folder / FILE}: {error}; free space and run the same command") from error


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    return value[:12] if len(value) == 64 and value.isalnum() else repr(value)


# What there is to record ------------------------------------------------------------------------------------------


def machine_inputs(*, cpu: bool) -> dict[str, str]:
    """Return versions, settings and environment that results depend on; with ``cpu`` the threads of XLA as well.

    XLA divides sums over its threads, so that on a CPU bits depend on how many cores the process may use.
    """
    found = {"version/python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[f"version/{name}"] = version(name)
        except PackageNotFoundError:
            continue
    found |= {f"random/{name}": str(getattr(jax.config, name)) for name in RANDOM}
    found |= {f"setting/{name}": str(getattr(jax.config, name)) for name in SETTINGS}
    found |= {f"environment/{name}": os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    device = jax.devices()[0]
    found["device/kind"] = device.device_kind
    found["device/count"] = str(jax.device_count())
    if cpu:
        found["device/cpu_threads"] = str(cpu_threads())
    found["harmless/machine"] = platform.machine()
    return found


def rows_digest(rows: Iterable[tuple[object, ...]]) -> str:
    """Return the SHA-256 of rows of text and numbers, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def digests(
    files: Mapping[str, Path], known: Mapping[str, Stat] | None = None
) -> tuple[dict[str, str], dict[str, Stat]]:
    """Return name -> SHA-256 of files, and path -> the metadata by which the next call may know them.

    A file of ``known`` whose size, times, inode and device are unchanged is not read again. It counts as unchanged
    only if it had been left alone for ``SETTLED`` seconds when it was hashed, so that no clock tick hides a change.

    Raises:
        StorageError: a file cannot be read.
    """

    def digest(path: Path) -> tuple[str, Stat | None]:
        try:
            at = path.stat()
            meta = (at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev)
            before = (known or {}).get(str(path))
            if before is not None and tuple(before)[:-1] == meta:
                return before.sha256, before
            began = time.time()
            with path.open("rb") as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise cannot_read(path, error) from error
        settled = began - max(at.st_mtime, at.st_ctime) > SETTLED
        return sha, Stat(*meta, sha) if settled else None

    with ThreadPoolExecutor(8) as readers:
        found = list(readers.map(digest, files.values()))
    stats = {str(path): stat for path, (_, stat) in zip(files.values(), found) if stat is not None}
    return {name: sha for name, (sha, _) in zip(files, found)}, stats


def policy_files(folder: Path) -> list[Path]:
    """Return the files of an HF folder that make a policy: weights, configs, tokenizer and templates."""
    endings = {".safetensors", ".json", ".txt", ".jinja", ".model"}
    return sorted(path for path in folder.iterdir() if path.suffix in endings and path.is_file())
