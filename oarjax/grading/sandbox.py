"""Run untrusted programs in a process that the kernel confines, with limits that it cannot lift.

Inside (``grading/sandbox_child.py``) there are the standard library and a scratch folder: no network, no other process,
no file outside, none of this process's environment. ``prove_isolation`` tests that by attacking a sandbox on this
machine; if an attack succeeds, or the kernel lacks a feature, no program is run.

No program writes to a disk. Its input and outputs are files in memory, and the scratch folder is a file system in
memory of limited size, which only the program sees and which ends with it. Where the kernel lets nobody mount one
(unprivileged user namespaces are switched off), the folder is read-only.

Linux on x86-64 with Landlock (5.19 or later) and seccomp. Other machines have no sandbox.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from oarjax.errors import UserError

CHILD = Path(__file__).with_name("sandbox_child.py")
LOCK_FAILED = 97
POLL = 0.02
MAX_OUTPUT = 1 << 20


class IsolationError(UserError, RuntimeError):
    """Raised when this machine cannot confine a program; names what is missing or which attacks succeeded."""


class ProgramResult(NamedTuple):
    """Exit code and output of a program."""

    code: int  # exit code; negative: the signal that ended it
    output: str
    errors: str
    stopped: str  # why it was killed; "" if it ended by itself

    @property
    def passed(self) -> bool:
        return self.code == 0 and not self.stopped


def run_program(
    program: str,
    *,
    stdin: str = "",
    seconds: float = 4.0,
    memory_mb: int = 512,
    disk_mb: int = 16,
    fds: tuple[int, ...] = (),
    stop: threading.Event | None = None,
) -> ProgramResult:
    """Run a Python program in a new sandbox and wait for its end. It ends with the calling thread at the latest.

    Args:
        seconds: wall-clock time, start-up included; processor time is limited to the same.
        memory_mb: address space.
        disk_mb: of the scratch folder, and of each output; memory beside ``memory_mb``.
        fds: open files that the program inherits; closed here.
        stop: ends the program when set.

    Raises:
        IsolationError: the sandbox could not be set up; the program was not run.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise IsolationError(f"programs are run only on Linux with x86-64, and this is {platform.system()}")
    with ExitStack() as stack, ExitStack() as inherited:
        for fd in fds:
            inherited.callback(os.close, fd)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="oarjax-sandbox-"))  # stays empty
        job = {
            "scratch": scratch,
            "read": _readable(),
            "memory_mb": memory_mb,
            "seconds": seconds,
            "file_mb": disk_mb,
            "program": program,
            "parent": os.getpid(),
        }
        standard_input, output, errors = (stack.enter_context(_memory_file(name)) for name in ("in", "out", "err"))
        standard_input.write((json.dumps(job) + "\n" + stdin).encode())
        standard_input.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD)],
            stdin=standard_input,
            stdout=output,
            stderr=errors,
            cwd=scratch,
            env={"LANG": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch},
            process_group=0,
            pass_fds=fds,
        )
        try:
            inherited.close()
            stopped = _watch(process, seconds, stop or threading.Event())
        finally:
            process.kill()
            code = process.wait()
        printed, complaint = (
            os.pread(file.fileno(), MAX_OUTPUT, 0).decode(errors="replace") for file in (output, errors)
        )
    if code == LOCK_FAILED and complaint.startswith("sandbox: "):
        raise IsolationError(f"this machine cannot confine a program: {complaint.strip()}")
    return ProgramResult(code, printed, complaint, stopped)


def _memory_file(name: str) -> BinaryIO:
    return open(os.memfd_create(name), "w+b", buffering=0)


def _watch(process: subprocess.Popen[bytes], seconds: float, stop: threading.Event) -> str:
    """Wait for the end; return the reason to kill the process, or ""."""
    end = time.monotonic() + seconds
    while True:
        try:
            process.wait(POLL)
            return ""
        except subprocess.TimeoutExpired:
            pass
        if stop.is_set():
            return "it was no longer needed"
        if time.monotonic() > end:
            return f"it took more than {seconds:g} s"


def _readable() -> list[str]:
    """List the paths that an interpreter needs to start and to import its standard library."""
    library_folders = {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.join(sys.base_prefix, "lib"),
    }
    system = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
    return [*sorted(library_folders), *system, "/dev/null", "/dev/urandom"]


@functools.cache
def prove_isolation() -> None:
    """Attack a sandbox on this machine, once per process.

    Raises:
        IsolationError: an attack succeeded, or there is no sandbox here.
    """
    with tempfile.TemporaryDirectory(prefix="oarjax-proof-") as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        canary = Path(folder, "canary")
        canary.write_text("secret")
        os.environ["OARJAX_PROOF"] = "secret"
        try:
            facts = {"port": listener.getsockname()[1], "canary": str(canary), "parent": os.getpid()}
            result = run_program(f"FACTS = {facts!r}\n{ATTACKS}", seconds=20.0)
        finally:
            del os.environ["OARJAX_PROOF"]
        breaches = _breaches(result)
        if [path.name for path in Path(folder).iterdir()] != ["canary"] or canary.read_text() != "secret":
            breaches.append("a file outside was changed")
        listener.setblocking(False)
        try:
            listener.accept()
            breaches.append("a connection arrived")
        except BlockingIOError:
            pass
    if breaches:
        raise IsolationError(f"the sandbox on this machine does not hold: {', '.join(breaches)}")


