"""Call batch, group and async rewards in a worker process.

``grading/joint.py`` starts it with ``python -c``. It reads calls from a socket, one at a time, and answers with a
message per sample, then ``{"done": true}``; both directions are JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.process_tree import MAX_TICK, bind
from oarjax.grading.rewards import Per, Reward, Sample, Unparseable, calls_of, find_rewards, load_plugins

TICK = 0.5  # seconds between two looks at the clock of an async call

Emit = Callable[[int, float, str, str], object]
"""(place in the call, value, verdict, note), once per sample."""


class Limits(NamedTuple):
    """Limits of the calls of async rewards."""

    deadline: float  # seconds per sample
    concurrency: int  # samples in flight


def main(fd: int) -> None:
    """Serve until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    bind()  # a judge is asked nothing more for a run that was killed
    link, own = Connection(fd), os.getpid()
    try:
        setup = json.loads(link.recv_bytes())
        load_plugins(setup["plugins"])
        rewards = dict(zip(setup["rewards"], find_rewards(setup["rewards"], setup["settings"])))
    except BaseException:
        _send(link, {"failed": traceback.format_exc()})
        return
    _limit_memory(setup["memory_mb"])
    _send(link, {"ready": True})
    limits = Limits(setup["deadline"], setup["concurrency"])
    while True:
        try:
            call = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            return
        samples = [with_answer(Sample(**fields), setup["style"], setup["pattern"]) for fields in call["samples"]]
        name, number = call["reward"], call["call"]

        def emit(*answer: Any, number: int = number) -> None:
            if os.getpid() != own:  # a reward forked, and this is its child
                os._exit(0)
            _set_alarm(limits)
            _send(link, {"call": number, "answer": answer})

        _set_alarm(limits)
        make_call(rewards[name], calls_of(name), samples, limits, emit)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(link, {"call": number, "done": True})


def _set_alarm(limits: Limits) -> None:
    """Set a timer that ends a hanging call after the parent is gone."""
    signal.setitimer(signal.ITIMER_REAL, 3 * limits.deadline + 10)


def with_answer(sample: Sample, style: Any, pattern: str | None) -> Sample:
    """Fill in the completion's final answer; leave None if the search fails, which the grader reports."""
    try:
        return replace(sample, extracted=extract_answer(sample.completion, style=style, pattern=pattern))
    except Exception:
        return sample


def make_call(function: Reward, per: Per, samples: Sequence[Sample], limits: Limits, emit: Emit) -> None:
    """Call a reward and emit one verdict per sample, even if it raises. Never raises an Exception.

    Of an async reward per sample, ``limits.concurrency`` calls are in flight, each for at most ``limits.deadline`` s.
    """
    waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    waits = waits or inspect.iscoroutinefunction(getattr(function, "func", None))  # with settings bound
    if per == "sample" and not waits:
        for place, sample in enumerate(samples):
            emit(place, *verdict_of(lambda sample=sample: function(sample)))
    elif per == "sample":
        asyncio.run(_in_flight(function, samples, limits, emit))
    else:
        whole = list(samples)
        try:
            values = asyncio.run(_before(function(whole), limits.deadline)) if waits else function(whole)
            values = list(values)
            if len(values) != len(whole):
                raise ValueError(f"{len(values)} values for {len(whole)} samples; return one per sample")
        except Exception as error:
            outcome = failure_of(error)
            for place in range(len(whole)):
                emit(place, *outcome)
            return
        for place, value in enumerate(values):
            emit(place, *verdict_of(lambda value=value: value))


async def _in_flight(function: Reward, samples: Sequence[Sample], limits: Limits, emit: Emit) -> None:
    room = asyncio.Semaphore(limits.concurrency)

    async def ask(place: int, sample: Sample) -> None:
        async with room:
            try:
                value = await _before(function(sample), limits.deadline)
            except Exception as error:
                emit(place, *failure_of(error))
            else:
                emit(place, *verdict_of(lambda: value))

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


def verdict_of(value: Callable[[], Any]) -> tuple[float, str, str]:
    """Return value, verdict and note of one sample; a value that is not a finite number becomes NaN."""
    try:
        result = value()
        result = math.nan if result is None else float(result)
    except Exception as error:
        return failure_of(error)
    if math.isinf(result):
        return math.nan, "crash", f"the reward returned {result}"
    return (math.nan, "ungraded", "the reward returned no number") if math.isnan(result) else (result, "graded", "")


def failure_of(error: BaseException) -> tuple[float, str, str]:
    """Return value, verdict and note of a sample whose reward raised."""
    if isinstance(error, Unparseable):
        return (0.0, "unparseable", str(error)) if error.which == "answer" else (math.nan, "ungraded", str(error))
    if isinstance(error, TimeoutError):
        return math.nan, "timeout", str(error)[:500] or "no verdict within the deadline"
    return math.nan, "crash", f"{type(error).__name__}: {str(error)[:500]}"


def _limit_memory(memory_mb: int) -> None:
    """Limit the address space to four times ``memory_mb``: libraries of a judge reserve more than they use."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.path.exists("/proc/self/statm"):  # macOS accepts no such limit
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = 4 * memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _send(link: Connection, message: dict[str, Any]) -> None:
    link.send_bytes(json.dumps(message).encode())
