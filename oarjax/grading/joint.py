"""Grade batch, group and async rewards in a worker process that is killed and replaced if a call hangs or dies.

A call is a reward with the samples that it sees together. If no verdict arrives for ``deadline`` seconds, the samples
without one get "timeout". If the process dies, the call is repeated once for them; then they get "crash". So one bad
completion costs the samples of its call: a batch or a group. An async reward that waits too long costs its own sample;
one that blocks the event loop costs all unfinished ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from oarjax.grading.rewards import Reward, Sample, calls_of
from oarjax.types import Verdict

START_LIMIT = 120.0  # seconds that the worker may take for its imports
GRACE = 2.0  # seconds after the deadline in which the worker itself may report a late async call
POLL = 0.1


@dataclass
class Outcome:
    """Values and verdicts of one reward for all samples."""

    values: Float32[np.ndarray, "B"]
    verdicts: list[Verdict]
    notes: list[str]

    @classmethod
    def unknown(cls, count: int) -> Outcome:
        return cls(np.full(count, np.nan, np.float32), ["ungraded"] * count, [""] * count)

    def settle(self, row: int, value: float | None, verdict: Verdict, note: str) -> None:
        self.values[row] = np.nan if value is None else value
        self.verdicts[row], self.notes[row] = verdict, note


@runtime_checkable
class Rewards(Protocol):
    """Some rewards of a run, graded together."""

    @property
    def names(self) -> Sequence[str]: ...

    def grade(self, samples: Sequence[Sample]) -> dict[str, Outcome]: ...

    def close(self) -> None: ...


def calls(name: str, samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Yield the rows of each call of a reward: a group's, or all."""
    rows = range(len(samples))
    if calls_of(name) == "group":
        for _, group in groupby(rows, key=lambda row: samples[row].group):
            yield list(group)
    elif len(samples):
        yield list(rows)


class JointRewards:
    """Grade rewards in a separate worker process.

    Args:
        rewards: names.
        settings: of rewards by name.
        plugins: Python files or modules that register rewards.
        deadline: seconds per call of a batch or group reward, and per sample of an async one.
        concurrency: samples of an async reward in flight.
        memory_mb: a quarter of the worker's address space.
        style, pattern: how an answer is marked in a completion.
    """

    def __init__(
        self,
        rewards: Sequence[str],
        *,
        settings: Mapping[str, dict[str, Any]],
        plugins: Sequence[str],
        deadline: float,
        concurrency: int,
        memory_mb: int,
        style: str,
        pattern: str | None,
    ):
        self.names = tuple(rewards)
        self._setup = {
            "rewards": list(rewards),
            "settings": dict(settings),
            "plugins": [os.path.abspath(os.path.expanduser(p)) if p.endswith(".py") else p for p in plugins],
            "deadline": deadline,
            "concurrency": concurrency,
            "memory_mb": memory_mb,
            "style": style,
            "pattern": pattern,
        }
        self._worker: _Worker | None = None
        self._closed = False

    def grade(self, samples: Sequence[Sample]) -> dict[str, Outcome]:
        """Grade and wait; for one thread at a time.

        Raises:
            RuntimeError: the worker cannot be started, or this was closed.
        """
        outcomes = {}
        for name in self.names:
            outcome = outcomes[name] = Outcome.unknown(len(samples))
            for rows in calls(name, samples):
                self._call(name, rows, samples, outcome)
        return outcomes

    def close(self) -> None:
        """End the worker; a call in progress raises RuntimeError in its thread."""
        self._closed = True
        if self._worker is not None:
            self._worker.end()

    def _call(self, name: str, rows: list[int], samples: Sequence[Sample], outcome: Outcome) -> None:
        for attempt in range(2):
            left, late = self._attempt(name, rows, samples, outcome)
            if not left:
                return
            if late or attempt == 1:
                note = f"no verdict within {self._setup['deadline']:g} s" if late else "its worker ended"
                for row in left:
                    outcome.settle(row, None, "timeout" if late else "crash", note)
                return
            rows = left

    def _attempt(
        self, name: str, rows: list[int], samples: Sequence[Sample], outcome: Outcome
    ) -> tuple[list[int], bool]:
        """Make a call; return the rows without a verdict, and True if it was late, False if its worker died."""
        worker, left = self._started(), dict.fromkeys(rows)
        try:
            worker.send({"reward": name, "samples": [asdict(samples[row]) for row in rows]})
            while True:
                message = worker.receive(self._setup["deadline"] + GRACE, lambda: self._closed)
                if message is None:
                    worker.end()
                    return list(left), True
                if "done" in message:
                    return list(left), False
                place, value, verdict, note = message["answer"]
                outcome.settle(rows[place], value, verdict, note)
                left.pop(rows[place], None)
        except (EOFError, OSError, ValueError):
            worker.end()
            return list(left), False

    def _started(self) -> _Worker:
        if self._closed:
            raise RuntimeError("the grader is closed; grade inside its `with` block")
        if self._worker is None or self._worker.ended:
            self._worker = _start(self._setup)
        return self._worker


class LocalRewards:
    """Callables of this process, called in the grading thread; one that hangs cannot be stopped."""

    def __init__(self, rewards: Mapping[str, Reward], *, prepare: Callable[[Sample], Sample], limits: Any):
        self.names = tuple(rewards)
        self._rewards, self._prepare, self._limits = rewards, prepare, limits

    def grade(self, samples: Sequence[Sample]) -> dict[str, Outcome]:
        """Grade and wait."""
        from oarjax.grading.joint_worker import make_call

        outcomes, ready = {}, [self._prepare(sample) for sample in samples]
        for name, function in self._rewards.items():
            outcome = outcomes[name] = Outcome.unknown(len(samples))
            for rows in calls(name, ready):

                def emit(place: int, *answer: Any, rows: list[int] = rows, outcome: Outcome = outcome) -> None:
                    outcome.settle(rows[place], *answer)

                make_call(function, calls_of(name), [ready[row] for row in rows], self._limits, emit)
        return outcomes

    def close(self) -> None:
        """Do nothing: callables end by themselves."""


@dataclass
class _Worker:
    process: subprocess.Popen
    link: Connection
    ended: bool = field(default=False)

    def send(self, message: dict[str, Any]) -> None:
        self.link.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float, closed: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait for a message; return None if none arrives in time.

        Raises:
            EOFError, OSError: the worker is gone.
            RuntimeError: the grader was closed.
        """
        end = time.monotonic() + seconds
        while not self.link.poll(POLL):
            if closed():
                raise RuntimeError("the grader was closed while grading")
            if time.monotonic() > end:
                return None
        return json.loads(self.link.recv_bytes())

    def end(self) -> None:
        """Kill the worker and its process group."""
        if not self.ended:
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.link.close()
            self.process.wait()


def _start(setup: dict[str, Any]) -> _Worker:
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from oarjax.grading.joint_worker import main; main({fd})"],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=2,  # a reward that prints must not mix with the command's own output
        process_group=0,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "JAX_PLATFORMS": "cpu",
        },
    )
    theirs.close()
    worker = _Worker(process, Connection(ours.detach()))
    try:
        worker.send(setup)
        message = worker.receive(START_LIMIT, lambda: False) or {"failed": f"not ready within {START_LIMIT:g} s"}
    except (EOFError, OSError) as error:
        message = {"failed": f"it ended before it was ready ({error})"}
    if "failed" in message:
        worker.end()
        raise RuntimeError(f"the worker of batch, group and async rewards could not start:\n{message['failed']}")
    return worker
