"""Samples in the pool: which call grades each, and their verdicts.

    graded       every reward returned a number
    unparseable  a reward could not parse the model's answer; that reward is 0, counted separately
    ungraded     unknown (the reference is not an expression, or a reward returned NaN)
    timeout      the verdict took longer than the deadline; its worker was killed
    crash        a reward raised, or its worker died, used too much memory or replied out of turn, twice

The last three have reward NaN, which the group advantages ignore.

A call holds samples that one worker grades one after the other, each by all rewards, or the samples that a batch, group
or async reward sees together (``oarjax/grading/pool.py``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, get_args

import numpy as np
from jaxtyping import Float32

from oarjax.grading.link import InvalidMessage
from oarjax.grading.pool import CallQueue, Worker
from oarjax.grading.rewards import Sample, calls_of
from oarjax.types import Verdict

CHUNK = 16  # samples sent to a worker at a time
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass
class RewardScores:
    """Values and verdicts of some rewards for all samples; ``label`` introduces their notes."""

    names: tuple[str, ...]
    values: Float32[np.ndarray, "B n"]
    verdicts: list[Verdict]
    answers: list[str | None]
    notes: list[str]
    label: str = ""


class RewardBatch(CallQueue):
    """Samples of one or more submissions that are graded together: the queue, and the verdicts so far.

    A cell, the item of this work, is a sample with one part of the rewards, which grade it together; of joint rewards
    each is a part of its own. The queue holds the cells that no two workers may grade apart.
    """

    def __init__(self, parts: Sequence[tuple[str, ...]], *, joint: bool, workers: int):
        self.samples: list[Sample] = []  # of each cell
        self.queue: deque[list[int]] = deque()
        self.open = 0
        self._parts, self._joint, self._workers, self._chunk = parts, joint, workers, 1
        self._submitted: deque[tuple[list[slice], Future[list[RewardScores]]]] = deque()
        self._tried: set[int] = set()
        self._part_of: list[int] = []
        self._values: list[Sequence[float]] = []
        self._verdicts: list[Verdict | None] = []  # None: no verdict yet
        self._answers: list[str | None] = []
        self._notes: list[str] = []

    def add(self, items: Sequence[Sample], future: Future[list[RewardScores]]) -> None:
        """Add the samples of a submission to the queue."""
        samples = items
        if not future.set_running_or_notify_cancel():
            return
        slices, n = [], len(samples)
        for part, names in enumerate(self._parts):
            first = len(self.samples)
            slices.append(slice(first, first + n))
            self.samples.extend(samples)
            self._part_of += [part] * n
            self._values += [[math.nan] * len(names)] * n
            calls = list(rows_of_calls(names[0], samples)) if self._joint else [[row] for row in range(n)]
            self.queue.extend([first + row for row in rows] for rows in calls)
            called_rows = {row for rows in calls for row in rows}
            skipped: list[Verdict | None] = [None if row in called_rows else "graded" for row in range(n)]
            self._verdicts += skipped
            self.open += len(called_rows)
        self._submitted.append((slices, future))
        count = n * len(self._parts)
        self._chunk = max(1, min(CHUNK, len(self.queue) // (4 * self._workers)))
        self._answers += [None] * count
        self._notes += [""] * count

    def deliver(self) -> None:
        """Resolve the submissions whose samples all have a verdict, up to the first incomplete one."""
        while self._submitted and not any(None in self._verdicts[rows] for rows in self._submitted[0][0]):
            slices, future = self._submitted.popleft()
            future.set_result([self._scores(*item) for item in zip(self._parts, slices)])

    def fail(self, error: BaseException) -> None:
        """Raise the error in all unresolved submissions."""
        while self._submitted:
            self._submitted.popleft()[1].set_exception(error)

    def take(self, worker: Worker, workers: Sequence[Worker]) -> tuple[dict[str, Any], list[int]] | None:
        """Remove the next call from the queue: the part of the rewards with its samples, and their cells."""
        if not self.queue:
            return None
        cells = self.queue.popleft()
        while not self._joint and self.queue and len(cells) < self._chunk:
            cells += self.queue.popleft()
        samples = [asdict(self.samples[cell]) for cell in cells]
        return {"part": self._part_of[cells[0]], "samples": samples}, cells

    def put_back(self, items: list[int]) -> None:
        """Put cells that were not reached first in the queue again."""
        if items:
            self.queue.extendleft([items] if self._joint else [[cell] for cell in reversed(items)])

    def settle(self, item: int, reply: dict[str, Any], worker: Worker) -> None:
        match reply:
            case {"values": [*scores], "verdict": str(name), "extracted": extracted, "note": str(note)}:
                numbers = len(scores) == len(self._values[item]) and all(isinstance(score, float) for score in scores)
                verdict: Verdict | None = next((option for option in VERDICTS if option == name), None)
                if numbers and len(reply) == 4 and verdict and isinstance(extracted, str | None):
                    self._values[item], self._verdicts[item] = scores, verdict
                    self._answers[item], self._notes[item] = extracted, note
                    self.open -= 1
                    return
        raise InvalidMessage("an invalid reply")

    def retry(self, items: list[int], note: str) -> None:
        if self._tried.intersection(items):
            self.give_up(items, "crash", note)
        elif items:
            self._tried.update(items)
            self.queue.appendleft(items)

    def give_up(self, items: list[int], verdict: Verdict, note: str) -> None:
        for cell in items:
            self._verdicts[cell], self._notes[cell] = verdict, note
        self.open -= len(items)

    def _scores(self, names: tuple[str, ...], rows: slice) -> RewardScores:
        return RewardScores(
            names,
            np.asarray(self._values[rows], np.float32).reshape(-1, len(names)),
            [verdict for verdict in self._verdicts[rows] if verdict is not None],
            self._answers[rows],
            self._notes[rows],
            label=f"{names[0]}: " if self._joint else "",
        )


def rows_of_calls(name: str, samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Yield the rows of each call of a joint reward: a group's, or all, of those that ask for it."""
    rows = [row for row, sample in enumerate(samples) if sample.asks(name)]
    if calls_of(name) == "group":
        for _, group in groupby(rows, key=lambda row: samples[row].group):
            yield list(group)
    elif rows:
        yield rows
