"""Call rewards in a grading worker, which answers with one verdict per sample (``grading/serving.py``)."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.process_tree import MAX_TICK
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
from oarjax.grading.serving import Answer, Reply, last_line, serve

if TYPE_CHECKING:
    from oarjax.types import Verdict  # which imports jax

TICK = 0.5  # seconds between two looks at the clock of an async call

WORST: tuple[Verdict, ...] = ("crash", "timeout", "ungraded", "unparseable", "graded")
"""Verdicts from worst to best; a sample gets the worst of its rewards' verdicts."""

Graded = tuple[float, "Verdict", str]
"""Value, verdict and note of one reward for one sample; NaN unless the verdict is graded or unparseable."""

SKIPPED: Graded = (math.nan, "graded", "")
"""Of a reward that does not grade a sample."""

Emit = Callable[[int, Graded], object]
"""Takes the place of a sample in the call and its verdict, once per sample."""


class AsyncLimits(NamedTuple):
    """Limits of the calls of async rewards."""

    deadline: float  # seconds per sample
    concurrency: int  # samples in flight


def main(fd: int) -> None:
    """Serve until the parent closes the socket."""
    serve(fd, _prepare)


def _prepare(setup: dict[str, Any]) -> Answer:
    """Import the rewards; return the function that grades the samples of a call."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    load_plugins(setup["plugins"])
    parts = [find_rewards(names, setup["settings"]) for names in setup["parts"]]
    _warm([function for rewards in parts for function in rewards], setup)
    limits = AsyncLimits(setup["deadline"], setup["concurrency"])

    def answer(call: dict[str, Any], emit: Reply) -> None:
        rewards, samples = parts[call["part"]], [Sample(**fields) for fields in call["samples"]]
        if setup["joint"]:
            _grade_jointly(setup["parts"][call["part"]][0], rewards[0], samples, setup, limits, emit)
        else:
            for index, sample in enumerate(samples):
                emit(index, grade_sample(sample, rewards, style=setup["style"], pattern=setup["pattern"]))

    return answer


def grade_sample(sample: Sample, rewards: Sequence[Reward], *, style: Any, pattern: str | None) -> dict[str, Any]:
    """Return a sample's values (NaN: ungraded), verdict, extracted answer and note. Never raises an Exception.

    The verdict is the worst over the rewards. Those that the sample does not ask for are NaN, and count as graded.
    """
    sample, failure = with_answer(sample, style, pattern)
    if failure is not None:
        return _reply([math.nan] * len(rewards), sample, *failure[1:])
    values, verdicts, notes = zip(
        *(
            graded(lambda function=function: function(sample), function, named=True)
            if not sample.rewards or sample.asks(name_of(function))
            else SKIPPED
            for function in rewards
        )
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
    ready, failures = zip(*(with_answer(sample, setup["style"], setup["pattern"]) for sample in samples))

    def emit_reply(place: int, outcome: Graded) -> None:
        value, verdict, note = failures[place] or outcome
        emit(place, _reply([value], ready[place], verdict, note))

    make_call(function, calls_of(name), ready, limits, emit_reply)


def _reply(values: list[float], sample: Sample, verdict: Verdict, note: str) -> dict[str, Any]:
    return {"values": values, "verdict": verdict, "extracted": sample.extracted, "note": note}


def make_call(function: Reward, per: Per, samples: Sequence[Sample], limits: AsyncLimits, emit: Emit) -> None:
    """Call a reward and emit one verdict per sample, even if it raises. Never raises an Exception.

    Of an async reward per sample, ``limits.concurrency`` calls are in flight, each for at most ``limits.deadline`` s.
    """
    waits = is_async(function) or is_async(getattr(function, "func", None))  # with settings bound
    if per == "sample" and not waits:
        for index, sample in enumerate(samples):
            emit(index, graded(lambda sample=sample: function(sample), function))
    elif per == "sample":
        asyncio.run(_in_flight(function, samples, limits, emit))
    else:
        batch = list(samples)
        try:
            values = asyncio.run(_before(function(batch), limits.deadline)) if waits else function(batch)
            if isinstance(values, Mapping | Set):
                raise TypeError(f"returned a {type(values).__name__}; return a list, one value per sample in order")
            values = list(values)
        except (Exception, SystemExit) as error:
            outcomes: list[Graded] = [_failure(error, function)] * len(batch)
        else:
            outcomes = [graded(lambda value=value: value, function) for value in values]
            if len(values) != len(batch):
                count = f"returned {len(values)} values for {len(batch)} samples; return one per sample"
                outcomes = [(math.nan, "crash", f"{_subject(function)}{count}")] * len(batch)
        for index, outcome in enumerate(outcomes):
            emit(index, outcome)


async def _in_flight(function: Reward, samples: Sequence[Sample], limits: AsyncLimits, emit: Emit) -> None:
    room = asyncio.Semaphore(limits.concurrency)

    async def ask(place: int, sample: Sample) -> None:
        async with room:
            try:
                value = await _before(function(sample), limits.deadline)
            except Exception as error:
                emit(place, _failure(error, function))
            else:
                emit(place, graded(lambda: value, function))

    await asyncio.gather(*(ask(index, sample) for index, sample in enumerate(samples)))


async def _before(waiting: Any, deadline: float) -> Any:
    """Await at most ``deadline`` seconds; none that this process slept through (SIGSTOP, a suspended machine) counts.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    task, spent = asyncio.ensure_future(waiting), 0.0
    try:
        while spent < deadline:
            start = monotonic()
            if (await asyncio.wait({task}, timeout=min(TICK, deadline - spent)))[0]:
                return task.result()
            spent += min(monotonic() - start, MAX_TICK)
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def graded(call: Callable[[], Any], function: Reward, *, named: bool = False) -> Graded:
    """Return value, verdict and note of a call; a value that is not a finite number becomes NaN.

    ``named``: the note names the reward, which a label names otherwise.
    """
    try:
        value = call()
        value = math.nan if value is None else float(value)
    except (Exception, SystemExit) as error:  # the reward may be custom; includes MemoryError and RecursionError
        return _failure(error, function, named=named)
    if math.isfinite(value):
        return value, "graded", ""
    who = _subject(function, named=named)
    if math.isinf(value):
        return math.nan, "crash", f"{who}returned {value}"
    return math.nan, "ungraded", f"{who}returned None or NaN: not graded; return 0 to add nothing"


