"""Record a run's inputs in inputs.json, and compare them when the run resumes.

Every input has a name and a short value: a SHA-256, a version, a setting. The part of the name before the slash
determines the effect of a difference:

    rows/ policy/ code/ start/ random/    another run: refused
    version/ setting/ environment/ device/    the same run up to rounding: allowed and reported
    harmless/    allowed and reported
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

from oarjax.errors import ConfigError
from oarjax.storage.durable import DamagedError, StorageError, cannot_read, check_guards, storage_errors, write_durably
from oarjax.storage.folder import NO_DIFFERENCES, Differences, has_progress, listed
from oarjax.system.devices import cpu_threads

FILE = "inputs.json"
REFUSED = ("rows/", "policy/", "code/", "start/", "random/")
HARMLESS = ("harmless/",)
LATER = ("start/",)
"""Inputs that the run itself produces, after the others were recorded."""

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
"""Seconds that a file must be unchanged before its times identify its content."""


class Stat(NamedTuple):
    """The metadata and digest of a file. Ordinary programs cannot reset ctime."""

    size: int
    mtime: int
    ctime: int
    inode: int
    device: int
    sha256: str


class RecordedInputs(NamedTuple):
    """The content of inputs.json."""

    inputs: dict[str, str]
    files: dict[str, Stat]  # path -> metadata at the time of hashing


def record_inputs(folder: Path, now: Mapping[str, str], files: Mapping[str, Stat] | None = None) -> Differences:
    """Record a run's inputs, or compare them with the record, and return the allowed differences.

    The record is final once the folder has progress: until then every call replaces it, and rollouts that were drawn
    with other inputs are removed. Call with the lock held.

    Raises:
        ConfigError: the inputs belong to another run; lists the differences.
        DamagedError: inputs.json differs from what was written.
        StorageError: a file cannot be written or removed.
    """
    recorded = read_inputs(folder)
    if recorded is None or not has_progress(folder):
        if recorded is None or recorded.inputs != dict(now):
            with storage_errors(folder):
                for path in folder.glob("rollouts/*.jsonl"):
                    path.unlink()
        _write(folder, RecordedInputs(dict(now), dict(files or {})))
        return NO_DIFFERENCES
    changes = compare(recorded.inputs, now)
    if changes.refused:
        raise ConfigError(
            f"run_dir: {folder} was trained from other inputs ({listed(changes.refused)}); restore them to resume it, "
            "set another run_dir=..., or pass --restart to move it aside and start over"
        )
    if files and files != recorded.files:
        _write(folder, RecordedInputs(recorded.inputs, {**recorded.files, **files}))
    return changes


def add_inputs(folder: Path, later: Mapping[str, str]) -> None:
    """Record inputs that the run itself has produced, such as the weights of its warm start.

    Raises:
        StorageError: they cannot be written.
    """
    recorded = read_inputs(folder) or RecordedInputs({}, {})
    _write(folder, RecordedInputs(recorded.inputs | dict(later), recorded.files))


def compare(before: Mapping[str, str], now: Mapping[str, str]) -> Differences:
    """Sort the differing inputs into refused ones, those that affect rounding, and harmless ones."""
    result = Differences([], [], [])
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name) or (name.startswith(LATER) and name not in before):
            continue
        if name.startswith(LATER) and name not in now:  # ``check_files`` compares it
            continue
        was, is_now = (_shown(tree.get(name)) for tree in (before, now))
        kind = result.harmless if name.startswith(HARMLESS) else result.rounding
        kind = result.refused if name.startswith(REFUSED) else kind
        kind.append(f"{name} was {was}, is {is_now}")
    return result


def check_files(folder: Path, files: Mapping[str, Path]) -> None:
    """Compare files that the run itself has produced with their record.

    Raises:
        DamagedError: a file differs; names the first.
        StorageError: a file cannot be read.
    """
    recorded = read_inputs(folder)
    if recorded is None:
        return
    fixed = {name: value for name, value in recorded.inputs.items() if name.startswith(LATER)}
    if not fixed:
        return
    current, _ = digests(files)
    for name in sorted({*fixed, *current}):
        if fixed.get(name) != current.get(name):
            raise DamagedError(
                f"{folder / name}: {'is missing' if name not in current else 'is not what the warm start wrote'} "
                f"(SHA-256 was {_shown(fixed.get(name))}, is {_shown(current.get(name))}); put a good copy there, or "
                "pass --restart to move the run aside and start over"
            )


def read_inputs(folder: Path) -> RecordedInputs | None:
    """Return a run's recorded inputs, or None without a record.

    Raises:
        DamagedError: the file differs from what was written.
        StorageError: the file cannot be read.
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
            raise ValueError("its SHA-256 differs")
        return RecordedInputs(body["inputs"], {name: Stat(*stat) for name, stat in body["files"].items()})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not what was written ({error}); put a good copy there, or remove it to resume without the "
            "comparison"
        ) from None


