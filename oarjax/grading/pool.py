"""Call rewards in worker processes that the parent watches, kills and replaces one by one.

Software that compares model output can hang, crash or run out of memory. None of that may stop a run or count as a
wrong answer, so every sample gets a verdict:

    graded       every reward returned a number
    unparseable  a reward could not parse the model's answer; that reward is 0, counted separately
    ungraded     unknown (the reference is not an expression, or a reward returned NaN)
    timeout      the verdict took longer than the deadline; its worker was killed
    crash        a reward raised, or its worker died, used too much memory or replied out of turn, twice

The last three have reward NaN, which the group advantages ignore.

A call is what one worker grades without a pause: samples one after the other, each by all rewards, or the samples that
a batch, group or async reward sees together. A sample that hangs or kills its worker costs only itself; one of a joint
call costs those of the call that have no verdict yet.

The deadline is measured by a clock that stops while this process sleeps (SIGSTOP, a suspended machine), and that
counts processor time while the worker waits for a processor: a busy machine makes no answer late. Any other wait, such
as a reward's request to a server, counts in full. Samples are numbered, and a reply with any number but an expected
one ends its worker, so that a late or forged reply never becomes another sample's. A worker is killed with all its
descendants, and their memory counts as its own.
"""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float32

from oarjax.errors import UserError
from oarjax.grading.link import InvalidMessage, Link
from oarjax.grading.process_tree import clock_seconds, end_tree, memory_mb, usage
from oarjax.grading.rewards import Sample, calls_of
from oarjax.types import Verdict

POLL = 0.05  # seconds between checks of deadlines and memory
START_LIMIT = 120.0  # seconds that a worker may take for its imports
GRACE = 2.0  # seconds after the deadline in which a worker itself may report a late async call
CHUNK = 16  # samples sent to a worker at a time
VERDICTS = get_args(Verdict)


class GraderError(UserError, RuntimeError):
    """Raised when workers cannot be started, with the last one's message, or the grader is closed."""


@dataclass
class RewardScores:
    """Values and verdicts of some rewards for all samples; ``label`` introduces their notes."""

    names: tuple[str, ...]
    values: Float32[np.ndarray, "B n"]
    verdicts: list[Verdict]
    answers: list[str | None]
    notes: list[str]
    label: str = ""


@dataclass(frozen=True)
class WorkerSettings:
    """Everything that a worker needs to know.

    ``parts``: rewards that grade a sample together; of a joint pool each reward is a part of its own.
    """

    parts: tuple[tuple[str, ...], ...]
    joint: bool  # the rewards see a batch or a group, or are async
    settings: Mapping[str, dict[str, Any]]
    plugins: tuple[str, ...]
    deadline: float  # seconds per sample, of a joint call per verdict
    concurrency: int  # samples of an async reward in flight
    address_mb: int  # limit of a worker's address space where resident memory can be watched as well
    memory_mb: int  # limit of the resident memory of a worker and its descendants
    style: str
    pattern: str | None


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    link: Link
    state: Literal["starting", "idle", "busy"] = "starting"
    pending: dict[int, int] = field(default_factory=dict)  # number -> cell without a verdict, the current one first
    spent: float = 0.0  # seconds on the clock since the start of the state, or the last verdict
    cpu: float | None = None  # CPU seconds at the last reading of the clock; None: not read since its start
    retire_mb: float = float("inf")  # resident memory above which an idle worker is replaced

    def restart_clock(self) -> None:
        self.spent, self.cpu = 0.0, None

    def end(self) -> int:
        """Kill the process and its descendants, reap it and close its link; return the exit code."""
        if self.process.returncode is None:
            end_tree(self.process.pid)
        self.link.close()
        return self.process.wait()


