"""Save and stop on SIGTERM, Ctrl-C, a closed terminal (SIGHUP) or a TPU pod's notice of preemption.

Inside ``held`` a first signal only sets a flag, which the loop asks for after every iteration; anywhere else nothing
would be lost and it ends the run at once. Either way the exit code says: resume with the same command. A second signal
kills. Under nohup, which ignores SIGHUP, it stays ignored.
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
"""Exit code of a run that was stopped by a signal: EX_TEMPFAIL of sysexits.h. The same command resumes it."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(SystemExit):
    """The run was stopped by a signal, after saving what there was to save."""

    def __init__(self) -> None:
        super().__init__(RESUMABLE)


class Stop:
    """Listen for signals around a run, as a context manager. Only the main thread hears them; elsewhere none come."""

    def __init__(self) -> None:
        self._told = self._held = False
        self._asked = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            # Of several processes one may be told alone; JAX's own handler of SIGTERM tells all the others.
            heard = () if jax.distributed.is_initialized() else SIGNALS
            heard = [number for number in heard if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make a first signal wait until it is asked for; one that was not asked for stops the run at the end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._told:
            self.obey()

    def asked(self) -> bool:
        """Return whether to save and stop now; the same on all processes, which must ask equally often."""
        self._asked += 1
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._told

    def obey(self) -> NoReturn:
        """Stop the run.

        Raises:
            Stopped: always.
        """
        raise Stopped

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self._told and number == signal.SIGHUP:  # a closing terminal sends it besides SIGTERM, or twice
            return
        if self._told or jax.distributed.is_initialized():  # a Ctrl-C on one host of many: the others cannot continue
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._told = True
        if not self._held:
            raise Stopped
        # print() may not be called again from within itself; where the terminal is gone there is nobody to tell.
        text = f"\n{signal.Signals(number).name}: saving after this iteration; once more to end at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
