"""Save and restore the whole state of a run: arrays by Orbax, and a manifest that is written last.

Checkpoints are written in the background. One counts once its manifest is there, and is restored only if every byte is
as the manifest says, at the iteration and in the run that the manifest names. A damaged one is put aside under a name
that says why, and the one before is taken; one that cannot be read is left alone, and the command ends. All processes
call every method; the first one writes the manifests, looks and removes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from oarjax.config import ConfigError
from oarjax.runs.durable import (
    DamagedError,
    StorageError,
    cannot_read,
    cannot_write,
    check_guards,
    exists,
    write_durably,
)
from oarjax.runs.folder import run_id
from oarjax.runs.manifest import MANIFEST, damage, misplaced, read_manifest, write_manifest
from oarjax.system.processes import from_first, is_first, only_first
from oarjax.types import TrainState

NONE, LOST = -1, -2


class Checkpoints:
    """Save, find and restore the checkpoints in one folder, as a context manager that waits for the write in progress.

    Args:
        folder: made if missing. A file of its name with .json beside it says what has been saved, so that a folder
            that is gone is not taken for a run that has not begun.
        keep: how many of the newest to keep, besides the one of the highest score.
        metric: what the scores are of; those of another metric are not compared with.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int, metric: str | None = None):
        self.folder, self._keep, self._metric = folder.absolute(), keep, metric
        self._run = run_id(self.folder.parent)
        self._thread: threading.Thread | None = None
        self._error: StorageError | None = None
        check_guards(self.folder)
        try:
            only_first(lambda: self.folder.mkdir(parents=True, exist_ok=True))
            self._device = self.folder.stat().st_dev
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        self._writer = ocp.StandardCheckpointer()

    def finished(self) -> dict[int, dict[str, Any]]:
        """Return iteration -> manifest of the finished checkpoints, in order; their arrays are not looked at."""
        return finished(self.folder)

    def newest(self) -> int | None:
        """Return the iteration of the newest finished checkpoint, whether its arrays can be trusted or not."""
        return max(self.finished(), default=None)

    def trusted(self, say: Callable[[str], object]) -> int | None:
        """Return the iteration of the newest checkpoint that is byte for byte as it was saved; None before the first.

        Unfinished and damaged newer ones are renamed aside, with a message.

        Raises:
            DamagedError: there were checkpoints, and none is left that can be trusted.
            ConfigError: a checkpoint was renamed, or copied from another run; nothing was changed.
            StorageError: one cannot be read, which does not make it damaged; nothing was changed.
        """
        found = from_first(lambda: self._look(say))
        if found == LOST:
            raise DamagedError(
                f"{self.folder}: no checkpoint is left that can be trusted, and the run had saved one. Mount the "
                f"folder again or put a good copy of a checkpoint there; to start over from the beginning, remove "
                f"{self.folder.name} and {_notes(self.folder).name} in {self.folder.parent}"
            )
        return None if found == NONE else found

    def save(self, iteration: int, state: TrainState, record: dict[str, Any], *, score: float | None = None) -> None:
        """Start writing; returns once the arrays are copied, so that the next update may reuse their memory.

        Args:
            record: where the run stands, as JSON.
            score: by which the best one is kept, higher is better.

        Raises:
            StorageError: this one cannot be written, or the one before could not.
        """
        self.settle()
        at = self._at(iteration)
        check_guards(at)
        state = replace(state, frozen=None)
        if jax.default_backend() == "cpu":  # there a "host copy" is the array's own memory, which updates reuse
            state = jax.tree.map(jnp.copy, state)
        noted = {"record": record, "score": score, "metric": self._metric, "arrays": arrays(state)}
        noted |= {"run": self._run, "iteration": iteration}
        try:
            # Orbax would make the folder anew, on whatever disk lies below a mount that is gone.
            if self.folder.stat().st_dev != self._device:
                raise OSError("the folder is on another device than at the start: was its disk unmounted?")
            self._writer.save(at, _plain(state))
        except Exception as error:  # the writer raises whatever its storage does
            self._forget(at)
            raise cannot_write(at, error) from error
        self._thread = threading.Thread(target=self._finish, args=(at, iteration, noted), name="checkpoint")
        self._thread.start()

    def settle(self, *, wait: bool = True) -> None:
        """Wait for the write in progress, or without ``wait`` only check that it has not failed.

        Raises:
            StorageError: it has; raised once.
        """
        if wait and self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def restore(self, iteration: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return the state, laid out over the devices as ``like`` is, and the record; what is frozen is ``like``'s.

        The params and moments of ``like`` are given up before others are read: there are never two of them.

        Raises:
            ConfigError: it is of another model or optimizer.
            StorageError: it was not finished, or cannot be read.
        """
        at = self._at(iteration)
        noted = read_manifest(at)
        if noted is None:
            raise DamagedError(f"{at} has no manifest: it was not finished; take another")
        check_arrays(at, noted["arrays"], arrays(like))
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _plain(like))
        for array in jax.tree.leaves((like.params, like.opt_state)):
            array.delete()
        try:
            found = self._writer.restore(at, shapes)
        except OSError as error:
            raise cannot_read(at, error) from error
        key = jax.random.wrap_key_data(found.pop("key"), impl=jax.random.key_impl(like.key))
        return replace(like, key=key, **found), noted["record"]

    def best(self) -> int | None:
        """Return the iteration of the highest score, the earliest of equals."""
        found = best(self.folder, self._metric)
        return None if found is None else found[0]

    def scores(self) -> dict[int, float]:
        """Return iteration -> score of the checkpoints that were saved as the best by this metric."""
        return scores(self.folder, self._metric)

    def other_metrics(self) -> list[str]:
        """Return the metrics that checkpoints of this folder were the best by, before another one was chosen."""
        scored = [noted for noted in self.finished().values() if noted["score"] is not None]
        return sorted({str(noted.get("metric", self._metric)) for noted in scored} - {str(self._metric)})

    def __enter__(self) -> Checkpoints:
        logging.getLogger("absl").addFilter(_not_orbax)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.settle()
        except StorageError:
            if kind is None:  # else what is under way says more
                raise
        finally:
            with contextlib.suppress(Exception):  # of a write that failed, which has been told
                self._writer.close()
            logging.getLogger("absl").removeFilter(_not_orbax)

    def _at(self, iteration: int) -> Path:
        return self.folder / f"{iteration:06d}"

    def _finish(self, at: Path, iteration: int, noted: dict[str, Any]) -> None:
        """Write the manifest once the arrays are there, and remove what is no longer needed; runs in a thread."""
        try:
            self._writer.wait_until_finished()
            if is_first():
                check_guards(at)
                write_manifest(at, noted)
                write_durably(_notes(self.folder), json.dumps({"newest": iteration}))
        except StorageError as error:  # the folder is another run's by now: not even the half may be removed there
            self._error = error
            return
        except Exception as error:  # the writer raises whatever its storage does
            self._error = cannot_write(at, error)
            self._forget(at)
            return
        try:
            if is_first():
                check_guards(at)
                self._prune()
        except StorageError as error:
            self._error = error
        except OSError as error:  # this checkpoint stands; the space of older ones is not free
            self._error = cannot_write(self.folder, error)

    def _prune(self) -> None:
        done = list(self.finished())
        for iteration in {*done[: -self._keep]} - {self.best()}:
            _remove(self._at(iteration))

    def _forget(self, at: Path) -> None:
        """Free the space of a write that failed, where the disk permits, and the writer that remembers it."""
        with contextlib.suppress(Exception):
            self._writer.close()
        self._writer = ocp.StandardCheckpointer()
        if is_first():
            with contextlib.suppress(OSError):
                for path in [at, *_half_written(self.folder)]:
                    _remove(path)

    def _look(self, say: Callable[[str], object]) -> int:
        """Find the newest checkpoint that can be trusted. All is read before anything is renamed or removed."""
        if not exists(self.folder):
            return LOST if exists(_notes(self.folder)) else NONE
        for at in _folders(self.folder):
            if (wrong := misplaced(at, self._run)) is not None:
                raise ConfigError(f"run_dir: {wrong}")
        aside: list[tuple[Path, str, str]] = []
        found = NONE
        for at in sorted(_folders(self.folder), reverse=True):
            unfinished = not exists(at / MANIFEST)
            wrong = f"{MANIFEST} is missing: it was not finished" if unfinished else damage(at)
            if wrong is None:
                found = int(at.name)
                break
            aside.append((at, wrong, "unfinished" if unfinished else "damaged"))
        if found == NONE and exists(_notes(self.folder)):
            return LOST
        for path in _half_written(self.folder):
            say(f"{path.name}: this checkpoint was being written when the run ended, and is removed")
            _remove(path)
        for at, wrong, why in aside:
            name = _aside(at, why)
            say(f"checkpoint {at.name} cannot be trusted: {wrong}. It is now {name}; looking at the one before")
        return found


def finished(folder: Path) -> dict[int, dict[str, Any]]:
    """Return iteration -> manifest of the finished checkpoints in a folder, in order.

    Raises:
        StorageError: a manifest cannot be read.
    """
    found = {int(at.name): read_manifest(at) for at in sorted(_folders(folder))}
    return {iteration: noted for iteration, noted in found.items() if noted is not None}


def scores(folder: Path, metric: str | None) -> dict[int, float]:
    """Return iteration -> score of the checkpoints in a folder that were saved as the best by a metric."""
    scored = {n: noted for n, noted in finished(folder).items() if noted["score"] is not None}
    return {n: noted["score"] for n, noted in scored.items() if noted.get("metric", metric) == metric}


def best(folder: Path, metric: str | None) -> tuple[int, float] | None:
    """Return the iteration and score of the highest score in a folder, the earliest of equals; None without scores."""
    found = scores(folder, metric)
    return max(found.items(), key=lambda each: (each[1], -each[0])) if found else None


def remove_all(folder: Path) -> None:
    """Remove a folder of checkpoints that is not needed any more."""
    _notes(folder).unlink(missing_ok=True)  # first: after it, a missing folder is as it should be
    shutil.rmtree(folder, ignore_errors=True)


def arrays(state: TrainState) -> dict[str, str]:
    """Return name -> dtype and shape of every array of a state, or of its abstract form."""
    parts = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    leaves, _ = jax.tree_util.tree_flatten_with_path(parts)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: f"{leaf.dtype.name}{list(leaf.shape)}" for name, (_, leaf) in zip(names, leaves)}


def check_arrays(at: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Refuse a checkpoint whose arrays are not this run's.

    Raises:
        ConfigError: with the first array that differs, and how many do.
    """
    differ = [name for name in sorted(saved | wanted) if saved.get(name) != wanted.get(name)]
    if differ:
        name = next((name for name in differ if name.startswith("params")), differ[0])
        raise ConfigError(
            f"run_dir: checkpoint {at} is of another model or optimizer: {name} is {saved.get(name, 'absent')} there "
            f"and {wanted.get(name, 'absent')} here ({len(differ)} of {len(saved | wanted)} arrays differ); give "
            "another run_dir=..., or the policy and optimizer it was made with"
        )


def _not_orbax(record: logging.LogRecord) -> bool:
    """Drop Orbax's log records: it prints a traceback of each error that it raises as well."""
    return "orbax" not in record.pathname


def _plain(state: TrainState) -> dict[str, Any]:
    """Return what is saved of a state: all but what is frozen, which can be read again; the key as numbers."""
    parts = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    return parts | {"key": jax.random.key_data(state.key)}


def _notes(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder) if name.isdecimal()]


def _half_written(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder) if "orbax-checkpoint-tmp" in name]


def _names(folder: Path) -> list[str]:
    """List a folder, empty where there is none; pathlib's glob would take an unreadable one for an empty one."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_read(folder, error) from error


def _remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)  # a folder half removed counts as unfinished
    shutil.rmtree(path, ignore_errors=True)


def _aside(at: Path, why: str) -> str:
    """Rename a checkpoint so that nothing takes it for one, and return its new name. Of the unfinished, one is kept."""
    for old in at.parent.glob("*.unfinished"):
        shutil.rmtree(old, ignore_errors=True)
    names = (f"{at.name}.{why}{number}" for number in ("", *(f"-{n}" for n in range(2, 1000))))
    name = next(name for name in names if not (at.parent / name).exists())
    at.rename(at.with_name(name))
    return name
