"""Run jobs in a few persistent worker processes, each on its own cores.

A worker is any command that reads one JSON object per line from its standard input and answers each with one line,
``{"error": null}`` or ``{"error": "message"}``. A job that fails, or a worker that dies, affects only that job and the
jobs that need it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oarjax.errors import UserError
from oarjax.system.devices import with_large_pages


class StudyError(UserError, RuntimeError):
    """Raised when some jobs failed; the others have finished."""


def study_remedy(message: str, folder: Path) -> str:
    """Replace a run's remedy --restart, which a study does not have, by the removal of the run's folder."""
    return re.sub(r"pass --restart to move \w+( \w+)? aside and start over", f"remove {folder} to start over", message)


@dataclass(frozen=True)
class Job:
    name: str
    task: Mapping[str, Any]  # sent to the worker as JSON
    needs: str | None = None  # name of a job that must succeed first
    like: str | None = None  # a worker does jobs that are alike faster after one another


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    error: str | None  # None on success


@dataclass
class _Board:
    """Waiting and running jobs, shared by the threads, each of which drives one worker."""

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
    """Run every job, and return the outcomes in the order of ``jobs``.

    A worker takes the first ready job that is like its last one; without any, the first ready job.

    Args:
        jobs: with distinct names; a job whose ``needs`` is not among them is ready.
        command: starts a worker.
        workers: processes at once; they share this machine's cores.
        log: folder for the workers' output, worker0.log and so on.
        report: called after each job with the number of jobs left; never concurrently.
    """
    board = _Board(list(jobs))
    log.mkdir(parents=True, exist_ok=True)
    shares = share_out(cores(), workers)
    ends: list[threading.Event] = []  # not Thread.join: after a signal in it Python takes the thread for ended

    def drive(number: int, end: threading.Event) -> None:
        try:
            _drive(board, command, shares[number], log / f"worker{number}.log", report)
        finally:
            end.set()

    try:
        for number in range(min(workers, len(jobs))):
            end = threading.Event()
            threading.Thread(target=drive, args=(number, end), daemon=True).start()
            ends.append(end)
        while not all(end.is_set() for end in ends):
            for end in ends:
                end.wait(0.2)  # short, so that signals are handled in time
    finally:
        with board.changed:
            board.stopped = True
            board.changed.notify_all()
        for end in ends:
            end.wait()
    return [board.outcomes[job.name] for job in jobs]


def cores() -> list[int]:
    """List the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_out(cores: Sequence[int], workers: int) -> list[list[int]]:
    """Divide the cores among workers as evenly as possible; with fewer cores than workers, share them."""
    if workers > len(cores):
        return [[cores[n % len(cores)]] for n in range(workers)]
    return [list(cores[n::workers]) for n in range(workers)]


def _drive(
    board: _Board, command: Sequence[str], mine: list[int], log: Path, report: Callable[[Outcome, int], None]
) -> None:
    """Keep one worker busy until no job is left for it."""
    worker: subprocess.Popen[str] | None = None
    with log.open("a", encoding="utf-8") as output:
        try:
            like = None
            while (job := _next(board, report, like)) is not None:
                like = job.like
                start = time.monotonic()
                try:
                    worker = worker or _start(command, mine, output)
                    error = _ask(worker, job, board)
                    worker = worker if worker.poll() is None else None
                except OSError as problem:
                    error = f"the worker could not be started: {problem}"
                with board.changed:
                    if not board.stopped:
                        _settle(board, Outcome(job.name, time.monotonic() - start, error), report)
        except BaseException:  # raised by report; nothing may wait for this thread
            with board.changed:
                board.stopped = True
                board.changed.notify_all()
            raise
        finally:
            if worker is not None:
                worker.kill()
                worker.wait()


def _next(board: _Board, report: Callable[[Outcome, int], None], like: str | None) -> Job | None:
    """Wait for a ready job and take it, preferably one ``like`` the last; None when no job is left."""
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
                job = next((job for job in ready if like is not None and job.like == like), ready[0])
                board.waiting.remove(job)
                board.running.add(job.name)
                return job
            board.changed.wait()


def _settle(board: _Board, outcome: Outcome, report: Callable[[Outcome, int], None]) -> None:
    board.running.discard(outcome.name)
    board.outcomes[outcome.name] = outcome
    report(outcome, len(board.waiting) + len(board.running))
    board.changed.notify_all()


def _start(command: Sequence[str], mine: list[int], output: Any) -> subprocess.Popen[str]:
    # The thread that calls this lives as long as the worker, whose death signal follows it.
    worker = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        text=True,
        process_group=0,
        env={**with_large_pages(os.environ), "OARJAX_STUDY": str(os.getpid())},
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(worker.pid, mine)  # before it imports a package that counts cores
    return worker


def _ask(worker: subprocess.Popen[str], job: Job, board: _Board) -> str | None:
    """Send a job and wait; return its error, None on success. The worker is killed when the study stops."""
    reply_event = threading.Event()

    def watch() -> None:
        while not reply_event.wait(0.2):
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
        worker.wait()  # otherwise it looks alive and gets the next job
        return f"the worker does not answer: {error!r}"
    finally:
        reply_event.set()
    worker.kill()
    return f"the worker died with exit code {worker.wait()}; see its log"
