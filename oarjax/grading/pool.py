"""Call a user's code in worker processes that the parent watches, kills and replaces one by one.

Rewards, environments and the software that they call can hang, crash or run out of memory. None of that may stop a run
or count as a wrong answer, so every item gets a result: a reply, or after it hung, killed its worker twice, used too
much memory or replied out of turn, a verdict that says so.

A call is what one worker does without a pause: items one after the other, or a joint call that sees all at once. An
item that hangs or kills its worker costs only itself; one of a joint call costs those of the call without a reply.

The deadline is measured by a clock that stops while this process sleeps (SIGSTOP, a suspended machine), and that
counts processor time while the worker waits for a processor: a busy machine makes no answer late. Any other wait, such
as a reward's request to a server, counts in full. Replies are numbered, and one with any number but an expected
one ends its worker, so that a late or forged reply never becomes another item's. A worker is killed with all its
descendants, and their memory counts as its own.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from oarjax.errors import UserError
from oarjax.grading.link import InvalidMessage, Link
from oarjax.grading.process_tree import clock_seconds, end_tree, memory_mb, usage
from oarjax.storage.trust import code_digest
from oarjax.types import Verdict

POLL = 0.05  # seconds between checks of deadlines and memory
START_LIMIT = 120.0  # seconds that a worker may take for its imports


class GraderError(UserError, RuntimeError):
    """Raised when workers cannot be started, with the last one's message, or their pool is closed."""


@dataclass(frozen=True)
class WorkerKind:
    """A pool's processes: the code that they run, and its limits."""

    name: str  # of the work, in messages
    module: str  # whose ``main(fd)`` they run, see ``oarjax.grading.serving``
    setup: Mapping[str, Any]  # their first message, with ``address_mb`` and ``memory_mb``
    deadline: float  # seconds per reply
    memory_mb: int  # limit of the resident memory of a worker and its descendants
    grace: float = 0.0  # seconds after the deadline in which a worker itself may report that it is late
    joint: bool = False  # the replies to a call come in any order, and share the fate of their worker
    code: tuple[str, ...] = ()  # the user's, as ``code_digest`` takes it
    reply: str = "verdict"


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen
    link: Link
    state: Literal["starting", "idle", "busy"] = "starting"
    pending: dict[int, int] = field(default_factory=dict)  # number -> item without a reply, the current one first
    spent: float = 0.0  # seconds on the clock since the start of the state, or the last verdict
    cpu: float | None = None  # CPU seconds at the last reading of the clock; None: not read since its start
    retire_mb: float = float("inf")  # resident memory above which an idle worker is replaced
    held: dict[Any, Any] = field(default_factory=dict)  # kept for later calls; it is not replaced while idle

    def restart_clock(self) -> None:
        self.spent, self.cpu = 0.0, None

    def end(self) -> int:
        """Kill the process and its descendants, reap it and close its link; return the exit code."""
        if self.process.returncode is None:
            end_tree(self.process.pid)
        self.link.close()
        return self.process.wait()


class CallQueue(ABC):
    """Items of one or more submissions that a pool works on together: the queue, and the results so far.

    Items are counted from 0 over all submissions. ``open``: the number of those without a result.
    """

    open: int = 0

    @abstractmethod
    def add(self, items: Sequence[Any], future: Future[Any]) -> None:
        """Add the items of a submission to the queue."""

    @abstractmethod
    def deliver(self) -> None:
        """Resolve the submissions whose items all have a result, up to the first incomplete one."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Raise the error in all unresolved submissions."""

    @abstractmethod
    def take(self, worker: Worker, workers: Sequence[Worker]) -> tuple[dict[str, Any], list[int]] | None:
        """Remove a call from the queue: its message, and the item of each reply; None: nothing for this worker now."""

    @abstractmethod
    def put_back(self, items: list[int]) -> None:
        """Put items that were not reached first in the queue again."""

    @abstractmethod
    def settle(self, item: int, reply: dict[str, Any], worker: Worker) -> None:
        """Record a reply.

        Raises:
            InvalidMessage: it is none.
        """

    @abstractmethod
    def retry(self, items: list[int], note: str) -> None:
        """Queue items once more whose worker ended; the second time it is a crash."""

    @abstractmethod
    def give_up(self, items: list[int], verdict: Verdict, note: str) -> None:
        """Record that items get no result."""


