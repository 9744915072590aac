"""Record verdicts on disk before an update uses them, so that a resumed run grades nothing twice.

Otherwise a deadline missed on a busy machine, or a reward that is not a pure function, would change the rewards of
iterations that a resumed run repeats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from oarjax.grading.rewards import Sample
from oarjax.storage.durable import (
    DamagedError,
    Failures,
    Lines,
    prune_numbered,
    read_lines,
    storage_errors,
    sync_folder,
)
from oarjax.storage.trust import code_digest
from oarjax.system.json import numbers, plain_floats
from oarjax.types import Grades


@runtime_checkable
class Grading(Protocol):
    """Grades samples in the background."""

    def submit(self, samples: Sequence[Sample]) -> Future[Grades]: ...


class RecordedGrader:
    """A grader that records its verdicts, and returns the recorded ones for the same samples.

    One file per iteration, one line per batch: a digest of the samples and of the grading setup, and the grades. A line
    is on disk before its grades are returned.

    Args:
        grader: grades samples without a recorded verdict.
        folder: created if missing.
        setup: everything else that a verdict depends on, see ``setup_of``.
        failures: handles verdicts that cannot be written.
        say: prints a message.
        part: number of this process, which has its own samples and files.
    """

    def __init__(
        self,
        grader: Grading,
        folder: Path,
        *,
        setup: str,
        failures: Failures,
        say: Callable[[str], object],
        part: int = 0,
    ):
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._grader, self._folder, self._setup = grader, folder, setup
        self._failures, self._say = failures, say
        self._suffix = f".{part}.jsonl" if part else ".jsonl"
        self._iteration = 0
        self._known: dict[str, Grades] | None = None  # None: not read yet
        self._used = False  # True once a recorded verdict has been returned

    def begin(self, iteration: int) -> None:
        """Record verdicts under this iteration from now on."""
        self._iteration, self._known, self._used = iteration, None, False

    def submit(self, samples: Sequence[Sample]) -> Future[Grades]:
        """Start grading, unless a verdict is recorded; it is on disk once the future is done."""
        path = self._folder / f"{self._iteration:06d}{self._suffix}"
        if self._known is None:
            self._known = self._read(path)
        digest = _digest(samples, self._setup)
        result: Future[Grades] = Future()
        if digest in self._known:
            self._used = True
            result.set_result(self._known[digest])
            return result
        if self._known and not self._used:
            self._say(f"{path}: these verdicts are of other completions or rewards; grading again")
            self._known = {}

        def keep(graded: Future[Grades]) -> None:
            try:
                grades = graded.result()
                with self._failures.handled():
                    _append(path, {"digest": digest, **_plain(grades)})
            except BaseException as error:  # of the grader or the disk: raised by the future
                result.set_exception(error)
            else:
                result.set_result(grades)

        self._grader.submit(samples).add_done_callback(keep)
        return result

    def prune(self, before: int) -> None:
        """Remove the verdicts of iterations up to ``before``, which no kept checkpoint can repeat."""
        prune_numbered(self._folder, self._suffix, before)

    def _read(self, path: Path) -> dict[str, Grades]:
        try:
            earlier = {line["digest"]: _grades(line) for line in read_lines(path)}
            # If all crashed, the run stopped; the cause may be fixed by now, so they are graded again.
            return {} if {v for grades in earlier.values() for v in grades.verdicts} == {"crash"} else earlier
        except (DamagedError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._say(f"{path} cannot be read ({error}); grading iteration {self._iteration} again")
            path.unlink(missing_ok=True)
            return {}


def setup_of(settings: dict[str, Any], plugins: Sequence[str]) -> str:
    """Digest everything that a verdict depends on besides the sample: settings, and the code of the plugins."""
    code = [code_digest(plugin) for plugin in plugins]
    return hashlib.sha256(json.dumps([settings, code], sort_keys=True).encode()).hexdigest()


def _digest(samples: Sequence[Sample], setup: str) -> str:
    return hashlib.sha256(json.dumps([setup, [asdict(s) for s in samples]]).encode()).hexdigest()


def _append(path: Path, record: dict[str, Any]) -> None:
    is_new = not path.exists()
    with storage_errors(path), closing(Lines(path)) as lines:
        lines.write(record)
        lines.sync()
        if is_new:
            sync_folder(path.parent)


def _plain(grades: Grades) -> dict[str, Any]:
    return {
        "rewards": plain_floats(grades.rewards.tolist()),
        "per_reward": {name: plain_floats(values.tolist()) for name, values in grades.per_reward.items()},
        "verdicts": grades.verdicts,
        "answers": grades.answers,
        "notes": grades.notes,
    }


def _grades(line: dict[str, Any]) -> Grades:
    return Grades(
        rewards=np.asarray(numbers(line["rewards"]), np.float32),
        per_reward={name: np.asarray(numbers(values), np.float32) for name, values in line["per_reward"].items()},
        verdicts=line["verdicts"],
        answers=line["answers"],
        notes=line["notes"],
    )
