"""End Python code of others that runs too long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class TooLong(Exception):
    """Code ran longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong within Python code that runs longer; only the main thread can be interrupted, others run on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> NoReturn:
        raise TooLong(f"it ran longer than {seconds:g} s")

    outer_handler = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler)