class Pool:
    """Workers that call rewards. Use as a context manager; workers end with it, and with this process."""

    def __init__(self, settings: WorkerSettings, *, workers: int):
        self._settings, self._size = settings, workers
        self.workers: list[_Worker] = []
        self._failures = 0
        self._number = 0  # of samples sent so far
        self._ticked = 0.0
        self._closing = threading.Event()
        self._waiting: deque[tuple[Sequence[Sample], Future[list[RewardScores]]]] = deque()
        # Workers end with the thread that starts them: this one lives as long as the pool.
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="grader")
        weakref.finalize(self, _end_all, self.workers)  # also at interpreter exit

    def start(self) -> None:
        """Start the workers, which import while the caller does something else."""
        self._driver.submit(self._start_missing)

    def close(self) -> None:
        """End the workers; grading in progress raises GraderError."""
        self._closing.set()
        self._driver.shutdown(wait=True, cancel_futures=True)
        while self._waiting:
            self._waiting.popleft()[1].cancel()
        _end_all(self.workers)

    def submit(self, samples: Sequence[Sample]) -> Future[list[RewardScores]]:
        """Grade in the background; futures are done in the order of submission, with the scores of each part.

        Samples join those in progress, so that no worker is idle while another is busy with an earlier submission.
        """
        future: Future[list[RewardScores]] = Future()
        self._waiting.append((samples, future))
        self._driver.submit(self._grade)
        return future

    # The methods below run only in the driver thread.

    def _grade(self) -> None:
        batch = _Batch(self._settings, workers=self._size)
        try:
            self._run(batch)
        except BaseException as error:
            _end_all(self.workers)  # their unfinished samples must not reach the next batch
            batch.fail(error)

    def _run(self, batch: _Batch) -> None:
        self._ticked = time.monotonic()
        while True:
            while self._waiting:
                batch.add(*self._waiting.popleft())
            batch.deliver()
            if not batch.open:
                return
            if self._closing.is_set():
                raise GraderError("the grader was closed while grading")
            self._start_missing()
            for worker in list(self.workers):
                if worker.state == "idle" and batch.queue:
                    self._send_call(worker, batch)
            self._wait()
            now = time.monotonic()
            elapsed, tick = now - self._ticked, now - self._ticked >= POLL
            if tick:
                self._ticked = now
            for worker in list(self.workers):
                if self._receive(worker, batch) and tick:
                    self._enforce_limits(worker, batch, elapsed)

    def _start_missing(self) -> None:
        while len(self.workers) < self._size:
            self.workers.append(_start(self._settings))

    def _wait(self) -> None:
        """Return once a worker has sent data or accepts more, or it is time to check the clock."""
        poll = select.poll()
        for worker in self.workers:
            poll.register(worker.link, select.POLLIN | (select.POLLOUT if worker.link.waiting else 0))
        poll.poll(POLL * 1000)

    def _send_call(self, worker: _Worker, batch: _Batch) -> None:
        part, cells = batch.take()
        first, self._number = self._number, self._number + len(cells)
        worker.pending = dict(zip(range(first, self._number), cells))
        worker.state = "busy"
        worker.restart_clock()
        samples = [asdict(batch.samples[cell]) for cell in cells]
        try:
            worker.link.send({"first": first, "part": part, "samples": samples})
        except OSError:  # it died while idle, through none of these samples
            self._dismiss(worker, batch)

    def _receive(self, worker: _Worker, batch: _Batch) -> bool:
        """Process the worker's messages, send it the rest of its samples; return False if the worker is gone."""
        try:
            for message in worker.link.receive():
                self._process(worker, batch, message)
            worker.link.flush()
        except InvalidMessage as error:
            self._replace_lost(worker, batch, f"the worker sent {error}; does a reward fork, or write to its sockets?")
            return False
        except OSError:
            self._replace_lost(worker, batch)
            return False
        if worker.link.ended:
            self._replace_lost(worker, batch)
            return False
        if worker.state == "idle" and memory_mb(worker.process.pid) > worker.retire_mb:
            self._dismiss(worker, batch)  # memory left by earlier answers must not count against the next
            return False
        return True

    def _process(self, worker: _Worker, batch: _Batch, message: Any) -> None:
        if worker.state == "starting":
            if isinstance(message, dict) and "failed" in message:
                raise GraderError(f"a grading worker could not start:\n{message['failed']}")
            if message != {"ready": True}:
                raise InvalidMessage("an unexpected message before it was ready")
            self._failures = 0
            worker.retire_mb = (memory_mb(worker.process.pid) + self._settings.memory_mb) / 2
        else:
            reply = _checked(message)
            expected = worker.pending if self._settings.joint else list(worker.pending)[:1]
            number = reply.pop("number")
            if number not in expected:
                raise InvalidMessage("a reply out of turn")
            batch.settle(worker.pending[number], **reply)
            del worker.pending[number]
        worker.restart_clock()
        if not worker.pending:
            worker.state = "idle"

    def _replace_lost(self, worker: _Worker, batch: _Batch, note: str | None = None) -> None:
        """Remove a worker that ended by itself; what it was grading is retried once, then it is a crash."""
        starting, lost = worker.state == "starting", self._take_current(worker)
        code = self._dismiss(worker, batch)
        if starting:
            self._failures += 1
            if self._failures >= 3:
                raise GraderError(
                    f"grading workers end before they are ready (exit code {code}); see their messages above"
                )
        batch.retry(lost, note or f"the worker ended with exit code {code}")

    def _enforce_limits(self, worker: _Worker, batch: _Batch, elapsed: float) -> None:
        """Advance the worker's clock, and end it if its answer takes too much time or memory."""
        use = usage(worker.process.pid)
        if use is not None and use.state == "Z":  # a descendant holds its end of the link open
            self._replace_lost(worker, batch)
            return
        begun, cpu = worker.cpu is not None, 0.0 if use is None else use.cpu
        if worker.cpu is not None:
            worker.spent += clock_seconds(elapsed, worker.cpu, use)
        worker.cpu = cpu
        settings = self._settings
        if worker.state == "starting" and worker.spent > START_LIMIT:
            self._replace_lost(worker, batch)
        elif worker.state == "busy" and begun:
            if worker.spent > settings.deadline + (GRACE if settings.joint else 0.0):
                lost = self._take_current(worker)
                self._dismiss(worker, batch)
                if use is not None and use.state in "Tt":  # stopped from outside
                    batch.retry(lost, "its worker was stopped by a signal")
                else:
                    batch.give_up(lost, "timeout", f"no verdict within {settings.deadline:g} s")
            elif memory_mb(worker.process.pid) > settings.memory_mb:
                lost = self._take_current(worker)
                self._dismiss(worker, batch)
                batch.retry(lost, f"used more than {settings.memory_mb} MB of memory")

    def _take_current(self, worker: _Worker) -> list[int]:
        """Remove the cells that share the fate of the worker: the current one, or all of a joint call."""
        shared = list(worker.pending)[: None if self._settings.joint else 1]
        return [worker.pending.pop(number) for number in shared]

    def _dismiss(self, worker: _Worker, batch: _Batch) -> int:
        self.workers.remove(worker)
        batch.put_back(list(worker.pending.values()))
        return worker.end()


