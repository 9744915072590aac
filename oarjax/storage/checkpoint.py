"""Save and restore the whole state of a run: arrays by Orbax, and a manifest that is written last.

Checkpoints are written in the background. A checkpoint counts once it has a manifest, and is restored only if every
byte matches the manifest, at the iteration and in the run that the manifest names. A damaged checkpoint is renamed with
its damage in the name, and the previous one is used; an unreadable checkpoint is left alone, and the command ends. All
processes call every method; the first process writes the manifests, checks and removes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from oarjax.errors import ConfigError
from oarjax.storage.durable import (
    DamagedError,
    StorageError,
    cannot_read,
    cannot_write,
    check_guards,
    exists,
    in_mounted_bucket,
    names_in,
    write_durably,
)
from oarjax.storage.folder import run_id
from oarjax.storage.manifest import MANIFEST, damage, misplaced, notes_file, read_manifest, write_manifest, write_seal
from oarjax.system.processes import from_first, is_first, only_first
from oarjax.types import TrainState

NONE, LOST = -1, -2


class Checkpoints:
    """Save, find and restore the checkpoints in one folder, as a context manager that waits for the write in progress.

    Args:
        folder: created if missing. A file of its name with .json beside it records the newest checkpoint, so that a
            lost folder is not mistaken for a run that has not begun.
        keep: number of newest checkpoints to keep, besides the one with the highest score.
        metric: name of the scores; scores of another metric are ignored.

    Raises:
        StorageError: the folder cannot be created.
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
        self._writer = self._new_writer()

    def finished(self) -> dict[int, dict[str, Any]]:
        """Return iteration -> manifest of the finished checkpoints, in order, without reading their arrays."""
        return finished(self.folder)

    def newest(self) -> int | None:
        """Return the iteration of the newest finished checkpoint, even if its arrays are damaged."""
        return max(self.finished(), default=None)

    def trusted(self, say: Callable[[str], object]) -> int | None:
        """Return the iteration of the newest checkpoint that is byte for byte as it was saved; None before the first.

        Newer checkpoints that are unfinished or damaged are renamed, with a message.

        Raises:
            DamagedError: there were checkpoints, but none of them can be trusted.
            ConfigError: a checkpoint was renamed, or copied from another run; nothing was changed.
            StorageError: a checkpoint cannot be read, so it may not be damaged; nothing was changed.
        """
        iteration = from_first(lambda: self._look(say))
        if iteration == LOST:
            raise DamagedError(
                f"{self.folder}: no intact checkpoint is left, although the run had saved one. Mount the "
                f"folder again or put a good copy of a checkpoint there; to start over from the beginning, remove "
                f"{self.folder.name} and {notes_file(self.folder).name} in {self.folder.parent}"
            )
        return None if iteration == NONE else iteration

    def save(self, iteration: int, state: TrainState, record: dict[str, Any], *, score: float | None = None) -> None:
        """Start writing; returns once the arrays are copied, so that the next update may reuse their memory.

        Args:
            record: the run's position, as JSON.
            score: the checkpoint with the highest score is kept.

        Raises:
            StorageError: this checkpoint cannot be written, or the previous one could not.
        """
        self.settle()
        at = self._at(iteration)
        check_guards(at)
        state = replace(state, frozen=None)
        if jax.default_backend() == "cpu":  # a "host copy" would share the array's memory, which updates reuse
            state = jax.tree.map(jnp.copy, state)
        noted = {"record": record, "score": score, "metric": self._metric, "arrays": arrays(state)}
        noted |= {"run": self._run, "iteration": iteration}
        try:
            # Orbax would create the folder again, on the disk below a lost mount.
            if self.folder.stat().st_dev != self._device:
                raise OSError("the folder is on another device than at the start: was its disk unmounted?")
            if is_first():  # else threads of Orbax wait for the folder that it cannot create, minutes past the end
                probe = at.with_name(f"{at.name}.probe")
                probe.mkdir(exist_ok=True)
                probe.rmdir()
            self._writer.save(at, _plain(state))
        except Exception as error:  # the writer passes on any error of its storage
            self._forget(at)
            raise cannot_write(at, error) from error
        self._thread = threading.Thread(target=self._finish, args=(at, iteration, noted), name="checkpoint")
        self._thread.start()

    def settle(self, *, wait: bool = True) -> None:
        """Wait for the write in progress, or without ``wait`` only check that it has not failed.

        Raises:
            StorageError: the write has failed; raised once.
        """
        if wait and self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def restore(self, iteration: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return the state, laid out over the devices as ``like`` is, and the record; frozen weights are ``like``'s.

        The params and moments of ``like`` are freed before others are read, so memory never holds both.

        Raises:
            ConfigError: the checkpoint belongs to another model or optimizer.
            StorageError: the checkpoint was not finished, or cannot be read.
        """
        at = self._at(iteration)
        noted = read_manifest(at)
        if noted is None:
            raise DamagedError(f"{at} has no manifest: it is incomplete; use another")
        check_arrays(at, noted["arrays"], arrays(like))
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _plain(like))
        for array in jax.tree.leaves((like.params, like.opt_state)):
            array.delete()
        try:
            restored = self._writer.restore(at, shapes)
        except OSError as error:
            raise cannot_read(at, error) from error
        key = jax.random.wrap_key_data(restored.pop("key"), impl=jax.random.key_impl(like.key))
        return replace(like, key=key, **restored), noted["record"]

    def best(self) -> int | None:
        """Return the iteration of the highest score; ties go to the earliest."""
        winner = best(self.folder, self._metric)
        return None if winner is None else winner[0]

    def scores(self) -> dict[int, float]:
        """Return iteration -> score of the checkpoints that were saved as the best by this metric."""
        return scores(self.folder, self._metric)

    def other_metrics(self) -> list[str]:
        """Return the other metrics by which checkpoints of this folder were saved as the best."""
        scored = [noted for noted in self.finished().values() if noted["score"] is not None]
        return sorted({str(noted.get("metric", self._metric)) for noted in scored} - {str(self._metric)})

    def __enter__(self) -> Checkpoints:
        logging.getLogger("absl").addFilter(_not_orbax)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.settle()
        except StorageError:
            if kind is None:  # otherwise the error under way is more useful
                raise
        finally:
            with contextlib.suppress(Exception):  # of a failed write, which has been reported
                self._writer.close()
            logging.getLogger("absl").removeFilter(_not_orbax)

    def _new_writer(self) -> Any:
        """Open Orbax's writer. A mounted bucket may copy a folder to rename it: there the last file marks the end."""
        if not in_mounted_bucket(self.folder):
            return ocp.StandardCheckpointer()
        mode = ocp.options.AtomicityMode.COMMIT_FILE
        return ocp.StandardCheckpointer(
            atomicity_options=ocp.options.AtomicityOptions(mode=mode, allow_legacy_atomic_rename=True)
        )

    def _at(self, iteration: int) -> Path:
        return self.folder / f"{iteration:06d}"

    def _finish(self, at: Path, iteration: int, noted: dict[str, Any]) -> None:
        """Write the manifest once the arrays are on disk, and remove old checkpoints; runs in a thread."""
        try:
            self._writer.wait_until_finished()
            if not is_first():
                write_seal(at, process=jax.process_index(), processes=jax.process_count())
            else:
                check_guards(at)
                write_manifest(at, noted, processes=jax.process_count())
                write_durably(notes_file(self.folder), json.dumps({"newest": iteration}))
        except StorageError as error:  # the folder belongs to another run now: remove nothing there
            self._error = error
            return
        except Exception as error:  # the writer passes on any error of its storage
            self._error = cannot_write(at, error)
            self._forget(at)
            return
        try:
            if is_first():
                check_guards(at)
                self._prune()
        except StorageError as error:
            self._error = error
        except OSError as error:  # this checkpoint is complete; old ones still take space
            self._error = cannot_write(self.folder, error)

    def _prune(self) -> None:
        iterations = list(self.finished())
        for iteration in {*iterations[: -self._keep]} - {self.best()}:
            _remove(self._at(iteration))

    def _forget(self, at: Path) -> None:
        """Free the space of a failed write if the disk permits, and replace the writer that remembers it."""
        with contextlib.suppress(Exception):
            self._writer.close()
        self._writer = self._new_writer()
        if is_first():
            with contextlib.suppress(OSError):
                for path in [at, *_half_written(self.folder)]:
                    _remove(path)

    def _look(self, say: Callable[[str], object]) -> int:
        """Find the newest checkpoint that can be trusted. Read all before anything is renamed or removed."""
        if not exists(self.folder):
            return LOST if exists(notes_file(self.folder)) else NONE
        for at in _folders(self.folder):
            if (problem := misplaced(at, self._run)) is not None:
                raise ConfigError(f"run_dir: {problem}")
        aside: list[tuple[Path, str, str]] = []
        trusted = NONE
        for at in sorted(_folders(self.folder), reverse=True):
            unfinished = not exists(at / MANIFEST)
            problem = f"{MANIFEST} is missing: it was not finished" if unfinished else damage(at)
            if problem is None:
                trusted = int(at.name)
                break
            aside.append((at, problem, "unfinished" if unfinished else "damaged"))
        if trusted == NONE and exists(notes_file(self.folder)):
            return LOST
        for path in _half_written(self.folder):
            say(f"{path.name}: this checkpoint was being written when the run ended, and is removed")
            _remove(path)
        for at, problem, kind in aside:
            name = _aside(at, kind)
            say(f"checkpoint {at.name} cannot be trusted: {problem}. It is now {name}; trying the previous one")
        return trusted


def finished(folder: Path) -> dict[int, dict[str, Any]]:
    """Return iteration -> manifest of the finished checkpoints in a folder, in order.

    Raises:
        StorageError: a manifest cannot be read.
    """
    manifests = {int(at.name): read_manifest(at) for at in sorted(_folders(folder))}
    return {iteration: noted for iteration, noted in manifests.items() if noted is not None}


def scores(folder: Path, metric: str | None) -> dict[int, float]:
    """Return iteration -> score of the checkpoints in a folder that were saved as the best by a metric."""
    scored = {n: noted for n, noted in finished(folder).items() if noted["score"] is not None}
    return {n: noted["score"] for n, noted in scored.items() if noted.get("metric", metric) == metric}


def best(folder: Path, metric: str | None) -> tuple[int, float] | None:
    """Return the iteration and value of the highest score in a folder, the earliest in a tie; None without scores."""
    by_iteration = scores(folder, metric)
    return max(by_iteration.items(), key=lambda each: (each[1], -each[0])) if by_iteration else None


def remove_all(folder: Path) -> None:
    """Remove a folder of checkpoints."""
    notes_file(folder).unlink(missing_ok=True)  # first: without it, a missing folder is no error
    shutil.rmtree(folder, ignore_errors=True)


def arrays(state: TrainState) -> dict[str, str]:
    """Return name -> dtype and shape of every array of a state, or of its abstract form."""
    parts = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    leaves, _ = jax.tree_util.tree_flatten_with_path(parts)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: f"{leaf.dtype.name}{list(leaf.shape)}" for name, (_, leaf) in zip(names, leaves)}