class Pool:
    """Workers that call a user's code. They end with ``close``, and with this process."""

    def __init__(self, kind: WorkerKind, work: Callable[[], CallQueue], *, workers: int):
        self._kind, self._work, self._size = kind, work, workers
        self._code = {code: code_digest(code) for code in kind.code}
        self.workers: list[Worker] = []
        self._failures = 0
        self._number = 0  # of samples sent so far
        self._ticked = 0.0
        self._closing = threading.Event()
        self._waiting: deque[tuple[Sequence[Any], Future[Any]]] = deque()
        # Workers end with the thread that starts them: this one lives as long as the pool.
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="pool")
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

    def submit(self, items: Sequence[Any]) -> Future[Any]:
        """Work in the background; futures are done in the order of submission.

        Items join those in progress, so that no worker is idle while another is busy with an earlier submission.

        Raises:
            GraderError: the pool is closed.
        """
        if self._closing.is_set():
            raise GraderError(f"the pool for {self._kind.name} is closed; use it inside its `with` block")
        future: Future[Any] = Future()
        self._waiting.append((items, future))
        self._driver.submit(self._drive)
        return future

    # The methods below run only in the driver thread.

    def _drive(self) -> None:
        batch = self._work()
        try:
            self._run(batch)
        except BaseException as error:
            _end_all(self.workers)  # their unfinished items must not reach the next batch
            batch.fail(error)

    def _run(self, batch: CallQueue) -> None:
        self._ticked = time.monotonic()
        while True:
            while self._waiting:
                batch.add(*self._waiting.popleft())
            batch.deliver()
            if not batch.open:
                return
            if self._closing.is_set():
                raise GraderError(f"the pool for {self._kind.name} was closed while it worked")
            self._start_missing()
            for worker in list(self.workers):
                if worker.state == "idle":
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
        if len(self.workers) < self._size:
            self._check_code()
        while len(self.workers) < self._size:
            self.workers.append(_start(self._kind))

    def _check_code(self) -> None:
        """Check that a new worker would import the code that the others have."""
        for code, digest in self._code.items():
            if code_digest(code) != digest:
                raise GraderError(
                    f"{code} has changed since the pool for {self._kind.name} was made, and a worker that starts now "
                    "would run the new code; put the old one back to go on with this run, or start another"
                )

    def _wait(self) -> None:
        """Return once a worker has sent data or accepts more, or it is time to check the clock."""
        poll = select.poll()
        for worker in self.workers:
            poll.register(worker.link, select.POLLIN | (select.POLLOUT if worker.link.waiting else 0))
        poll.poll(POLL * 1000)

    def _send_call(self, worker: Worker, batch: CallQueue) -> None:
        call = batch.take(worker, self.workers)
        if call is None:
            return
        message, items = call
        first, self._number = self._number, self._number + len(items)
        worker.pending = dict(zip(range(first, self._number), items))
        worker.state = "busy"
        worker.restart_clock()
        try:
            worker.link.send({"first": first, **message})
        except OSError:  # it died while idle, through none of these items
            self._dismiss(worker, batch)

    def _receive(self, worker: Worker, batch: CallQueue) -> bool:
        """Process the worker's messages, send it the rest of its samples; return False if the worker is gone."""
        try:
            for message in worker.link.receive():
                self._process(worker, batch, message)
            worker.link.flush()
        except InvalidMessage as error:
            self._replace_lost(worker, batch, f"the worker sent {error}; does its code fork, or write to its sockets?")
            return False
        except OSError:
            self._replace_lost(worker, batch)
            return False
        if worker.link.ended:
            self._replace_lost(worker, batch)
            return False
        if worker.state == "idle" and not worker.held and memory_mb(worker.process.pid) > worker.retire_mb:
            self._dismiss(worker, batch)  # memory left by earlier answers must not count against the next
            return False
        return True

    def _process(self, worker: Worker, batch: CallQueue, message: Any) -> None:
        if worker.state == "starting":
            if isinstance(message, dict) and "failed" in message:
                raise GraderError(f"a worker for {self._kind.name} could not start:\n{message['failed']}")
            if message != {"ready": True}:
                raise InvalidMessage("an unexpected message before it was ready")
            self._failures = 0
            worker.retire_mb = (memory_mb(worker.process.pid) + self._kind.memory_mb) / 2
        else:
            expected = worker.pending if self._kind.joint else list(worker.pending)[:1]
            number = message.pop("number", None) if isinstance(message, dict) else None
            if not isinstance(number, int):
                raise InvalidMessage("an invalid reply")
            if number not in expected:
                raise InvalidMessage("a reply out of turn")
            batch.settle(worker.pending[number], message, worker)
            del worker.pending[number]
        worker.restart_clock()
        if not worker.pending:
            worker.state = "idle"

    def _replace_lost(self, worker: Worker, batch: CallQueue, note: str | None = None) -> None:
        """Remove a worker that ended by itself; what it was grading is retried once, then it is a crash."""
        starting, lost = worker.state == "starting", self._take_current(worker)
        code = self._dismiss(worker, batch)
        if starting:
            self._failures += 1
            if self._failures >= 3:
                raise GraderError(
                    f"workers for {self._kind.name} end before they are ready (exit code {code}); see their messages"
                )
        batch.retry(lost, note or f"the worker ended with exit code {code}")

    def _enforce_limits(self, worker: Worker, batch: CallQueue, elapsed: float) -> None:
        """Advance the worker's clock, and end it if its answer takes too much time or memory."""
        use = usage(worker.process.pid)
        if use is not None and use.state == "Z":  # a descendant holds its end of the link open
            self._replace_lost(worker, batch)
            return
        was_measured, cpu = worker.cpu is not None, 0.0 if use is None else use.cpu
        if worker.cpu is not None:
            worker.spent += clock_seconds(elapsed, worker.cpu, use)
        worker.cpu = cpu
        kind = self._kind
        if worker.state == "starting" and worker.spent > START_LIMIT:
            self._replace_lost(worker, batch)
        elif worker.state == "busy" and was_measured:
            if worker.spent > kind.deadline + kind.grace:
                lost = self._take_current(worker)
                self._dismiss(worker, batch)
                if use is not None and use.state in "Tt":  # stopped from outside
                    batch.retry(lost, "its worker was stopped by a signal")
                else:
                    batch.give_up(lost, "timeout", f"no {kind.reply} within {kind.deadline:g} s")
            elif memory_mb(worker.process.pid) > kind.memory_mb:
                lost = self._take_current(worker)
                self._dismiss(worker, batch)
                batch.retry(lost, f"used more than {kind.memory_mb} MB of memory")

    def _take_current(self, worker: Worker) -> list[int]:
        """Remove the items that share the fate of the worker: the current one, or all of a joint call."""
        shared = list(worker.pending)[: None if self._kind.joint else 1]
        return [worker.pending.pop(number) for number in shared]

    def _dismiss(self, worker: Worker, batch: CallQueue) -> int:
        self.workers.remove(worker)
        batch.put_back(list(worker.pending.values()))
        return worker.end()


def _start(kind: WorkerKind) -> Worker:
    parent_end, child_end = socket.socketpair()
    fd = child_end.fileno()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {kind.module} import main; main({fd})"],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=2,  # code that prints must not mix with the command's own output
        start_new_session=True,  # a group of its own, to be killed as one
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "JAX_PLATFORMS": "cpu",  # code that imports jax must not take the accelerator
        },
    )
    child_end.close()
    worker = Worker(process, Link(parent_end))
    with suppress(OSError):  # it has ended already, which is noticed when its messages are read
        worker.link.send(dict(kind.setup))
    return worker


def _end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()
