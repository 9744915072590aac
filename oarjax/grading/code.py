"""The built-in reward ``code``: run a completion's program against the tests of its dataset row, in a sandbox."""

from __future__ import annotations

import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oarjax.grading.crossing import REFUSED
from oarjax.grading.rewards import Sample, Unparseable, reward
from oarjax.grading.sandbox import ProgramResult, prove_isolation, run_program

PYTHON = ("", "python", "py", "python3")  # languages of a fence
MAX_CASES = 100
CROSSING = Path(__file__).with_name("crossing.py")


@reward("code")
def code_passes(sample: Sample, *, tests: str = "tests", seconds: float = 4.0, memory_mb: int = 512) -> float:
    """Return 1 if the completion's last Python block passes all tests of its row, else 0.

    The column ``tests`` holds statements (text, or a list of texts such as MBPP's asserts) that call the block's
    functions, or a list of {"input", "output"}: for each the block runs with that standard input, and must print that
    output, up to white space at the ends of lines and of the text. All of it within ``seconds``, which must be below
    ``grading.deadline``.

    Statements run in an interpreter of their own, where the block's functions stand for calls to the other one; only
    plain data crosses (``grading/crossing.py``). A block that exits early, returns other objects or changes its
    interpreter passes no test. With inputs and outputs, a program sees only the inputs.

    Raises:
        IsolationError: this machine has no working sandbox.
        Unparseable: the row has no such tests, or they pass something other than plain data to the block; or the
            completion has no Python block (the value is then 0).
    """
    prove_isolation()
    cases = _cases(sample.columns.get(tests))
    if cases is None:
        raise Unparseable("reference", f"column {tests}: {sample.columns.get(tests)!r}")
    program = last_block(sample.completion)
    if program is None:
        raise Unparseable("answer", sample.completion[-200:])
    if isinstance(cases, str):
        return float(_passes(program, cases, seconds=seconds, memory_mb=memory_mb))
    end = time.monotonic() + seconds
    for case in cases:
        seconds_left = end - time.monotonic()
        if seconds_left <= 0 or not _prints(program, case, seconds=seconds_left, memory_mb=memory_mb):
            return 0.0
    return 1.0


def last_block(completion: str) -> str | None:
    """Return the last fenced block of Python or of no language; None without one."""
    block: str | None = None
    language: str | None = None  # of the fence that is open
    body: list[str] = []
    for line in completion.split("\n"):
        mark = line.strip()
        if language is None and mark.startswith(("```", "~~~")):
            language, body = (mark[3:].split() or [""])[0].lower(), []
        elif language is not None and mark in ("```", "~~~"):
            block, language = "\n".join(body) if language in PYTHON else block, None
        else:
            body.append(line)
    return block


def _passes(program: str, tests: str, **limits: Any) -> bool:
    """Run a program and statements that test it in two sandboxes, connected by pipes.

    Raises:
        Unparseable: the tests pass something other than plain data to the program.
    """
    mark, source, stop = secrets.token_hex(16), CROSSING.read_text(encoding="utf-8"), threading.Event()
    (calls, call), (replies, reply) = os.pipe(), os.pipe()
    server_source = f"{source}\nserve({program!r}, {calls}, {reply})"
    checked = f"{source}\ncheck({tests!r}, {replies}, {call}, {mark!r})"
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(run_program, server_source, fds=(calls, reply), stop=stop, **limits)
        try:
            result = run_program(checked, fds=(replies, call), **limits)
        finally:
            stop.set()
        server.result()  # its errors are this machine's
    if result.code == REFUSED and not result.stopped:
        raise Unparseable("reference", f"the tests, which pass {result.errors.strip()[-150:]}")
    return result.passed and result.output.endswith(f"{mark}\n")


def _cases(column: Any) -> str | list[dict[str, str]] | None:
    """Read a row's tests; None if they are not valid."""
    if isinstance(column, str) and column.strip():
        return column
    if not isinstance(column, list) or not column or len(column) > MAX_CASES:
        return None
    if all(isinstance(test, str) for test in column):
        return "\n".join(column)
    wellformed = (isinstance(c, dict) and all(isinstance(c.get(n), str) for n in ("input", "output")) for c in column)
    return column if all(wellformed) else None


def _prints(program: str, case: dict[str, str], **limits: Any) -> bool:
    result: ProgramResult = run_program(program, stdin=case["input"], **limits)
    return result.passed and _lines(result.output) == _lines(case["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
