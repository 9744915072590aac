"""Watch and end a process with its descendants. Needs Linux's /proc; elsewhere only its process group is known."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from glob import glob
from typing import NamedTuple

SUBREAPER, DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of prctl(2)
MAX_TICK = 1.0
"""Seconds between two looks at a clock; more than that the process that looks has slept."""


class Usage(NamedTuple):
    """The state letter of a process ("R" runs or wants to, "T" is stopped, "Z" has ended) and its CPU seconds."""

    state: str
    cpu: float


def bind() -> bool:
    """Keep future descendants in this process's tree, and end it with its parent; return False outside Linux.

    A descendant whose parent ends becomes this process's child. The parent is the thread that started this process.
    """
    if sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None).prctl
    return prctl(SUBREAPER, 1, 0, 0, 0) == 0 and prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0) == 0


def end_with(parent: int) -> None:
    """End this process with the process ``parent``, which started it, from now on, even if that has ended already."""
    bind()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents first."""
    members = [pid]
    for parent in members:  # the list grows in the loop
        for path in glob(f"/proc/{parent}/task/*/children"):
            members += map(int, _read(path).split())
    return members


def end_tree(pid: int) -> None:
    """Kill a process that is not reaped yet, its group and its descendants, even if they keep forking."""
    members: set[int] = set()
    while new_members := set(tree(pid)) - members:
        for member in new_members:  # a stopped process cannot fork
            _send(os.kill, member, signal.SIGSTOP)
        members |= new_members
    _send(os.killpg, pid, signal.SIGKILL)
    for member in members:
        _send(os.kill, member, signal.SIGKILL)


def _send(kill, pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, number)


def usage(pid: int) -> Usage | None:
    """Return a process's state and CPU time, all threads; None if the system does not report them."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # its name may hold anything
    if len(fields) < 13:
        return None
    return Usage(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def clock_seconds(elapsed: float, before: float, use: Usage | None) -> float:
    """Return how much of ``elapsed`` seconds counts against a worker's deadline.

    What this process slept through (SIGSTOP, a suspended machine) does not, and while the worker wants a processor only
    the time that it gets of one does. ``before``: the worker's CPU time ``elapsed`` seconds ago.
    """
    elapsed = min(elapsed, MAX_TICK)
    return elapsed if use is None or use.state != "R" else min(elapsed, use.cpu - before)


def memory_mb(pid: int) -> float:
    """Return the memory of a process and its descendants, theirs without shared pages; 0 if unknown."""
    root, *descendants = tree(pid)
    fields = _read(f"/proc/{root}/statm").split()
    resident = int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if len(fields) > 1 else 0.0
    return resident + sum(map(_proportional_mb, descendants))


def _proportional_mb(pid: int) -> float:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # it has ended, or there is no /proc
        return ""
