"""Serve calls in a worker process: read them from a socket and send back one message per item.

``grading/pool.py`` starts the process with ``python -c``, so that it inherits nothing from the training process (main
module, jax, threads). Both directions are JSON: the parent unpickles nothing from a worker.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

from oarjax.grading.process_tree import bind
from oarjax.system.secrets import masked

MAX_FRAMES = 1000
"""Recursion limit while a call is answered: a RecursionError instead of a stack overflow."""

Reply = Callable[[int, dict[str, Any]], None]
"""Takes the place of an item in its call and the reply, once per item."""

Answer = Callable[[dict[str, Any], Reply], None]
"""Answers a call with a reply per item."""


def serve(fd: int, prepare: Callable[[dict[str, Any]], Answer]) -> None:
    """Serve until the parent closes the socket.

    Args:
        fd: this end of the socket.
        prepare: takes the pool's setup and imports what calls need; whatever it raises is reported to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    link, own_pid = Connection(fd), os.getpid()
    bound = bind()
    try:
        setup = json.loads(link.recv_bytes())
        answer = prepare(setup)
    except BaseException:
        send(link, {"failed": traceback.format_exc()})
        return
    _limit_memory(setup["address_mb"], setup["memory_mb"])
    sys.setrecursionlimit(MAX_FRAMES)  # a plugin may have raised it
    send(link, {"ready": True})

    def set_alarm(seconds: float) -> None:
        if not bound:  # if the parent is gone, the kernel ends an endless call
            signal.setitimer(signal.ITIMER_REAL, seconds)

    while True:
        try:
            call = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            return

        def reply(place: int, message: dict[str, Any], first: int = call["first"]) -> None:
            if os.getpid() != own_pid:  # the code forked, and this is its child
                os._exit(0)
            set_alarm(3 * setup["deadline"] + 10)
            send(link, {"number": first + place, **message})

        set_alarm(3 * setup["deadline"] + 10)
        answer(call, reply)
        set_alarm(0)  # the parent may sleep before it reads


def _limit_memory(address_mb: int, memory_mb: int) -> None:
    """Limit the address space: libraries reserve more than they use.

    If the parent can watch resident memory (Linux), it kills above ``memory_mb``, which no ``except`` can catch, and
    the higher ``address_mb`` only stops single huge allocations. Elsewhere ``memory_mb`` is the only limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crashed worker must not fill the disk
    limit = (address_mb if os.path.exists("/proc/self/statm") else memory_mb) * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError) as error:  # macOS accepts no such limit
        print(f"oarjax: a worker runs without a memory limit: {error}", file=sys.stderr)


def last_line(error: BaseException, file: str | None = None) -> tuple[CodeType, int] | None:
    """Return the last line that ran in a file before an error; by default in the first file that is not the package's.

    None: no frame is of that file.
    """
    frames = [
        (frame.f_globals.get("__name__"), frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    lines = [(code, line) for name, code, line in frames if not str(name).startswith("oarjax.")]
    return next((found for found in reversed(lines) if found[0].co_filename == (file or lines[0][0].co_filename)), None)


def send(link: Connection, message: dict[str, Any]) -> None:
    """Send a message, with secrets masked in what it says about an error."""
    texts = {name: masked(message[name]) for name in ("note", "failed") if name in message}
    link.send_bytes(json.dumps({**message, **texts}).encode())