def _breaches(result: ProgramResult) -> list[str]:
    """Return the attacks that succeeded; an invalid answer counts as one."""
    try:
        answer: Any = json.loads(result.output)
        tried, breaches = answer["tried"], answer["breaches"]
    except (ValueError, KeyError, TypeError):
        return [f"the proof did not end (exit code {result.code}, {result.stopped or result.errors[-300:]})"]
    return list(breaches) if tried >= 20 else [f"only {tried} attacks were tried"]


ATTACKS = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading

libc = ctypes.CDLL(None, use_errno=True)
outside, parent = os.path.dirname(FACTS["canary"]), FACTS["parent"]


def raw(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments]) >= 0


def own_files():  # must work, or be refused: otherwise the proof proves nothing
    with open("mine", "w") as file:
        file.write("x")
    thread = threading.Thread(target=os.remove, args=("mine",))
    thread.start()
    thread.join()
    return os.path.exists("mine")


def child(code):
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    return True


ATTEMPTS = {
    "the scratch folder does not work": own_files,
    "TCP": lambda: socket.create_connection(("127.0.0.1", FACTS["port"]), 2),
    "UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "a Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "a netlink socket": lambda: socket.socket(16, socket.SOCK_RAW),
    "a pair of sockets": socket.socketpair,
    "reading a file outside": lambda: open(FACTS["canary"]).read(),
    "writing a file outside": lambda: open(FACTS["canary"], "w").write("x"),
    "truncating a file outside": lambda: os.truncate(FACTS["canary"], 0) is None,
    "removing a file outside": lambda: os.unlink(FACTS["canary"]) is None,
    "a new file outside": lambda: open(os.path.join(outside, "new"), "w"),
    "a new folder outside": lambda: os.mkdir(os.path.join(outside, "folder")) is None,
    "moving a file out": lambda: open("f", "w").close() or os.rename("f", os.path.join(outside, "f")) is None,
    "a link to a file outside": lambda: os.link(FACTS["canary"], "link") is None,
    "the mode of a file outside": lambda: os.chmod(FACTS["canary"], 0) is None,
    "the times of a file outside": lambda: os.utime(FACTS["canary"]) is None,
    "listing a folder outside": lambda: os.listdir(outside),
    "the passwords file": lambda: open("/etc/passwd").read(),
    "the job, with stdin": lambda: "program" in sys.stdin.read(),
    "an environment variable": lambda: "OARJAX_PROOF" in os.environ,
    "the parent's environment": lambda: open(f"/proc/{parent}/environ", "rb").read(),
    "the parent's memory": lambda: open(f"/proc/{parent}/mem", "r+b"),
    "its own environment in /proc": lambda: b"secret" in open("/proc/self/environ", "rb").read(),
    "fork": lambda: child(0),
    "a command": lambda: subprocess.run(["/bin/true"]) is not None,
    "exec": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
    "a signal to the parent": lambda: os.kill(parent, 0) is None,
    "a thread's signal to the parent": lambda: raw(234, parent, parent, 0),
    "the parent's limits": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    "its own limits": lambda: resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2) is None,
    "ptrace": lambda: raw(101, 16, parent, 0, 0),
    "a raw socket call": lambda: raw(41, 2, 1, 0),
    "io_uring": lambda: raw(425, 1, ctypes.addressof(ctypes.create_string_buffer(256))),
    "clone3": lambda: raw(435, 0, 0),
    "memory files": lambda: raw(319, ctypes.addressof(ctypes.create_string_buffer(b"x")), 0),
    "System V memory": lambda: raw(29, 0, 4096, 0o1600),
    "keys": lambda: raw(250, 0, 0, 1),
    "namespaces": lambda: raw(272, 0x10000000),
    "bpf": lambda: raw(321, 0, 0, 0),
    "more memory": lambda: bytearray(1 << 32),
    "more disk": lambda: [open(str(n), "wb").write(bytes(1 << 20)) for n in range(64)],
    "more files": lambda: [open("n" + str(n), "wb").close() for n in range(1000)],
    "a mount": lambda: raw(165, 0, 0, 0, 0, 0),
}
breaches = []
for name, attempt in ATTEMPTS.items():
    try:
        if attempt():
            breaches.append(name)
    except (OSError, MemoryError, ValueError):
        pass
print(json.dumps({"tried": len(ATTEMPTS), "breaches": breaches}))
"""
