"""Jobs in a few worker processes that live on from job to job, each on cores of its own.

A worker is any command that reads one JSON object a line from its standard input and answers each with one line,
``{"error": null}`` or ``{"error": "what went wrong"}``. A job that fails, and a worker that dies, cost that job alone
and the jobs that need it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oarjax.errors import UserError


class StudyError(UserError, RuntimeError):
    """Jobs that failed; the others have ended and count."""


@dataclass(frozen=True)
class Job:
    name: str
    task: Mapping[str, Any]  # sent to the worker as JSON
    needs: str | None = None  # a job of this name that has to succeed first


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    error: str | None  # None: it succeeded


@dataclass
class _Board:
    """What is still to be done, shared by the threads that mind one worker each."""

    waiting: list[Job]
    running: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    stopped: bool = False


def run_jobs(
    jobs: Sequence[Job],
    command: Sequence[str],
    *,
    workers: int,
    log: Path,
    report: Callable[[Outcome, int], None] = lambda outcome, left: None,
) -> list[Outcome]:
    """Run every job, the first ready one first, and say how each ended, in the order of ``jobs``.

    Args:
        jobs: with different names; one whose ``needs`` is no job here counts as ready.
        command: starts a worker.
        workers: processes at once; the cores of this machine are shared out among them.
        log: folder for what workers print, worker0.log and so on.
        report: called after each job, with the number of jobs that are left; never twice at a time.
    """
    board = _Board(list(jobs))
    log.mkdir(parents=True, exist_ok=True)
    shares = share_out(cores(), workers)
    minders = [
        threading.Thread(target=_mind, args=(board, command, shares[n], log / f"worker{n}.log", report), daemon=True)
        for n in range(min(workers, len(jobs)))
    ]
    for thread in minders:
        thread.start()
    try:
        while any(thread.is_alive() for thread in minders):
            for thread in minders:
                thread.join(0.2)  # short: Ctrl-C arrives between two
    finally:
        with board.changed:
            board.stopped = True
            board.changed.notify_all()
        for thread in minders:
            thread.join()
    return [board.outcomes[job.name] for job in jobs]


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_out(cores: Sequence[int], workers: int) -> list[list[int]]:
    """Cores for each worker: as even as can be, every core once; where there are fewer, several on one core."""
    if workers > len(cores):
        return [[cores[n % len(cores)]] for n in range(workers)]
    return [list(cores[n::workers]) for n in range(workers)]


def _mind(
    board: _Board, command: Sequence[str], mine: list[int], log: Path, report: Callable[[Outcome, int], None]
) -> None:
    """Keep one worker busy until nothing is left for it."""
    worker: subprocess.Popen[str] | None = None
    with log.open("a", encoding="utf-8") as said:
        try:
            while (job := _next(board, report)) is not None:
                began = time.monotonic()
                try:
                    worker = worker or _start(command, mine, said)
                    error = _ask(worker, job, board)
                    worker = worker if worker.poll() is None else None
                except OSError as problem:
                    error = f"no worker: {problem}"
                with board.changed:
                    if not board.stopped:
                        _settle(board, Outcome(job.name, time.monotonic() - began, error), report)
        except BaseException:  # of report: nobody is to wait for this thread
            with board.changed:
                board.stopped = True
                board.changed.notify_all()
            raise
        finally:
            if worker is not None:
                worker.kill()
                worker.wait()


def _next(board: _Board, report: Callable[[Outcome, int], None]) -> Job | None:
    """The first job whose need is met, as soon as there is one; None when there will be none."""
    with board.changed:
        while True:
            for job in list(board.waiting):
                need = board.outcomes.get(job.needs or "")
                if need is not None and need.error is not None:
                    board.waiting.remove(job)
                    _settle(board, Outcome(job.name, 0.0, f"not run: it needs {need.name}, which failed"), report)
            pending = board.running | {job.name for job in board.waiting}
            ready = [job for job in board.waiting if job.needs not in pending]
            if board.stopped or not (ready or board.running):
                return None
            if ready:
                board.waiting.remove(ready[0])
                board.running.add(ready[0].name)
                return ready[0]
            board.changed.wait()


def _settle(board: _Board, outcome: Outcome, report: Callable[[Outcome, int], None]) -> None:
    board.running.discard(outcome.name)
    board.outcomes[outcome.name] = outcome
    report(outcome, len(board.waiting) + len(board.running))
    board.changed.notify_all()


def _start(command: Sequence[str], mine: list[int], said: Any) -> subprocess.Popen[str]:
    # Not by prctl or a signal at the parent's death: a worker ends when its standard input does.
    worker = subprocess.Popen(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, process_group=0
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(worker.pid, mine)  # before it has imported anything that counts cores
    return worker


def _ask(worker: subprocess.Popen[str], job: Job, board: _Board) -> str | None:
    """Send a job and wait; the error, None where it succeeded. The worker is killed when the study stops."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if board.stopped:
                worker.kill()

    threading.Thread(target=watch, daemon=True).start()
    try:
        if worker.stdin is None or worker.stdout is None:
            raise OSError("the worker has no pipes")
        worker.stdin.write(json.dumps(dict(job.task)) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if answer.endswith("\n"):
            return json.loads(answer)["error"]
    except (OSError, ValueError, KeyError) as error:
        worker.kill()
        worker.wait()  # or it would look alive, and be given the next job
        return f"the worker cannot be talked to: {error!r}"
    finally:
        done.set()
    worker.kill()
    return f"the worker died, exit code {worker.wait()}; what it said is in its log"
