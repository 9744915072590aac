"""Grade in worker processes that the parent watches, kills and replaces one by one.

Software that compares model output can hang, crash or run out of memory. None of that may stop a run or count as a
wrong answer, so every sample gets a verdict:

    graded       every reward returned a number
    unparseable  a reward could not parse the model's answer; that reward is 0, counted separately
    ungraded     unknown (the reference is not an expression, or a reward returned NaN)
    timeout      the answer took longer than the deadline; its worker was killed
    crash        a reward raised, or its worker died, used too much memory or replied out of turn, twice

The last three have reward NaN, which the group advantages ignore.

The deadline is measured by a clock that stops while this process sleeps (SIGSTOP, a suspended machine), and that
counts processor time while the worker waits for a processor: a busy machine makes no answer late. Any other wait, such
as a reward's request to a server, counts in full. Samples are numbered, and a reply with any number but the expected
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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from oarjax.credit.answer_text import Style, check_pattern
from oarjax.errors import UserError
from oarjax.grading.link import InvalidMessage, Link
from oarjax.grading.process_tree import clock_seconds, end_tree, memory_mb, usage
from oarjax.grading.rewards import Sample, find_rewards, load_plugins
from oarjax.types import Grades, Verdict

POLL = 0.05  # seconds between checks of deadlines and memory
START_LIMIT = 120.0  # seconds that a worker may take for its imports
CHUNK = 16  # samples sent to a worker at a time
VERDICTS = get_args(Verdict)


class GraderError(UserError, RuntimeError):
    """Raised when workers cannot be started, with the last one's message, or the grader is closed."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    link: Link
    state: Literal["starting", "idle", "busy"] = "starting"
    chunk: deque[int] = field(default_factory=deque)  # samples not answered yet, the current one first
    number: int = 0  # of the current sample, counted over all batches
    spent: float = 0.0  # seconds on the clock since the start of the state, or of the current answer
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


