"""Files that must survive a kill, a full disk and a power cut: whole or not at all, and an error that names them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from oarjax.errors import UserError
from oarjax.system.json import to_json

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
DISK |= {errno.ENOTCONN, errno.ENODEV, errno.ETIMEDOUT}  # of a mount whose server is gone
"""What a full, unwritable or vanished disk answers."""


class StorageError(UserError, RuntimeError):
    """A file of a run cannot be written or read; names the file, the cause and the remedy."""


def cannot_write(path: Path, error: BaseException) -> StorageError:
    """What to say of a write that failed."""
    cause = str(error).strip() or type(error).__name__
    return StorageError(
        f"cannot write {path}: {cause}; free space, or make the folder writable and mounted again, and go on with the "
        "same command (checkpoint.on_failure=warn trains on without it)"
    )


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Errors of the disk while something is written to ``path``, told as such.

    Raises:
        StorageError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        named = error.filename2 or error.filename  # of a copy, the second is what is written
        raise cannot_write(Path(named) if named else path, error) from error


def write_durably(path: Path, text: str) -> None:
    """Replace a file by new text: after a crash it holds the old text or the new, on disk.

    Raises:
        OSError: nothing was changed.
    """
    half = path.with_name(f".{path.name}.half")
    try:
        with half.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_files(folder: Path) -> None:
    """Put a folder without folders in it on disk: every file, and their names.

    Raises:
        OSError: it is not known what is on disk.
    """
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Failures:
    """What becomes of a run whose files cannot be written.

    Args:
        policy: "stop" lets the error end the run; "warn" says it, each text once, and goes on.
        say: prints a warning of a key, unless it has printed that one.
    """

    def __init__(self, policy: Literal["stop", "warn"], say: Callable[[str, str], object]):
        self._policy, self._say = policy, say

    @contextmanager
    def handled(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if self._policy == "stop":
                raise
            self._say(str(error), f"{error}. Going on without (checkpoint.on_failure is warn)")


# Lines of JSON ----------------------------------------------------------------------------------------------------


class Lines:
    """A file of JSON lines, open to append after its last whole line, or after ``position`` bytes.

    A line is in the file whole or not at all, and with the operating system once ``write`` returns. ``short`` says
    how many bytes of ``position`` were missing from the file. The folder must be there: made here, it might be made on
    the disk below a mount that is gone.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, position: int | None = None):
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
            size = path.stat().st_size
            self.short = max((position or 0) - size, 0)
            self._file.truncate(_end_of_lines(path) if position is None or self.short else position)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line in strict JSON: numbers that are not finite become null.

        Raises:
            StorageError: the file is as it was.
        """
        line = (to_json(record) + "\n").encode()
        try:
            before = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(before)  # half a line would spoil the next one
                raise
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def sync(self) -> int:
        """Put the file on disk; its size in bytes, to go on from.

        Raises:
            StorageError: it is not known what is on disk.
        """
        try:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, nothing where there is no file. A half-written last line is left out.

    Raises:
        StorageError: a line before the last one is damaged: no JSON, or no record.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, got {type(record).__name__}")
        except ValueError as error:  # of JSON, or of its encoding
            if number == len(lines):  # no newline after it: cut by a kill
                return
            raise StorageError(
                f"{path}, line {number}: not JSON ({error}); put a good copy of the file there, or remove the line to "
                "go on without it"
            ) from None
        yield record


def _end_of_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1