def check_arrays(at: Path, saved: dict[str, str], expected: dict[str, str]) -> None:
    """Check that a checkpoint has the arrays of this run.

    Raises:
        ConfigError: they differ; names the first array that differs, and their number.
    """
    differ = [name for name in sorted(saved | expected) if saved.get(name) != expected.get(name)]
    if differ:
        name = next((name for name in differ if name.startswith("params")), differ[0])
        raise ConfigError(
            f"run_dir: checkpoint {at} is of another model or optimizer: {name} is {saved.get(name, 'absent')} there "
            f"and {expected.get(name, 'absent')} here ({len(differ)} of {len(saved | expected)} arrays differ); set "
            "another run_dir=..., or the policy and optimizer that wrote it"
        )


def _not_orbax(record: logging.LogRecord) -> bool:
    """Drop Orbax's log records: it prints a traceback of each error that it raises as well."""
    return "orbax" not in record.pathname


def _plain(state: TrainState) -> dict[str, Any]:
    """Return the saved parts of a state, with the key as numbers. Frozen weights can be read again."""
    parts = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    return parts | {"key": jax.random.key_data(state.key)}


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name in names_in(folder) if name.isdecimal()]


def _half_written(folder: Path) -> list[Path]:
    return [folder / name for name in names_in(folder) if "orbax-checkpoint-tmp" in name]


def _remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)  # a half-removed folder then counts as unfinished
    shutil.rmtree(path, ignore_errors=True)


def _aside(at: Path, kind: str) -> str:
    """Rename a checkpoint so that it no longer counts, and return its new name. Only one unfinished one is kept."""
    for unfinished in at.parent.glob("*.unfinished"):
        shutil.rmtree(unfinished, ignore_errors=True)
    names = (f"{at.name}.{kind}{number}" for number in ("", *(f"-{n}" for n in range(2, 1000))))
    name = next(name for name in names if not (at.parent / name).exists())
    at.rename(at.with_name(name))
    return name