def _write(folder: Path, recorded: RecordedInputs) -> None:
    body = {"inputs": recorded.inputs, "files": {name: list(stat) for name, stat in recorded.files.items()}}
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


# Inputs to record -------------------------------------------------------------------------------------------------


def machine_inputs(*, cpu: bool) -> dict[str, str]:
    """Return versions, settings and environment that results depend on; with ``cpu`` also the threads of XLA.

    XLA splits sums over its threads, so results on a CPU depend on the number of cores by rounding.
    """
    inputs = {"version/python": platform.python_version()}
    for name in PACKAGES:
        try:
            inputs[f"version/{name}"] = version(name)
        except PackageNotFoundError:
            continue
    inputs |= {f"random/{name}": str(getattr(jax.config, name)) for name in RANDOM}
    inputs |= {f"setting/{name}": str(getattr(jax.config, name)) for name in SETTINGS}
    inputs |= {f"environment/{name}": os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    device = jax.devices()[0]
    inputs["device/kind"] = device.device_kind
    inputs["device/count"] = str(jax.device_count())
    if cpu:
        inputs["device/cpu_threads"] = str(cpu_threads())
    inputs["harmless/machine"] = platform.machine()
    return inputs


def rows_digest(rows: Iterable[tuple[object, ...]]) -> str:
    """Return the SHA-256 of rows of text and numbers, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def digests(
    files: Mapping[str, Path], known: Mapping[str, Stat] | None = None
) -> tuple[dict[str, str], dict[str, Stat]]:
    """Return name -> SHA-256 of files, and path -> metadata by which the next call can recognise them.

    A file of ``known`` whose size, times, inode and device are unchanged is not read again. Metadata is returned only
    for files that had not changed for ``SETTLED`` seconds before hashing, so that no clock tick hides a change.

    Raises:
        StorageError: a file cannot be read.
    """

    def digest(path: Path) -> tuple[str, Stat | None]:
        try:
            at = path.stat()
            meta = (at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev)
            cached = (known or {}).get(str(path))
            if cached is not None and tuple(cached)[:-1] == meta:
                return cached.sha256, cached
            start = time.time()
            with path.open("rb") as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise cannot_read(path, error) from error
        settled = start - max(at.st_mtime, at.st_ctime) > SETTLED
        return sha, Stat(*meta, sha) if settled else None

    with ThreadPoolExecutor(8) as readers:
        results = list(readers.map(digest, files.values()))
    stats = {str(path): stat for path, (_, stat) in zip(files.values(), results) if stat is not None}
    return {name: sha for name, (sha, _) in zip(files, results)}, stats


def policy_files(folder: Path) -> list[Path]:
    """Return the files of an HF folder that define a policy: weights, configs, tokenizer and templates."""
    endings = {".safetensors", ".json", ".txt", ".jinja", ".model"}
    return sorted(path for path in folder.iterdir() if path.suffix in endings and path.is_file())
