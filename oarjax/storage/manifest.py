"""Write and check the manifest of a folder: size and SHA-256 of every file, and a record that describes it.

Several processes that wrote the folder hash their own files at the same time: each but the first leaves its numbers in
a seal, and the first puts them into the manifest. So nobody reads back what another process has written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oarjax.storage.durable import cannot_read, exists, write_durably

MANIFEST = "manifest.json"
READERS = 8  # files hashed at once
SEAL_SECONDS = 1800.0  # that the first process waits for the seals of the others
OWN = re.compile(r"\.?(manifest|seal-\d+)\.json(\.half)?")
OF_PROCESS = re.compile(r"ocdbt\.process_(\d+)")  # the folder of the files that Orbax wrote on one process


def write_manifest(folder: Path, record: dict[str, Any], *, processes: int = 1) -> None:
    """Sync every file of a folder to disk, then write the manifest with the record, and size and SHA-256 of each file.

    Of several ``processes`` the first calls this, and takes what the seals of the others say of their files.

    Raises:
        OSError: a write failed, or a seal did not come; there is no manifest.
    """
    digests = _digests(folder, process=0, processes=processes)
    seals = [_seal(folder, process) for process in range(1, processes)]
    until = time.monotonic() + SEAL_SECONDS
    for seal in seals:
        while not exists(seal):
            if time.monotonic() > until:
                raise OSError(f"{seal.name} did not come within {SEAL_SECONDS:g} s: did that process fail to write?")
            time.sleep(0.05)
        digests |= json.loads(seal.read_text(encoding="utf-8"))
    body = {"record": record, "files": dict(sorted(digests.items()))}
    write_durably(folder / MANIFEST, json.dumps({"sha256": _digest_of(body), **body}))
    for seal in seals:
        seal.unlink(missing_ok=True)


def write_seal(folder: Path, *, process: int, processes: int) -> None:
    """Sync the files of one process that is not the first, and leave their sizes and SHA-256 for the manifest.

    Raises:
        OSError: a write failed.
    """
    write_durably(_seal(folder, process), json.dumps(_digests(folder, process=process, processes=processes)))


def _seal(folder: Path, process: int) -> Path:
    return folder / f"seal-{process:04d}.json"


def _digests(folder: Path, *, process: int, processes: int) -> dict[str, Any]:
    """Hash the files of one process: those below its own folder; all others are the first one's."""
    files = {}
    for path in _files(folder):
        name = path.relative_to(folder)
        of = OF_PROCESS.fullmatch(name.parts[0])
        owner = int(of[1]) if of and int(of[1]) < processes else 0
        if owner == process:
            files[str(name)] = path
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(files, readers.map(_digest, files.values())))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest's record, or None if the manifest is missing or differs from what was written.

    Raises:
        StorageError: the manifest cannot be read.
    """
    body = _read(folder)
    return None if body is None else body["record"]


def misplaced(at: Path, run: str | None) -> str | None:
    """Describe how a checkpoint's name or run differs from its manifest, or return None.

    Raises:
        StorageError: the manifest cannot be read.
    """
    noted = read_manifest(at)
    if noted is None:
        return None
    iteration, of = noted.get("iteration"), noted.get("run")
    if iteration is not None and iteration != int(at.name):
        return f"checkpoint {at} is of iteration {iteration}: it was renamed; give it the name {iteration:06d} again"
    if of is not None and run is not None and of != run:
        return (
            f"checkpoint {at} belongs to run {of[:8]}, but this is run {run[:8]}: it was copied here; remove it, or "
            "resume the run that it belongs to"
        )
    return None


def damage(folder: Path) -> str | None:
    """Describe the first difference between a folder and its manifest, or return None.

    Raises:
        StorageError: a file cannot be read, so it may be intact.
    """
    if not exists(folder / MANIFEST):
        return f"{MANIFEST} is missing"
    body = _read(folder)
    if body is None:
        return f"{MANIFEST} is not what was saved"
    with ThreadPoolExecutor(READERS) as readers:
        texts = readers.map(lambda item: _difference(folder / item[0], item[0], item[1]), body["files"].items())
        return next((text for text in texts if text is not None), None)


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        tree = json.loads(text)
        body = {"record": tree["record"], "files": tree["files"]}
        return body if _digest_of(body) == tree["sha256"] else None
    except (ValueError, KeyError, TypeError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def _difference(path: Path, name: str, saved: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != saved["size"]:
            return f"{name} has {size} bytes, but {saved['size']} were saved"
        with path.open("rb") as file:
            matches = hashlib.file_digest(file, "sha256").hexdigest() == saved["sha256"]
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        raise cannot_read(path, error) from error
    return None if matches else f"{name} is not what was saved (its SHA-256 differs)"


def _files(folder: Path) -> list[Path]:
    """List the files of a folder but its manifest and seals, those that are being written too."""
    return sorted(
        path
        for path in folder.rglob("*")
        if not (path.parent == folder and OWN.fullmatch(path.name)) and path.is_file()
    )


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # hashing reads memory, which may not be on disk yet
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def notes_file(folder: Path) -> Path:
    """Return the file beside a folder of checkpoints that names the newest."""
    return folder.with_name(f"{folder.name}.json")
