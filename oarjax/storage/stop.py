"""Save and stop on SIGTERM, Ctrl-C, a closed terminal (SIGHUP) or a TPU pod's notice of preemption.

Inside ``held`` a first signal only sets a flag, which the loop reads between the phases of an iteration. Elsewhere
nothing would be lost, so the signal ends the run at once. In both cases the exit code means: resume with the same
command. A second signal kills, but for SIGHUP: after the first signal it is ignored until the process ends, since a
closing terminal sends it twice, or after SIGTERM. Under nohup SIGHUP stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

RESUMABLE = 75
"""Exit code of a run that a signal stopped: EX_TEMPFAIL of sysexits.h. The same command resumes it."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(SystemExit):
    """Raised when a signal stopped the run, after all finished work was saved."""

    def __init__(self) -> None:
        super().__init__(RESUMABLE)


class Stop:
    """Listen for signals around a run, as a context manager. Only the main thread receives them."""

    def __init__(self) -> None:
        self._signalled = self._held = self._ending = False
        self._asked = 0
        self.notice = ""  # of a signal that waits for the end of a phase
        self.displayed = False  # True while a live display shows the notice
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            # A signal may reach only one of several processes; JAX's handler of SIGTERM notifies the others.
            handled = () if jax.distributed.is_initialized() else SIGNALS
            handled = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        if self._ending and signal.SIGHUP in self._before:
            self._before[signal.SIGHUP] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer a first signal until ``asked``; if it is not read there, it stops the run at the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._signalled:
            self.obey()

    def asked(self) -> bool:
        """Return True if the run must save and stop now; equal on all processes, which must call it equally often."""
        self._asked += 1
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._signalled

    def check(self) -> None:
        """Stop the run here if it is to be stopped: between phases that leave nothing to save.

        One process alone stops at once outside ``held``; of several, each hears of the signal only by asking.

        Raises:
            Stopped: it was.
        """
        if self.asked():
            self.obey()

    def obey(self) -> NoReturn:
        """Stop the run.

        Raises:
            Stopped: always.
        """
        raise Stopped

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._signalled and number == signal.SIGHUP:
            return
        if self._signalled or jax.distributed.is_initialized():  # Ctrl-C on one of many hosts
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signalled, self._ending = True, number != signal.SIGINT  # a notebook's process survives that
        if not self._held:
            raise Stopped
        key = "Ctrl-C" if number == signal.SIGINT else "signal"
        self.notice = (
            f"{signal.Signals(number).name}: saves after this phase; {key} again ends now and loses unsaved work"
        )
        if self.displayed:  # which would draw over it
            return
        # print() is not reentrant; without a terminal the write fails and nobody reads it.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{self.notice}\n".encode())
