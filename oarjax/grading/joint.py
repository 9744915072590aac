"""Grade batch, group and async rewards in a worker process that is killed and replaced if a call hangs or dies.

A call is a reward with the samples that it sees together. If no verdict arrives for ``deadline`` seconds (on the clock
of ``grading/grader.py``), the samples without one get "timeout". If the process dies, the call is repeated once for
them; then they get "crash". So one bad completion costs the samples of its call: a batch or a group. An async reward
that waits too long costs its own sample; one that blocks the event loop costs all unfinished ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Float32

from oarjax.grading.process_tree import clock_seconds, end_tree, usage
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
        self._number = 0  # of calls so far
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
        self._number += 1
        try:
            asked = [asdict(samples[row]) for row in rows]
            worker.send({"call": self._number, "reward": name, "samples": asked})
            while True:
                message = worker.receive(self._setup["deadline"] + GRACE, lambda: self._closed)
                if message is None:
                    worker.end()
                    return list(left), True
                answer = _checked(message, call=self._number, samples=len(rows))
                if answer is None:
                    return list(left), False
                outcome.settle(rows[answer[0]], *answer[1:])
                left.pop(rows[answer[0]], None)
        except (EOFError, OSError, ValueError):  # it ended, or sent what is no answer of this call
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
        spent, then, before = 0.0, monotonic(), usage(self.process.pid)
        while not self.link.poll(POLL):
            if closed():
                raise RuntimeError("the grader was closed while grading")
            now, use = monotonic(), usage(self.process.pid)
            spent += clock_seconds(now - then, before.cpu if before else 0.0, use)
            then, before = now, use
            if spent > seconds:
                return None
        return json.loads(self.link.recv_bytes())

    def end(self) -> None:
        """Kill the worker and what it started."""
        if not self.ended:
            self.ended = True
            if self.process.poll() is None:
                end_tree(self.process.pid)
            self.link.close()
            self.process.wait()


def _checked(message: Any, *, call: int, samples: int) -> tuple[int, float, Verdict, str] | None:
    """Return the answer that a worker's message holds, or None if it says that the call is done.

    Raises:
        ValueError: it is no message of this call.
    """
    match message:
        case {"call": number, "done": True} if number == call:
            return None
        case {"call": number, "answer": [int(place), float(value), str(verdict), str(note)]} if number == call:
            if 0 <= place < samples and verdict in get_args(Verdict):
                return place, value, verdict, note  # type: ignore[return-value]
    raise ValueError(f"a message that is none of call {call}")


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