def _failure(error: BaseException, function: Reward, *, named: bool = False) -> Graded:
    """Return value, verdict and note of a sample whose reward raised."""
    if isinstance(error, Unparseable):
        return (0.0, "unparseable", str(error)) if error.which == "answer" else (math.nan, "ungraded", str(error))
    if isinstance(error, TimeoutError):
        return math.nan, "timeout", str(error)[:500] or "no verdict within the deadline"
    who = _subject(function, error, named=named)
    return math.nan, "crash", f"{who}raised {type(error).__name__}: {str(error)[:500]}"


def _subject(function: Reward, error: BaseException | None = None, *, named: bool = False) -> str:
    """Return the words before what a reward did: its name if asked, its file, its last line that ran before an error.

    Without a name and a file, as of a built-in reward whose note has a label, there are none.
    """
    inner = inspect.unwrap(getattr(function, "func", function))  # of a partial application
    name, code = name_of(function), getattr(inner, "__code__", getattr(type(inner).__call__, "__code__", None))
    if code is None or inner.__module__.startswith("oarjax."):
        return f"reward {name!r} " if named else ""
    last = None if error is None else last_line(error, code.co_filename)
    where = f"{code.co_filename}, line {last[1] if last else code.co_firstlineno}"
    return f"reward {name!r} ({where}) " if named else f"{where}, "


def _warm(rewards: Sequence[Reward], setup: dict[str, Any]) -> None:
    """Import the modules of the built-in comparison and build its tables before the first deadline."""
    extract_answer("", style=setup["style"], pattern=setup["pattern"])
    if {getattr(function, "__module__", None) for function in rewards} & {same_value.__module__, *BUILT_IN}:
        same_value(Sample(prompt="", completion="", answer=r"\frac{1}{2}+x", extracted=r"x+\sqrt{3}"))
