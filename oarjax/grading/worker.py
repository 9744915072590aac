"""Serve as a grading worker: read samples from a socket and send back one message per answer.

``grading/grader.py`` starts it with ``python -c``, so that it inherits nothing from the training process (main module,
jax, threads). Both directions are JSON: the parent unpickles nothing from a worker.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.process_tree import bind
from oarjax.grading.rewards import (
    BUILT_IN,
    Reward,
    Sample,
    Unparseable,
    find_rewards,
    load_plugins,
    name_of,
    same_value,
)

MAX_FRAMES = 1000
"""Recursion limit while an answer is graded: a RecursionError instead of a stack overflow."""


def main(fd: int) -> None:
    """Serve until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    link, own = Connection(fd), os.getpid()
    bound = bind()
    try:
        setup = json.loads(link.recv_bytes())
        load_plugins(setup["plugins"])
        rewards = find_rewards(setup["rewards"], setup["settings"])
        _warm(rewards, setup)
    except BaseException:
        _send(link, {"failed": traceback.format_exc()})
        return
    _limit_memory(setup["memory_mb"])
    sys.setrecursionlimit(MAX_FRAMES)  # a plugin may have raised it
    _send(link, {"ready": True})
    while True:
        try:
            chunk = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            return
        for number, fields in enumerate(chunk["samples"], chunk["first"]):
            if not bound:  # if the parent is gone, the kernel ends an endless answer
                signal.setitimer(signal.ITIMER_REAL, 3 * setup["deadline"] + 5)
            reply = grade_sample(Sample(**fields), rewards, style=setup["style"], pattern=setup["pattern"])
            if not bound:
                signal.setitimer(signal.ITIMER_REAL, 0)  # the parent may sleep before it reads
            if os.getpid() != own:  # a reward forked, and this is its child
                os._exit(0)
            _send(link, {"number": number, **reply})


def grade_sample(sample: Sample, rewards: Sequence[Reward], *, style: Any, pattern: str | None) -> dict[str, Any]:
    """Return a sample's values (NaN: ungraded), verdict, extracted answer and note. Never raises an Exception.

    The verdict is the worst over the rewards: crash, ungraded, unparseable, graded.
    """
    unknown = {"values": [math.nan] * len(rewards), "extracted": None}
    try:
        extracted = extract_answer(sample.completion, style=style, pattern=pattern)
    except TimeoutError:
        return unknown | {"verdict": "timeout", "note": f"answer pattern {pattern!r} ran too long"}
    except Exception as error:
        return unknown | {"verdict": "crash", "note": f"{type(error).__name__}: {str(error)[:500]}"}
    sample = replace(sample, extracted=extracted)
    values, verdicts, notes = zip(*(_value(function, sample) for function in rewards))
    worst = next(v for v in ("crash", "ungraded", "unparseable", "graded") if v in verdicts)
    note = "; ".join(note for note in notes if note)
    return {"values": values, "verdict": worst, "extracted": extracted, "note": note}


def _value(function: Reward, sample: Sample) -> tuple[float, str, str]:
    try:
        value = function(sample)
        value = math.nan if value is None else float(value)
    except Unparseable as error:
        return (0.0, "unparseable", str(error)) if error.which == "answer" else (math.nan, "ungraded", str(error))
    except (Exception, SystemExit) as error:  # the reward may be custom; includes MemoryError and RecursionError
        return math.nan, "crash", f"{_named(function, error)} raised {type(error).__name__}: {str(error)[:500]}"
    if math.isinf(value):
        return math.nan, "crash", f"{_named(function)} returned {value}"
    return (math.nan, "ungraded", "the reward returned NaN") if math.isnan(value) else (value, "graded", "")


def _named(function: Reward, error: BaseException | None = None) -> str:
    """Return a reward's name and file, with its last line that ran before an error."""
    inner = getattr(function, "func", function)  # of a partial application
    name, code = name_of(function), getattr(inner, "__code__", None)
    if code is None or inner.__module__.startswith("oarjax."):
        return f"reward {name!r}"
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"reward {name!r} ({code.co_filename}, line {lines[-1] if lines else code.co_firstlineno})"


def _warm(rewards: Sequence[Reward], setup: dict[str, Any]) -> None:
    """Import the modules of the built-in comparison and build its tables before the first deadline."""
    extract_answer("", style=setup["style"], pattern=setup["pattern"])
    if {getattr(function, "__module__", None) for function in rewards} & {same_value.__module__, *BUILT_IN}:
        same_value(Sample(prompt="", completion="", answer=r"\frac{1}{2}+x", extracted=r"x+\sqrt{3}"))


def _limit_memory(memory_mb: int) -> None:
    """Limit the address space.

    If the parent can watch resident memory (Linux), it kills at ``memory_mb``, which no ``except`` can catch; this
    limit then only stops single huge allocations, so it is higher. Elsewhere it is the only limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crashed worker must not fill the disk
    factor = 4 if os.path.exists("/proc/self/statm") else 1
    limit = factor * memory_mb * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError) as error:  # macOS accepts no such limit
        print(f"oarjax: a grading worker runs without a memory limit: {error}", file=sys.stderr)


def _send(link: Connection, message: dict[str, Any]) -> None:
    link.send_bytes(json.dumps(message).encode())
