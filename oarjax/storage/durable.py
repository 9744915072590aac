"""Write files atomically, so that they survive a kill, a full disk and a power cut; errors name the file."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from oarjax.errors import ConfigError, UserError
from oarjax.system.json import to_json
from oarjax.system.paths import open_no_link, special_kind

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
NO_PATH = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
"""Errors of a path that no storage can have: it will not work later either."""
DISK |= NO_PATH | {errno.ENOTCONN, errno.ENODEV, errno.ETIMEDOUT}  # of a mount whose server is gone
"""Errors of a full, unwritable or lost disk."""


class StorageError(UserError, RuntimeError):
    """Raised when a file of a run cannot be written or read; names the file, the cause and the remedy.

    Exit code 75 (EX_TEMPFAIL): the same command resumes once the storage works again.
    """

    exit_code = 75


class FolderTaken(StorageError):
    """Raised when the run's folder was moved or replaced during the run: its path now belongs to something else."""


class DamagedError(StorageError):
    """Raised when a file of a run differs from what was written. Exit code 2: the same command would fail again."""

    exit_code = 2


class ImpossiblePath(StorageError):
    """Raised for a path that is too long, a loop of links, leads through a file, or to a folder. Exit code 2."""

    exit_code = 2


def cannot_write(path: Path, error: BaseException) -> StorageError:
    """Return the error for a failed write."""
    cause = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.errno in NO_PATH:
        return ImpossiblePath(f"cannot write {path!s:.200}: {cause:.200}; choose another path")
    return StorageError(
        f"cannot write {path}: {cause}; free space, or make the folder writable and mounted again, and give the same "
        "command: a run resumes (with checkpoint.on_failure=warn it trains on without the file)"
    )


def cannot_read(path: Path, error: BaseException) -> StorageError:
    """Return the error for a failed read: the file may be intact, so nothing may be changed because of it."""
    cause = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.errno in NO_PATH:
        return ImpossiblePath(f"cannot read {path!s:.200}: {cause:.200}; choose another path")
    return StorageError(
        f"cannot read {path}: {cause}; nothing was changed. Make it readable, or mount its disk again, and resume with "
        "the same command"
    )


def in_mounted_bucket(path: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Return True if a path lies in a bucket that gcsfuse has mounted."""
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:  # no Linux
        return False
    resolved, kinds = path.absolute(), {}
    for _, mount, kind, *_ in lines:
        mount = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), mount))  # a space is \040 there
        if resolved.is_relative_to(mount):
            kinds[len(mount.parts)] = kind
    return bool(kinds) and kinds[max(kinds)] == "fuse.gcsfuse"


def exists(path: Path) -> bool:
    """Return True if a file exists, and False only if the storage confirms that it does not.

    Raises:
        StorageError: the storage returns an error (EIO, ESTALE, permission).
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise cannot_read(path, error) from error
    return True


def names_in(folder: Path) -> list[str]:
    """List a folder; empty if it is missing. pathlib's glob would also find nothing in one that cannot be read.

    Raises:
        StorageError: the storage returns an error.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_read(folder, error) from error


def refuse_special(*folders: Path) -> None:
    """Refuse folders in which somebody put a pipe, a socket or a device: reading it may never end.

    Raises:
        ConfigError: names the first one.
    """
    folders_left = [os.fspath(folder) for folder in folders]
    while folders_left:
        try:
            entries = sorted(os.scandir(folders_left.pop()), key=lambda entry: entry.name)
        except OSError:  # missing, or reported by whoever reads it
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders_left.append(entry.path)
            elif not entry.is_file(follow_symlinks=False) and (kind := special_kind(entry.path)):
                raise ConfigError(f"{entry.path}: expected a file, got {kind}; remove it")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the disk's errors during a write to ``path`` into errors for the user.

    Raises:
        StorageError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        name = error.filename2 or error.filename  # in a copy, the second file is written
        raise cannot_write(Path(name) if name else path, error) from error


# Guards -----------------------------------------------------------------------------------------------------------

_guards: dict[Path, Callable[[], None]] = {}


@contextmanager
def guarded(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Call ``check`` before every write of this module below ``folder``; it raises to prevent the write."""
    key = folder.absolute()
    outer_check = _guards.get(key)
    _guards[key] = check
    try:
        yield
    finally:
        _guards.pop(key)
        if outer_check is not None:
            _guards[key] = outer_check


def check_guards(path: Path) -> None:
    """Call the guard of the nearest guarded folder above ``path``, for writers outside this module.

    Raises:
        StorageError: the folder no longer belongs to this process.
    """
    if _guards:
        path = path.absolute()
        for folder in (path, *path.parents):
            if folder in _guards:
                _guards[folder]()
                return


def write_durably(path: Path, text: str) -> None:
    """Replace a file with new text: after a crash the disk holds the old text or the new text.

    Links at its place, which may be somebody else's, are replaced and not followed.

    Raises:
        OSError: nothing was changed.
        StorageError: nothing was changed, because the folder belongs to another run now.
    """
    check_guards(path)
    half = path.with_name(f".{path.name}.half")
    try:
        half.unlink(missing_ok=True)
        with half.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_files(folder: Path) -> None:
    """Sync a flat folder to disk: every file, and the names.

    Raises:
        OSError: the content of the disk is unknown.
    """
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Failures:
    """Stop a run whose files cannot be written, or continue with a warning.

    Args:
        policy: "stop" lets the error end the run; "warn" prints each text once, and the run continues.
        say: prints a warning under a key, once per key.
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
    """Append to a file of JSON lines after its last complete line, or after ``position`` bytes.

    Lines are written atomically, and the operating system has them once ``write`` returns. ``short`` is the number of
    bytes of ``position`` that the file lacks. The folder must exist: created here, it might lie on the disk below a
    lost mount.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, position: int | None = None):
        self.path = path
        check_guards(path)
        try:
            self._file = open_no_link(path, "ab", buffering=0)
            size = path.stat().st_size
            self.short = max((position or 0) - size, 0)
            self._file.truncate(_end_of_lines(path) if position is None or self.short else position)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line of strict JSON: numbers that are not finite become null.

        Raises:
            StorageError: the write failed; the file is unchanged.
        """
        check_guards(self.path)
        line = (to_json(record) + "\n").encode()
        try:
            size = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(size)  # half a line would damage the next one
                raise
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def sync(self) -> int:
        """Sync the file to disk and return its size in bytes, the position to resume from.

        Raises:
            StorageError: the sync failed; the content of the disk is unknown.
        """
        try:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        self._file.close()


def prune_numbered(folder: Path, suffix: str, before: int) -> None:
    """Remove the files NUMBER + ``suffix`` of iterations 1 .. ``before``; every resumed run needs those of number 0."""
    for path in folder.glob(f"[0-9]*{suffix}"):
        number = path.name.removesuffix(suffix)
        if number.isdecimal() and 0 < int(number) <= before:
            path.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines, none without a file; skip a half-written last line.

    Raises:
        DamagedError: a line before the last is not a JSON object.
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
    """Return the number of bytes up to the end of the last complete line."""
    return path.read_bytes().rfind(b"\n") + 1
