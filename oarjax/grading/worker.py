"""Call rewards in a grading worker: read calls from a socket and send back one message per sample.

``grading/pool.py`` starts it with ``python -c``, so that it inherits nothing from the training process (main module,
jax, threads). Both directions are JSON: the parent unpickles nothing from a worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.process_tree import MAX_TICK, bind
from oarjax.grading.rewards import (
    BUILT_IN,
    Per,
    Reward,
    Sample,
    Unparseable,
    calls_of,
    find_rewards,
    is_async,
    load_plugins,
    name_of,
    same_value,
)
from oarjax.system.secrets import masked

if TYPE_CHECKING:
    from oarjax.types import Verdict  # which imports jax

MAX_FRAMES = 1000
"""Recursion limit while an answer is graded: a RecursionError instead of a stack overflow."""

TICK = 0.5  # seconds between two looks at the clock of an async call

WORST: tuple[Verdict, ...] = ("crash", "timeout", "ungraded", "unparseable", "graded")
"""Verdicts from worst to best; a sample gets the worst of its rewards' verdicts."""

Graded = tuple[float, "Verdict", str]
"""Value, verdict and note of one reward for one sample; NaN unless the verdict is graded or unparseable."""

Emit = Callable[[int, Graded], object]
"""Takes the place of a sample in the call and its verdict, once per sample."""


class AsyncLimits(NamedTuple):
    """Limits of the calls of async rewards."""

    deadline: float  # seconds per sample
    concurrency: int  # samples in flight


def main(fd: int) -> None:
    """Serve until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    link, own_pid = Connection(fd), os.getpid()
    bound = bind()
    try:
        setup = json.loads(link.recv_bytes())
        load_plugins(setup["plugins"])
        parts = [find_rewards(names, setup["settings"]) for names in setup["parts"]]
        _warm([function for rewards in parts for function in rewards], setup)
    except BaseException:
        _send(link, {"failed": traceback.format_exc()})
        return
    _limit_memory(setup["address_mb"], setup["memory_mb"])
    sys.setrecursionlimit(MAX_FRAMES)  # a plugin may have raised it
    _send(link, {"ready": True})
    limits = AsyncLimits(setup["deadline"], setup["concurrency"])

    def set_alarm(seconds: float) -> None:
        if not bound:  # if the parent is gone, the kernel ends an endless call
            signal.setitimer(signal.ITIMER_REAL, seconds)

    while True:
        try:
            call = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            return
        rewards, samples = parts[call["part"]], [Sample(**fields) for fields in call["samples"]]

        def emit(place: int, reply: dict[str, Any], first: int = call["first"]) -> None:
            if os.getpid() != own_pid:  # a reward forked, and this is its child
                os._exit(0)
            set_alarm(3 * limits.deadline + 10)
            _send(link, {"number": first + place, **reply})

        set_alarm(3 * limits.deadline + 10)
        if setup["joint"]:
            _grade_jointly(setup["parts"][call["part"]][0], rewards[0], samples, setup, limits, emit)
        else:
            for place, sample in enumerate(samples):
                emit(place, grade_sample(sample, rewards, style=setup["style"], pattern=setup["pattern"]))
        set_alarm(0)  # the parent may sleep before it reads


def grade_sample(sample: Sample, rewards: Sequence[Reward], *, style: Any, pattern: str | None) -> dict[str, Any]:
    """Return a sample's values (NaN: ungraded), verdict, extracted answer and note. Never raises an Exception.

    The verdict is the worst over the rewards.
    """
    sample, failure = with_answer(sample, style, pattern)
    if failure is not None:
        return _reply([math.nan] * len(rewards), sample, *failure[1:])
    values, verdicts, notes = zip(
        *(graded(lambda function=function: function(sample), function) for function in rewards)
    )
    return _reply(list(values), sample, min(verdicts, key=WORST.index), "; ".join(note for note in notes if note))


def with_answer(sample: Sample, style: Any, pattern: str | None) -> tuple[Sample, Graded | None]:
    """Fill in the completion's final answer; if the search fails, leave None and return the verdict."""
    try:
        return replace(sample, extracted=extract_answer(sample.completion, style=style, pattern=pattern)), None
    except TimeoutError:
        return sample, (math.nan, "timeout", f"answer pattern {pattern!r} ran too long")
    except Exception as error:
        return sample, (math.nan, "crash", f"{type(error).__name__}: {str(error)[:500]}")


