"""A run folder belongs to one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oarjax.config import ConfigError
from oarjax.host.durable import cannot_write

NAME = "lock"


@contextmanager
def locked(folder: Path, *, given: str = "run_dir=...") -> Iterator[None]:
    """Hold a folder against other processes. The system lets go of it when the process ends, however it ends.

    The file that is locked stays; by itself it locks nothing. On network file systems the lock holds between hosts
    where the file system passes it on (NFS does, mounted buckets do not). ``given`` is how the user named the folder.

    Raises:
        ConfigError: another process holds it; with its number and host.
        StorageError: the folder cannot be written to.
    """
    path = folder / NAME
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
