"""Grade with all rewards of a run: those per sample in the pool, the others beside it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from oarjax.credit.answer_text import Style
from oarjax.grading.grader import Grader, GraderError
from oarjax.grading.joint import JointRewards, LocalRewards, Outcome, Rewards
from oarjax.grading.joint_worker import Limits, with_answer
from oarjax.grading.recorded import Grading
from oarjax.grading.rewards import (
    Reward,
    Sample,
    find_rewards,
    is_joint,
    load_plugins,
    register_local,
    unregister_local,
)
from oarjax.types import Grades, Verdict

WORST: tuple[Verdict, ...] = ("crash", "timeout", "ungraded", "unparseable", "graded")
"""Verdicts from worst to best; a sample gets the worst of its rewards' verdicts."""

_local: dict[str, Reward] = {}  # callables that this process grades with, see ``local_rewards``


@runtime_checkable
class RunGrader(Grading, Protocol):
    """A grader to use as a context manager."""

    def __enter__(self) -> RunGrader: ...

    def __exit__(self, *exc: object) -> None: ...

    def grade(self, samples: Sequence[Sample]) -> Grades: ...


def make_grader(
    rewards: Sequence[tuple[str, float]],
    *,
    settings: Mapping[str, dict[str, Any]] | None = None,
    plugins: Sequence[str] = (),
    workers: int | Literal["auto"] = 2,
    deadline: float = 5.0,
    call_deadline: float = 60.0,
    concurrency: int = 16,
    memory_mb: int = 2048,
    style: Style = "boxed",
    pattern: str | None = None,
) -> RunGrader:
    """Make a grader of named rewards; how a reward is called decides where it runs.

    Rewards per sample are graded in a pool of workers (``Grader``), those per batch or group and async ones in a
    separate worker (``JointRewards``), callables of this process in one of its threads (``LocalRewards``).

    Args:
        call_deadline: seconds per call of a batch or group reward, and per sample of an async one.
        concurrency: samples of an async reward in flight.

    Raises:
        ValueError: an unknown reward or setting, a plugin that cannot be imported, or a bad pattern.
    """
    settings = settings or {}
    make_pool = partial(
        Grader,
        plugins=plugins,
        workers=workers,
        deadline=deadline,
        memory_mb=memory_mb,
        style=style,
        pattern=pattern,
    )
    load_plugins(plugins)
    find_rewards([name for name, _ in rewards], settings)
    local = [name for name, _ in rewards if name in _local]
    joint = [name for name, _ in rewards if is_joint(name) and name not in _local]
    in_pool = [(name, weight) for name, weight in rewards if name not in (*local, *joint)]
    if not local and not joint:
        return make_pool(rewards, settings=settings)
    beside: list[Rewards] = []
    if joint:
        beside.append(
            JointRewards(
                joint,
                settings={name: settings[name] for name in joint if name in settings},
                plugins=plugins,
                deadline=call_deadline,
                concurrency=concurrency,
                memory_mb=memory_mb,
                style=style,
                pattern=pattern,
            )
        )
    if local:
        prepare = partial(with_answer, style=style, pattern=pattern)
        limits = Limits(call_deadline, concurrency)
        beside.append(LocalRewards({name: _local[name] for name in local}, prepare=prepare, limits=limits))
    # The pool also extracts the answers for the log; without rewards of its own it gets one that is not logged.
    pool = make_pool(in_pool or [("format", 0.0)], settings={n: settings[n] for n, _ in in_pool if n in settings})
    return MixedGrader(pool, beside, rewards)


