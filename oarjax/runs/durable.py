"""Write files that survive a kill, a full disk and a power cut: whole or not at all, with errors that name them."""

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
    """A file of a run cannot be written or read; names the file, the cause and the remedy. Exit code 75 (EX_TEMPFAIL):
    the same command resumes once the storage works again."""

    exit_code = 75


class FolderTaken(StorageError):
    """The run's folder was moved or replaced while the run was alive: whatever is at its path now is not this run's."""


class DamagedError(StorageError):
    """A file of a run can be read and is not what was written. Exit code 2: the same command would fail again."""

    exit_code = 2


def cannot_write(path: Path, error: BaseException) -> StorageError:
    """Return the error for a failed write."""
    cause = str(error).strip() or type(error).__name__
    return StorageError(
        f"cannot write {path}: {cause}; free space, or make the folder writable and mounted again, and resume with the "
        "same command (checkpoint.on_failure=warn trains on without it)"
    )


def cannot_read(path: Path, error: BaseException) -> StorageError:
    """Return the error for a failed read: the file may be whole, so nothing may be changed because of it."""
    cause = str(error).strip() or type(error).__name__
    return StorageError(
        f"cannot read {path}: {cause}; nothing was changed. Make it readable, or mount its disk again, and resume with "
        "the same command"
    )


def exists(path: Path) -> bool:
    """Tell an absent file from one that the storage does not answer for.

    Raises:
        StorageError: the storage gives an error instead of an answer (EIO, ESTALE, permission).
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise cannot_read(path, error) from error
    return True


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the disk's errors, while something is written to ``path``, into errors for the user.

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


# Guards -----------------------------------------------------------------------------------------------------------

_guards: dict[Path, Callable[[], None]] = {}


@contextmanager
def guarded(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Call ``check`` before every write of this module below ``folder``; it raises to prevent the write."""
    key = folder.absolute()
    before = _guards.get(key)
    _guards[key] = check
    try:
        yield
    finally:
        _guards.pop(key)
        if before is not None:
            _guards[key] = before


def check_guards(path: Path) -> None:
    """Call the guard of the nearest folder above ``path`` that has one; for writers that are not in this module.

    Raises:
        StorageError: the folder is not this process's any more.
    """
    if _guards:
        path = path.absolute()
        for folder in (path, *path.parents):
            if folder in _guards:
                _guards[folder]()
                return


def write_durably(path: Path, text: str) -> None:
    """Replace a file by new text: after a crash it holds the old text or the new, on disk.

    Raises:
        OSError: nothing was changed.
        StorageError: nothing was changed, because the folder is another run's by now.
    """
    check_guards(path)
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
    """Decide whether a run whose files cannot be written ends.

    Args:
        policy: "stop" lets the error end the run; "warn" prints each text once, and the run continues.
        say: prints a warning of a key, unless it has printed that one.
    """

    def __init__(self, policy: Literal["stop", "warn"], say: Callable[[str, str], object]):
        self._policy, self._say = policy, say

    @contextmanager
    def handled(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if self._policy == "stop" or isinstance(error, FolderTaken):
                raise
            self._say(str(error), f"{error}. Continuing without (checkpoint.on_failure is warn)")


# Lines of JSON ----------------------------------------------------------------------------------------------------


class Lines:
    """Append to a file of JSON lines after its last whole line, or after ``position`` bytes.

    A line is in the file whole or not at all, and with the operating system once ``write`` returns. ``short`` says
    how many bytes of ``position`` were missing from the file. The folder must be there: made here, it might be made on
    the disk below a mount that is gone.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, position: int | None = None):
        self.path = path
        check_guards(path)
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
        check_guards(self.path)
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
        """Put the file on disk and return its size in bytes, the position to resume from.

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
    """Yield the records of a file of JSON lines, none where there is no file; skip a half-written last line.

    Raises:
        DamagedError: a line before the last one is no JSON, or no record.
        StorageError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_read(path, error) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, got {type(record).__name__}")
        except (ValueError, RecursionError) as error:  # of JSON, or of its encoding
            if number == len(lines):  # no newline after it: cut by a kill
                return
            raise DamagedError(
                f"{path}, line {number}: not JSON ({error}); put a good copy of the file there, or remove the line to "
                "resume without it"
            ) from None
        yield record


def _end_of_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1
