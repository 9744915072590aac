"""Check before training that the export can be written at its end."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from oarjax.errors import ConfigError
from oarjax.models.weights import parameter_count
from oarjax.run.policy import stored_dtype_of
from oarjax.run.run import Run
from oarjax.storage.durable import DISK, NO_PATH, StorageError, cannot_write, exists


def check_export(run: Run, target: Path) -> None:
    """Reject a folder that the export would fail on; call with the run's folder locked, before training.

    Raises:
        ConfigError: the folder is a file, holds something other than a policy, or is not writable.
        StorageError: it cannot be written, or its disk has no room for the policy.
    """
    remedy = "give another export.folder, or null for no export"
    check_new_folder(target, field="export.folder", remedy=remedy)
    size = np.dtype(
        run.cfg.export.dtype or stored_dtype_of(run.cfg.policy, run.cfg.lora, run.mesh)
    ).itemsize * parameter_count(run.model)
    if not exists(target) and size > (free := shutil.disk_usage(_above(target)).free):
        raise StorageError(
            f"export.folder: {target} will take {size / 1e9:.2g} GB, and its disk has {free / 1e9:.2g} GB left; free "
            "space and run the same command, or set export.dtype=bfloat16"
        )


def check_new_folder(target: Path, *, field: str, remedy: str) -> None:
    """Reject a folder that cannot be written, or replaced by a policy.

    Raises:
        ConfigError, StorageError: with the reason; the first names the remedy.
    """
    if exists(target) and not (target.is_dir() and (not any(target.iterdir()) or exists(target / "config.json"))):
        raise ConfigError(f"{field}: {target} exists and is not a policy that may be replaced; remove it, or {remedy}")
    if os.path.ismount(target):
        raise ConfigError(f"{field}: a disk is mounted at {target}, which cannot be replaced as a whole; {remedy}")
    try:
        with tempfile.NamedTemporaryFile(dir=_above(target), prefix=f".{target.name}-") as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        if error.errno in DISK - NO_PATH - {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise cannot_write(target, error) from error
        raise ConfigError(f"{field}: cannot write to {target}: {error}; {remedy}") from error


def _above(target: Path) -> Path:
    return next(path for path in target.absolute().parents if exists(path))
