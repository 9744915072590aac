"""The manifest of a checkpoint: what must be in the folder, byte for byte, and the record of where the run stood.

It is written last. A folder without one was not finished; one whose files differ from it is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oarjax.host.durable import write_durably

NAME = "manifest.json"
READERS = 8  # files hashed at once


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """Put every file of the folder on disk, and then size and SHA-256 of each, with the record, into its manifest.

    Raises:
        OSError: there is no manifest then.
    """
    files = {str(path.relative_to(folder)): path for path in _files(folder)}
    with ThreadPoolExecutor(READERS) as readers:
        found = dict(zip(files, readers.map(_digest, files.values())))
    body = {"record": record, "files": found}
    write_durably(folder / NAME, json.dumps({"sha256": _digest_of(body), **body}))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest's record; None where there is no manifest, or not the one that was written."""
    body = _read(folder)
    return None if body is None else body["record"]


def damage(folder: Path) -> str | None:
    """What of a folder is not as its manifest says, in words; None where all of it is."""
    if not (folder / NAME).exists():
        return f"{NAME} is missing"
    body = _read(folder)
    if body is None:
        return f"{NAME} is not what was saved"
    with ThreadPoolExecutor(READERS) as readers:
        said = readers.map(lambda item: _difference(folder / item[0], item[0], item[1]), body["files"].items())
        return next((text for text in said if text is not None), None)


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        tree = json.loads((folder / NAME).read_text(encoding="utf-8"))
        body = {"record": tree["record"], "files": tree["files"]}
        return body if _digest_of(body) == tree["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):  # UnicodeDecodeError is a ValueError
        return None


def _difference(path: Path, name: str, saved: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != saved["size"]:
            return f"{name} has {size} bytes and {saved['size']} were saved"
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == saved["sha256"]
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None if same else f"{name} is not what was saved (its SHA-256 differs)"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is hashed is in memory, perhaps not on disk yet
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
