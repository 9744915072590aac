"""The built-in reward ``code``: run a completion's program against the tests of its dataset row, in a sandbox."""

from __future__ import annotations

import secrets
import time
from typing import Any

from oarjax.grading.rewards import Sample, Unparseable, reward
from oarjax.grading.sandbox import ProgramResult, prove_isolation, run_program

PYTHON = ("", "python", "py", "python3")  # languages of a fence
MAX_CASES = 100


@reward("code")
def code_passes(sample: Sample, *, tests: str = "tests", seconds: float = 4.0, memory_mb: int = 512) -> float:
    """Return 1 if the completion's last Python block passes all tests of its row, else 0.

    The column ``tests`` holds statements (text, or a list of texts such as MBPP's asserts) that run after the block, or
    a list of {"input", "output"}: for each the block runs with that standard input, and must print that output, up to
    white space at the ends of lines and of the text. All of it within ``seconds``, which must be below
    ``grading.deadline``.

    A program that exits early passes no test. But statements run in the block's own interpreter: one that inspects its
    frames can claim success. With inputs and outputs, a program sees only the inputs.

    Raises:
        IsolationError: this machine has no working sandbox.
        Unparseable: the row has no such tests, or the completion has no Python block (the value is then 0).
    """
    prove_isolation()
    cases = _cases(sample.columns.get(tests))
    if cases is None:
        raise Unparseable("reference", f"column {tests}: {sample.columns.get(tests)!r}")
    program = last_block(sample.completion)
    if program is None:
        raise Unparseable("answer", sample.completion[-200:])
    if isinstance(cases, str):
        done = secrets.token_hex(16)
        result = run_program(with_tests(program, cases, done), seconds=seconds, memory_mb=memory_mb)
        return float(result.passed and result.output.endswith(f"{done}\n"))
    end = time.monotonic() + seconds
    for case in cases:
        left = end - time.monotonic()
        if left <= 0 or not _prints(program, case, seconds=left, memory_mb=memory_mb):
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


def with_tests(program: str, tests: str, done: str) -> str:
    """Join a program and statements that test it; ``done``, a secret, is printed after the last one."""
    return "\n".join(
        [
            "_exec, _print = exec, print",
            f"_program = compile({program!r}, '<completion>', 'exec')",
            f"_tests = compile({tests!r}, '<tests>', 'exec')",
            "_names = {'__name__': '__main__'}",
            "_exec(_program, _names)",
            "_exec(_tests, _names)",
            f"_print({done!r})",
        ]
    )


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