def _grade_jointly(
    name: str, function: Reward, samples: Sequence[Sample], setup: dict[str, Any], limits: AsyncLimits, emit: Any
) -> None:
    read, failures = zip(*(with_answer(sample, setup["style"], setup["pattern"]) for sample in samples))

    def emit_reply(place: int, outcome: Graded) -> None:
        value, verdict, note = failures[place] or outcome
        emit(place, _reply([value], read[place], verdict, note))

    make_call(function, calls_of(name), read, limits, emit_reply)


def _reply(values: list[float], sample: Sample, verdict: Verdict, note: str) -> dict[str, Any]:
    return {"values": values, "verdict": verdict, "extracted": sample.extracted, "note": note}


def make_call(function: Reward, per: Per, samples: Sequence[Sample], limits: AsyncLimits, emit: Emit) -> None:
    """Call a reward and emit one verdict per sample, even if it raises. Never raises an Exception.

    Of an async reward per sample, ``limits.concurrency`` calls are in flight, each for at most ``limits.deadline`` s.
    """
    waits = is_async(function) or is_async(getattr(function, "func", None))  # with settings bound
    if per == "sample" and not waits:
        for place, sample in enumerate(samples):
            emit(place, graded(lambda sample=sample: function(sample)))
    elif per == "sample":
        asyncio.run(_in_flight(function, samples, limits, emit))
    else:
        whole = list(samples)
        try:
            values = asyncio.run(_before(function(whole), limits.deadline)) if waits else function(whole)
            values = list(values)
            if len(values) != len(whole):
                raise ValueError(f"{len(values)} values for {len(whole)} samples; return one per sample")
        except (Exception, SystemExit) as error:
            outcome = _failure(error)
            for place in range(len(whole)):
                emit(place, outcome)
            return
        for place, value in enumerate(values):
            emit(place, graded(lambda value=value: value))


async def _in_flight(function: Reward, samples: Sequence[Sample], limits: AsyncLimits, emit: Emit) -> None:
    room = asyncio.Semaphore(limits.concurrency)

    async def ask(place: int, sample: Sample) -> None:
        async with room:
            try:
                value = await _before(function(sample), limits.deadline)
            except Exception as error:
                emit(place, _failure(error))
            else:
                emit(place, graded(lambda: value))

    await asyncio.gather(*(ask(place, sample) for place, sample in enumerate(samples)))


async def _before(waiting: Any, deadline: float) -> Any:
    """Await at most ``deadline`` seconds; none that this process slept through (SIGSTOP, a suspended machine) counts.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    task, spent = asyncio.ensure_future(waiting), 0.0
    try:
        while spent < deadline:
            began = monotonic()
            if (await asyncio.wait({task}, timeout=min(TICK, deadline - spent)))[0]:
                return task.result()
            spent += min(monotonic() - began, MAX_TICK)
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def graded(call: Callable[[], Any], function: Reward | None = None) -> Graded:
    """Return value, verdict and note of a call; a value that is not a finite number becomes NaN.

    ``function``: the reward that the note names, where it is not named elsewhere.
    """
    try:
        value = call()
        value = math.nan if value is None else float(value)
    except (Exception, SystemExit) as error:  # the reward may be custom; includes MemoryError and RecursionError
        return _failure(error, function)
    if math.isinf(value):
        return math.nan, "crash", f"{'the reward' if function is None else _named(function)} returned {value}"
    return (math.nan, "ungraded", "the reward returned no number") if math.isnan(value) else (value, "graded", "")


def _failure(error: BaseException, function: Reward | None = None) -> Graded:
    """Return value, verdict and note of a sample whose reward raised."""
    if isinstance(error, Unparseable):
        return (0.0, "unparseable", str(error)) if error.which == "answer" else (math.nan, "ungraded", str(error))
    if isinstance(error, TimeoutError):
        return math.nan, "timeout", str(error)[:500] or "no verdict within the deadline"
    who = "" if function is None else f"{_named(function, error)} raised "
    return math.nan, "crash", f"{who}{type(error).__name__}: {str(error)[:500]}"


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
        print(f"oarjax: a grading worker runs without a memory limit: {error}", file=sys.stderr)


def _send(link: Connection, message: dict[str, Any]) -> None:
    """Send a message, with secrets masked in what it says about an error."""
    texts = {name: masked(message[name]) for name in ("note", "failed") if name in message}
    link.send_bytes(json.dumps({**message, **texts}).encode())
