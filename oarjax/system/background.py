"""Compile programs in threads, in the order in which a run needs them, while the run goes on.

    with Background(threads=4) as background:
        step = awaited(jax.jit(...))
        background.add(step, args, static)    # shapes; the programs that are needed first come first
        background.start()
        step(*args, **static)                 # waits for its program, or compiles it if nobody has begun to

A program is the same whoever compiles it. Nothing is run in these threads: of several processes each would run
collectives in an order of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

import jax
import numpy as np

from oarjax.system.peers import PEERS

Guard = Callable[[Callable[[], Any]], Any]
"""Calls its argument, which lowers or compiles a program; may turn its errors into others."""

THREADS = "oarjax-compile"
"""Beginning of the names of the threads."""


class Awaited:
    """A jitted function some of whose programs another thread compiles: calls wait for theirs."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.pending: dict[Any, Future[None]] = {}

    def __call__(self, *args: Any, **static: Any) -> Any:
        self._wait(args, static)
        return self.jitted(*args, **static)

    def lower(self, *args: Any, **static: Any) -> Any:
        """Lower as the jitted function does, once its program is there."""
        self._wait(args, static)
        return self.jitted.lower(*args, **static)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def _wait(self, args: Any, static: Mapping[str, Any]) -> None:
        """Wait for the program of such arguments, unless it has not been begun: the call itself then compiles it.

        Raises:
            Exception: the compilation failed.
        """
        if not self.pending:
            return
        future = self.pending.pop(signature(args, static), None)
        if future is not None and not future.cancel():
            future.result()


def awaited(jitted: Any) -> Awaited:
    """Wrap a jitted function, once."""
    return jitted if isinstance(jitted, Awaited) else Awaited(jitted)


def signature(args: Any, static: Mapping[str, Any]) -> Any:
    """Identify a program by its static arguments and the shapes of the others."""
    return tuple(sorted(static.items())), tuple(np.shape(x) for x in jax.tree.leaves(args))


class Background:
    """Programs to compile, and the threads that do. Leaving the block forgets those that have not been begun."""

    def __init__(self, *, threads: int) -> None:
        self._jobs: list[tuple[Future[None], Callable[[], Any], Guard]] = []
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=THREADS)
        self._free, self._begun, self._closed = threading.Semaphore(threads), False, False

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for future, *_ in self._jobs:
            future.cancel()
        self._free.release()
        self._pool.shutdown(wait=False)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, program: Awaited, args: Any, static: Mapping[str, Any], guard: Guard = lambda work: work()) -> None:
        """Add a program, for arguments given as shapes."""
        future: Future[None] = Future()
        program.pending[signature(args, static)] = future
        self._jobs.append((future, lambda: program.jitted.lower(*args, **static), guard))

    def start(self) -> None:
        """Begin, once. One thread lowers the programs in turn; the compiler works outside Python's lock."""
        if self._begun:
            return
        self._begun = True
        threading.Thread(target=self._lower, name=f"{THREADS}-lower").start()

    def check(self) -> None:
        """Report what has failed so far.

        Raises:
            Exception: the error of the first program that could not be compiled.
        """
        for future, *_ in self._jobs:
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                raise error

    def _lower(self) -> None:
        for future, lower, guard in self._jobs:
            self._free.acquire()
            if self._closed:
                return
            if not future.set_running_or_notify_cancel():
                self._free.release()
                continue
            try:
                self._pool.submit(self._compile, future, guard(lower), guard)
            except BaseException as error:
                if self._closed:  # the pool takes no more: a call compiles it
                    future.set_result(None)
                else:  # whoever waits gets it
                    future.set_exception(error)
                self._free.release()
        self._pool.shutdown(wait=False)  # its threads end with the last program

    def _compile(self, future: Future[None], lowered: Any, guard: Guard) -> None:
        try:
            guard(lowered.compile)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            self._free.release()


def compiling() -> bool:
    """Return True while a program of this process is being compiled, or waits for it, in the background."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def leave(code: int, *, stopped: bool = False) -> None:
    """End this process at once if a program is still being compiled, or a signal stopped it; do nothing else.

    An orderly exit would wait for the compiler, minutes perhaps, with the run saved and complete. A signal may have
    come while the main thread's own call compiles, in threads of XLA that an orderly exit would crash. Of several
    processes, which hear of signals between phases alone, all end here, since they agreed to.
    """
    if not compiling() and (not stopped or jax.distributed.is_initialized()):
        return
    if jax.distributed.is_initialized():
        PEERS.leave()
        with suppress(Exception):  # another one may be gone already
            jax.distributed.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
