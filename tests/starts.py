"""Start the command many times and import its packages once: a process that has imported them forks one per start.

Importing takes longer than all that a micro run does. A forked process is the command's own in all else: it reads its
arguments, opens its devices and ends as the interpreter would let it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SERVER = """
import json, os, signal, sys
import oarjax.cli, oarjax.evaluate.command, oarjax.training.command
from oarjax.system import devices

devices.CACHED_FROM = 0.0  # a micro run is started many times, and most of its programs compile sooner than is kept

def fork(asked):
    number = os.fork()
    if number:
        return number
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal, also where the tests run under nohup
    os.environ.update(asked["environment"])
    sys.argv = ["oarjax", *asked["arguments"]]

def code_of(number):
    ended, status = os.waitpid(number, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None

def serve():
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        answer = code_of(asked) if isinstance(asked, int) else fork(asked)
        if answer is None and not isinstance(asked, int):
            return True
        print(json.dumps(answer), file=answers, flush=True)

if serve():
    oarjax.cli.main()
"""


class Started:
    """A started command, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]):
        asked = {"arguments": list(arguments), "log": str(log), "environment": dict(environment)}
        self.pid: int = _ask(asked)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask(self.pid)
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("oarjax", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one."""
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(what: Any) -> Any:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(what) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise AssertionError(f"the process that forks has ended with code {server.wait()}")
    return json.loads(answer)