class _Batch:
    """Samples of one or more submissions that are graded together: the queue, and the verdicts so far.

    A cell is a sample with one part of the rewards. The queue holds the cells that no two workers may grade apart.
    """

    def __init__(self, settings: WorkerSettings, *, workers: int):
        self.samples: list[Sample] = []  # of each cell
        self.queue: deque[list[int]] = deque()
        self.open = 0
        self._parts, self._joint, self._workers, self._chunk = settings.parts, settings.joint, workers, 1
        self._submitted: deque[tuple[list[slice], Future[list[RewardScores]]]] = deque()
        self._tried: set[int] = set()
        self._part_of: list[int] = []
        self._values: list[Sequence[float]] = []
        self._verdicts: list[Verdict | None] = []  # None: no verdict yet
        self._answers: list[str | None] = []
        self._notes: list[str] = []

    def add(self, samples: Sequence[Sample], future: Future[list[RewardScores]]) -> None:
        """Add the samples of a submission to the queue."""
        if not future.set_running_or_notify_cancel():
            return
        slices, n = [], len(samples)
        for part, names in enumerate(self._parts):
            first = len(self.samples)
            slices.append(slice(first, first + n))
            self.samples.extend(samples)
            self._part_of += [part] * n
            self._values += [[math.nan] * len(names)] * n
            calls = rows_of_calls(names[0], samples) if self._joint else ([row] for row in range(n))
            self.queue.extend([first + row for row in rows] for rows in calls)
        self._submitted.append((slices, future))
        count = n * len(self._parts)
        self.open += count
        self._chunk = max(1, min(CHUNK, len(self.queue) // (4 * self._workers)))
        self._verdicts += [None] * count
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

    def take(self) -> tuple[int, list[int]]:
        """Remove the next call from the queue: the part of the rewards, and its cells."""
        cells = self.queue.popleft()
        while not self._joint and self.queue and len(cells) < self._chunk:
            cells += self.queue.popleft()
        return self._part_of[cells[0]], cells

    def put_back(self, cells: list[int]) -> None:
        """Put cells that were not reached first in the queue again."""
        if cells:
            self.queue.extendleft([cells] if self._joint else [[cell] for cell in reversed(cells)])

    def settle(self, cell: int, *, values: list[float], verdict: Verdict, extracted: str | None, note: str) -> None:
        if len(values) != len(self._values[cell]):
            raise InvalidMessage("an invalid reply")
        self._values[cell] = values
        self._verdicts[cell], self._answers[cell], self._notes[cell] = verdict, extracted, note
        self.open -= 1

    def retry(self, cells: list[int], note: str) -> None:
        if self._tried.intersection(cells):
            self.give_up(cells, "crash", note)
        elif cells:
            self._tried.update(cells)
            self.queue.appendleft(cells)

    def give_up(self, cells: list[int], verdict: Verdict, note: str) -> None:
        for cell in cells:
            self._verdicts[cell], self._notes[cell] = verdict, note
        self.open -= len(cells)

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
    """Yield the rows of each call of a joint reward: a group's, or all."""
    rows = range(len(samples))
    if calls_of(name) == "group":
        for _, group in groupby(rows, key=lambda row: samples[row].group):
            yield list(group)
    elif len(samples):
        yield list(rows)


def _start(settings: WorkerSettings) -> _Worker:
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from oarjax.grading.worker import main; main({fd})"],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=2,  # a reward that prints must not mix with the command's own output
        start_new_session=True,  # a group of its own, to be killed as one
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "JAX_PLATFORMS": "cpu",  # a plugin that imports jax must not take the accelerator
        },
    )
    theirs.close()
    worker = _Worker(process, Link(ours))
    with suppress(OSError):  # it has ended already, which is noticed when its messages are read
        worker.link.send(asdict(settings))
    return worker


def _checked(message: Any) -> dict[str, Any]:
    """Return a worker's reply if it is valid.

    Raises:
        InvalidMessage: it is not.
    """
    match message:
        case {"number": int(), "values": [*scores], "verdict": str(verdict), "extracted": extracted, "note": str()}:
            numbers = len(message) == 5 and all(isinstance(score, float) for score in scores)
            if numbers and verdict in VERDICTS and (extracted is None or isinstance(extracted, str)):
                return message
    raise InvalidMessage("an invalid reply")


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