class Grader:
    """A pool of grading workers. Use as a context manager; workers end with it, and with this process.

    Args:
        rewards: (name, weight) pairs.
        settings: of rewards by name, their keyword arguments.
        plugins: Python files or modules that register rewards, imported here to check the names, and in every worker.
        workers: number of processes; auto: see ``worker_count``.
        deadline: seconds per answer, see above; a worker's start-up does not count.
        memory_mb: resident memory of a worker and its descendants.
        style, pattern: how an answer is marked in a completion, see ``oarjax.credit.answer_text``.

    Raises:
        ValueError: an unknown reward, a plugin that cannot be imported, or a bad pattern.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str, float]],
        *,
        settings: Mapping[str, dict[str, Any]] | None = None,
        plugins: Sequence[str] = (),
        workers: int | Literal["auto"] = 2,
        deadline: float = 5.0,
        memory_mb: int = 2048,
        style: Style = "boxed",
        pattern: str | None = None,
    ):
        load_plugins(plugins)
        names = [name for name, _ in rewards]
        find_rewards(names, settings)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"grading.rewards: expected at least one reward and each once, got {names}")
        if style == "regex":
            check_pattern(pattern)
        self._rewards = tuple(rewards)
        self._setup = {
            "plugins": [os.path.abspath(os.path.expanduser(p)) if p.endswith(".py") else p for p in plugins],
            "rewards": names,
            "settings": dict(settings or {}),
            "deadline": deadline,
            "memory_mb": memory_mb,
            "style": style,
            "pattern": pattern,
        }
        self._size = worker_count(workers)
        self._workers: list[_Worker] = []
        self._failures = 0
        self._number = 0  # of samples sent so far
        self._ticked = 0.0
        self._closing = threading.Event()
        self._waiting: deque[tuple[Sequence[Sample], Future[Grades]]] = deque()
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="grader")
        weakref.finalize(self, _end_all, self._workers)  # also at interpreter exit

    def __enter__(self) -> Grader:
        self._driver.submit(self._start_missing)  # workers import while the caller does something else
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; grading in progress raises GraderError."""
        self._closing.set()
        self._driver.shutdown(wait=True, cancel_futures=True)
        while self._waiting:
            self._waiting.popleft()[1].cancel()
        _end_all(self._workers)

    def grade(self, samples: Sequence[Sample]) -> Grades:
        """Grade and wait.

        Raises:
            GraderError: workers cannot be started, or the grader is closed.
        """
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> Future[Grades]:
        """Grade in the background; futures are done in the order of submission.

        Samples join those in progress, so that no worker is idle while another is busy with an earlier submission.
        """
        if self._closing.is_set():
            raise GraderError("the grader is closed; grade inside its `with` block")
        future: Future[Grades] = Future()
        self._waiting.append((tuple(samples), future))
        self._driver.submit(self._grade)
        return future

    # The methods below run only in the driver thread.

    def _grade(self) -> None:
        batch = _Batch(self._rewards, workers=self._size)
        try:
            self._run(batch)
        except BaseException as error:
            _end_all(self._workers)  # their unfinished samples must not reach the next batch
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
            for worker in list(self._workers):
                if worker.state == "idle" and batch.queue:
                    self._send_chunk(worker, batch)
            self._wait()
            now = time.monotonic()
            elapsed, tick = now - self._ticked, now - self._ticked >= POLL
            if tick:
                self._ticked = now
            for worker in list(self._workers):
                if self._receive(worker, batch) and tick:
                    self._enforce_limits(worker, batch, elapsed)

    def _start_missing(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(_start(self._setup))

    def _wait(self) -> None:
        """Return once a worker has sent data or accepts more, or it is time to check the clock."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.link, select.POLLIN | (select.POLLOUT if worker.link.waiting else 0))
        poll.poll(POLL * 1000)

    def _send_chunk(self, worker: _Worker, batch: _Batch) -> None:
        worker.chunk.extend(batch.take())
        worker.state, worker.number = "busy", self._number
        worker.restart_clock()
        self._number += len(worker.chunk)
        try:
            worker.link.send({"first": worker.number, "samples": [asdict(batch.samples[i]) for i in worker.chunk]})
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
            worker.retire_mb = (memory_mb(worker.process.pid) + self._setup["memory_mb"]) / 2
        else:
            reply = _checked(message, values=len(self._rewards))
            if not worker.chunk or reply.pop("number") != worker.number:
                raise InvalidMessage("a reply out of turn")
            worker.number += 1
            batch.settle(worker.chunk.popleft(), **reply)
        worker.restart_clock()
        if not worker.chunk:
            worker.state = "idle"

    def _replace_lost(self, worker: _Worker, batch: _Batch, note: str | None = None) -> None:
        """Remove a worker that ended by itself; its current sample is retried once, then it is a crash."""
        state, current = worker.state, worker.chunk.popleft() if worker.chunk else None
        code = self._dismiss(worker, batch)
        if state == "starting":
            self._failures += 1
            if self._failures >= 3:
                raise GraderError(
                    f"grading workers end before they are ready (exit code {code}); see their messages above"
                )
        if current is not None:
            batch.retry(current, note or f"the worker ended with exit code {code}")

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
        if worker.state == "starting" and worker.spent > START_LIMIT:
            self._replace_lost(worker, batch)
        elif worker.state == "busy" and begun:
            if worker.spent > self._setup["deadline"]:
                current = worker.chunk.popleft()
                self._dismiss(worker, batch)
                if use is not None and use.state in "Tt":  # stopped from outside
                    batch.retry(current, "its worker was stopped by a signal")
                else:
                    batch.give_up(current, "timeout", f"no verdict within {self._setup['deadline']:g} s")
            elif memory_mb(worker.process.pid) > self._setup["memory_mb"]:
                current = worker.chunk.popleft()
                self._dismiss(worker, batch)
                batch.retry(current, f"used more than {self._setup['memory_mb']} MB of memory")

    def _dismiss(self, worker: _Worker, batch: _Batch) -> int:
        self._workers.remove(worker)
        batch.put_back(worker.chunk)
        return worker.end()


class _Batch:
    """Samples of one or more submissions that are graded together: the queue, and the verdicts so far."""

    def __init__(self, rewards: tuple[tuple[str, float], ...], *, workers: int):
        self.samples: list[Sample] = []
        self.queue: deque[int] = deque()
        self.open = 0
        self._rewards, self._workers, self._chunk = rewards, workers, 1
        self._submitted: deque[tuple[slice, Future[Grades]]] = deque()
        self._tried: set[int] = set()
        self._values: list[Sequence[float]] = []
        self._verdicts: list[Verdict | None] = []  # None: no verdict yet
        self._answers: list[str | None] = []
        self._notes: list[str] = []

    def add(self, samples: Sequence[Sample], future: Future[Grades]) -> None:
        """Add the samples of a submission to the queue."""
        if not future.set_running_or_notify_cancel():
            return
        first, n = len(self.samples), len(samples)
        self._submitted.append((slice(first, first + n), future))
        self.samples.extend(samples)
        self.queue.extend(range(first, first + n))
        self.open += n
        self._chunk = max(1, min(CHUNK, len(self.queue) // (4 * self._workers)))
        self._values += [[math.nan] * len(self._rewards)] * n
        self._verdicts += [None] * n
        self._answers += [None] * n
        self._notes += [""] * n

    def deliver(self) -> None:
        """Resolve the submissions whose samples all have a verdict, up to the first incomplete one."""
        while self._submitted and None not in self._verdicts[self._submitted[0][0]]:
            rows, future = self._submitted.popleft()
            future.set_result(self._grades(rows))

    def fail(self, error: BaseException) -> None:
        """Raise the error in all unresolved submissions."""
        while self._submitted:
            self._submitted.popleft()[1].set_exception(error)

    def take(self) -> list[int]:
        return [self.queue.popleft() for _ in range(min(self._chunk, len(self.queue)))]

    def put_back(self, indices: deque[int]) -> None:
        self.queue.extendleft(reversed(indices))

    def settle(self, index: int, *, values: list[float], verdict: Verdict, extracted: str | None, note: str) -> None:
        self._values[index] = values
        self._verdicts[index], self._answers[index], self._notes[index] = verdict, extracted, note
        self.open -= 1

    def retry(self, index: int, note: str) -> None:
        if index in self._tried:
            self.give_up(index, "crash", note)
        else:
            self._tried.add(index)
            self.queue.appendleft(index)

    def give_up(self, index: int, verdict: Verdict, note: str) -> None:
        self._verdicts[index], self._notes[index] = verdict, note
        self.open -= 1

    def _grades(self, rows: slice) -> Grades:
        weights = np.array([weight for _, weight in self._rewards], np.float32)
        used = weights != 0  # a reward of weight 0 is only logged
        values = np.asarray(self._values[rows], np.float32).reshape(-1, len(weights))
        return Grades(
            rewards=values[:, used] @ weights[used],
            per_reward={name: values[:, column] for column, (name, _) in enumerate(self._rewards)},
            verdicts=[verdict for verdict in self._verdicts[rows] if verdict is not None],
            answers=self._answers[rows],
            notes=self._notes[rows],
        )


def _start(setup: dict[str, Any]) -> _Worker:
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
        worker.link.send(setup)
    return worker


def _checked(message: Any, *, values: int) -> dict[str, Any]:
    """Return a worker's reply if it is valid.

    Raises:
        InvalidMessage: it is not.
    """
    match message:
        case {"number": int(), "values": [*scores], "verdict": str(verdict), "extracted": extracted, "note": str()}:
            numbers = all(isinstance(score, float) for score in scores) and len(scores) == values
            if numbers and verdict in VERDICTS and (extracted is None or isinstance(extracted, str)):
                return message
    raise InvalidMessage("an invalid reply")


def worker_count(wanted: int | Literal["auto"], *, cores: int | None = None) -> int:
    """Resolve ``auto`` by the cores that this process may use: half of them, at least 2 and at most 32."""
    if wanted != "auto":
        return wanted
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // 2, 2), 32)


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
