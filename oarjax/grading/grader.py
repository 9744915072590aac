"""Grading in worker processes that the parent watches, kills and replaces one by one.

The software that compares model output can hang, crash or exhaust memory on it. None of that may stop a run or count
as a wrong answer, so every sample gets a verdict:

    graded       every reward returned a number
    unparseable  a reward could not parse the model's answer; that reward is 0, counted apart
    ungraded     unknown (the reference is not an expression, or a reward returned NaN)
    timeout      the answer took longer than the deadline; its worker was killed
    crash        a reward raised, or its worker died or used too much memory, twice

The last three have reward NaN, which the group advantages ignore.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import numpy as np

from oarjax.credit.answer_text import Style, check_pattern
from oarjax.errors import UserError
from oarjax.grading.rewards import Sample, find_rewards, load_plugins
from oarjax.types import Grades, Verdict

POLL = 0.05  # seconds between checks of deadlines and memory
START_LIMIT = 120.0  # seconds that a worker may take for its imports
CHUNK = 16  # samples sent to a worker at a time


class GraderError(UserError, RuntimeError):
    """Workers cannot be started, with the last one's message, or the grader is closed."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    link: Connection
    state: Literal["starting", "idle", "busy"] = "starting"
    since: float = field(default_factory=time.monotonic)  # start of the state, or of the current answer
    chunk: deque[int] = field(default_factory=deque)  # samples not answered yet, the current one first
    retire_mb: float = float("inf")  # resident memory above which an idle worker is replaced

    def end(self) -> int:
        """Kill and reap the process, close its link; return the exit code."""
        self.process.kill()
        self.link.close()
        return self.process.wait()


class Grader:
    """A pool of grading workers. Use as a context manager; workers end with it, and with this process.

    Args:
        rewards: (name, weight) pairs.
        plugins: Python files or modules that register rewards, imported here to check the names, and in every worker.
        workers: number of processes.
        deadline: wall-clock seconds per answer; a worker's start-up does not count.
        memory_mb: resident memory of a worker.
        style, pattern: how an answer is marked in a completion, see ``oarjax.credit.answer_text``.

    Raises:
        ValueError: an unknown reward, a plugin that cannot be imported, or a bad pattern.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str, float]],
        *,
        plugins: Sequence[str] = (),
        workers: int = 2,
        deadline: float = 5.0,
        memory_mb: int = 2048,
        style: Style = "boxed",
        pattern: str | None = None,
    ):
        load_plugins(plugins)
        names = [name for name, _ in rewards]
        find_rewards(names)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"grading.rewards: expected at least one reward and each once, got {names}")
        if style == "regex":
            check_pattern(pattern)
        self._rewards = tuple(rewards)
        self._setup = {
            "plugins": [os.path.abspath(os.path.expanduser(p)) if p.endswith(".py") else p for p in plugins],
            "rewards": names,
            "deadline": deadline,
            "memory_mb": memory_mb,
            "style": style,
            "pattern": pattern,
        }
        self._size = workers
        self._workers: list[_Worker] = []
        self._failures = 0
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

        Samples join those in progress, so that no worker is idle while another takes long over an earlier submission.
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
            wait([worker.link for worker in self._workers], timeout=POLL)
            for worker in list(self._workers):
                if self._receive(worker, batch):
                    self._enforce_limits(worker, batch)

    def _start_missing(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(_start(self._setup))

    def _send_chunk(self, worker: _Worker, batch: _Batch) -> None:
        worker.chunk.extend(batch.take())
        worker.state, worker.since = "busy", time.monotonic()
        try:
            worker.link.send_bytes(json.dumps([asdict(batch.samples[i]) for i in worker.chunk]).encode())
        except OSError:  # it died while idle; none of these samples is to blame
            self._dismiss(worker, batch)

    def _receive(self, worker: _Worker, batch: _Batch) -> bool:
        """Process the worker's messages; return False if the worker is gone."""
        try:
            while worker.link.poll():
                self._process(worker, batch, json.loads(worker.link.recv_bytes()))
        except (EOFError, OSError):
            self._replace_lost(worker, batch)
            return False
        if worker.state == "idle" and _resident_mb(worker.process.pid) > worker.retire_mb:
            self._dismiss(worker, batch)  # memory left by earlier answers must not count against the next
            return False
        return True

    def _process(self, worker: _Worker, batch: _Batch, message: dict[str, Any]) -> None:
        if "failed" in message:
            raise GraderError(f"a grading worker could not start:\n{message['failed']}")
        if "ready" in message:
            self._failures = 0
            worker.retire_mb = (_resident_mb(worker.process.pid) + self._setup["memory_mb"]) / 2
        else:
            batch.settle(worker.chunk.popleft(), **message)
        worker.since = time.monotonic()
        if not worker.chunk:
            worker.state = "idle"

    def _replace_lost(self, worker: _Worker, batch: _Batch) -> None:
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
            batch.retry(current, f"the worker ended with exit code {code}")

    def _enforce_limits(self, worker: _Worker, batch: _Batch) -> None:
        """Kill a worker whose answer takes too much time or memory."""
        age = time.monotonic() - worker.since
        if worker.state == "starting" and age > START_LIMIT:
            self._replace_lost(worker, batch)
        elif worker.state == "busy":
            if age > self._setup["deadline"]:
                batch.give_up(worker.chunk.popleft(), "timeout", f"no verdict within {self._setup['deadline']:g} s")
                self._dismiss(worker, batch)
            elif age > POLL / 2 and _resident_mb(worker.process.pid) > self._setup["memory_mb"]:
                current = worker.chunk.popleft()
                self._dismiss(worker, batch)
                batch.retry(current, f"used more than {self._setup['memory_mb']} MB of memory")

    def _dismiss(self, worker: _Worker, batch: _Batch) -> int:
        self._workers.remove(worker)
        batch.put_back(worker.chunk)
        return worker.end()


class _Batch:
    """Samples that are graded together, of one submission or several: those in the queue, and the verdicts so far."""

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
        """Resolve the submissions whose samples all have a verdict, up to the first that has not."""
        while self._submitted and None not in self._verdicts[self._submitted[0][0]]:
            rows, future = self._submitted.popleft()
            future.set_result(self._grades(rows))

    def fail(self, error: BaseException) -> None:
        """Raise the error in all submissions that are left."""
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
        process_group=0,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "JAX_PLATFORMS": "cpu",  # a plugin that imports jax must not take the accelerator
        },
    )
    theirs.close()
    link = Connection(ours.detach())
    link.send_bytes(json.dumps(setup).encode())
    return _Worker(process, link)


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _resident_mb(pid: int) -> float:
    """Return a process's resident memory; 0 if the system does not report it (the worker's own limit applies)."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