class MixedGrader:
    """A pool for rewards per sample, others beside it, and their sum; a sample gets the worst of its verdicts."""

    def __init__(self, pool: Grader, beside: Sequence[Rewards], rewards: Sequence[tuple[str, float]]):
        self._pool, self._beside, self._rewards = pool, beside, tuple(rewards)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._closed = False

    def __enter__(self) -> MixedGrader:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; grading in progress raises GraderError."""
        self._closed = True
        for rewards in self._beside:
            rewards.close()
        self._pool.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def grade(self, samples: Sequence[Sample]) -> Grades:
        """Grade and wait.

        Raises:
            GraderError: workers cannot be started, or the grader is closed.
        """
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> Future[Grades]:
        """Grade in the background, batches in the order of submission."""
        if self._closed:
            raise GraderError("the grader is closed; grade inside its `with` block")
        return self._threads.submit(self._grade, self._pool.submit(samples), tuple(samples))

    def _grade(self, pooled: Future[Grades], samples: tuple[Sample, ...]) -> Grades:
        outcomes: dict[str, Outcome] = {}
        try:
            for rewards in self._beside:
                outcomes |= rewards.grade(samples)
        except RuntimeError as error:
            raise error if isinstance(error, GraderError) else GraderError(str(error)) from error
        return joined(pooled.result(), outcomes, self._rewards)


def joined(pooled: Grades, outcomes: Mapping[str, Outcome], rewards: Sequence[tuple[str, float]]) -> Grades:
    """Join the pool's grades with the outcomes of other rewards, in the order of ``rewards``."""
    per_reward = {n: outcomes[n].values if n in outcomes else pooled.per_reward[n] for n, _ in rewards}
    total = np.zeros(len(pooled.verdicts), np.float32)
    for name, weight in rewards:
        if weight != 0:  # a reward of weight 0 is only logged
            total = total + np.float32(weight) * per_reward[name]
    verdicts, notes = [], []
    for row, (verdict, note) in enumerate(zip(pooled.verdicts, pooled.notes)):
        of_rewards = [verdict, *(o.verdicts[row] for o in outcomes.values())]
        messages = [note, *(f"{name}: {o.notes[row]}" for name, o in outcomes.items() if o.notes[row])]
        verdicts.append(next(v for v in WORST if v in of_rewards))
        notes.append("; ".join(filter(None, messages)))
    return Grades(total, per_reward, verdicts, pooled.answers, notes)


@contextmanager
def local_rewards(rewards: Sequence[Any]) -> Iterator[list[tuple[str, float]]]:
    """Register callables of this process as rewards while the context lasts; yield (name, weight) of all rewards.

    Args:
        rewards: callables, names of registered rewards, or pairs of either with a weight.

    Raises:
        ValueError: a callable without a name, two with the same name, or neither a callable nor a name.
    """
    pairs: list[tuple[str, float]] = []
    with ExitStack() as stack:
        for item in rewards:
            function, weight = item if isinstance(item, tuple) else (item, 1.0)
            if isinstance(function, str):
                pairs.append((function, float(weight)))
                continue
            if not callable(function):
                raise ValueError(f"rewards: expected a function, a reward's name, or (either, weight), got {item!r}")
            name = register_local(function)
            stack.callback(unregister_local, name)
            _local[name] = function
            stack.callback(_local.pop, name, None)
            pairs.append((name, float(weight)))
        yield pairs


def _instructions(code: CodeType) -> str:
    """Return a function's instructions, names and constants as text, equal in every process."""

    def text(constant: Any) -> str:
        if isinstance(constant, CodeType):
            return _instructions(constant)
        return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    return " ".join([code.co_code.hex(), *code.co_names, *map(text, code.co_consts)])


def local_digests(names: Sequence[str]) -> dict[str, str]:
    """Return name -> SHA-256 of the source of the rewards that are callables of this process."""
    digests = {}
    for name in names:
        if name in _local:
            try:
                source = inspect.getsource(_local[name])
            except (OSError, TypeError):  # defined at a prompt, or an object without source
                code = getattr(_local[name], "__code__", None)
                source = type(_local[name]).__qualname__ if code is None else _instructions(code)
            digests[name] = hashlib.sha256(source.encode()).hexdigest()
    return digests
