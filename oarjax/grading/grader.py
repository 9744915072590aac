"""Grade completions with all rewards of a run.

How a reward is called decides where it runs: rewards per sample in a pool of workers, those per batch or group and
async ones in a worker beside it, callables of this process in one of its threads.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, Literal

import numpy as np

from oarjax.credit.answer_text import Style, check_pattern
from oarjax.grading.batch import RewardBatch, RewardScores, rows_of_calls
from oarjax.grading.pool import GraderError, Pool, WorkerKind
from oarjax.grading.rewards import (
    Reward,
    Sample,
    calls_of,
    find_rewards,
    is_joint,
    load_plugins,
    register_local,
    unregister_local,
)
from oarjax.grading.worker import SKIPPED, WORST, AsyncLimits, Graded, make_call, with_answer
from oarjax.types import Grades, Verdict

GRACE = 2.0
"""Seconds after the deadline in which a worker itself may report a late async call."""

_local: dict[str, Reward] = {}  # callables that this process grades with, see ``local_rewards``


class Grader:
    """Grade samples by named rewards. Use as a context manager; its workers end with it, and with this process.

    Args:
        rewards: (name, weight) pairs; a reward of weight 0 is only logged.
        settings: of rewards by name, their keyword arguments.
        plugins: Python files or modules that register rewards, imported here to check the names, and in every worker.
        workers: number of processes for rewards per sample; auto: see ``worker_count``.
        deadline: seconds per answer, see ``oarjax.grading.pool``; a worker's start-up does not count.
        call_deadline: seconds per call of a batch or group reward, and per sample of an async one.
        concurrency: samples of an async reward in flight.
        memory_mb: resident memory of a worker and its descendants; four times as much for batch, group and async
            rewards, whose libraries are larger.
        style, pattern: how an answer is marked in a completion, see ``oarjax.credit.answer_text``.

    Raises:
        ValueError: an unknown reward or setting, a plugin that cannot be imported, or a bad pattern.
    """

    def __init__(
        self,
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
    ):
        load_plugins(plugins)
        names = [name for name, _ in rewards]
        find_rewards(names, settings)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"grading.rewards: expected at least one reward and each once, got {names}")
        if style == "regex":
            check_pattern(pattern)
        self._rewards, self._style, self._pattern = tuple(rewards), style, pattern
        self._local = {name: _local[name] for name in names if name in _local}
        self._limits = AsyncLimits(call_deadline, concurrency)
        joint_names = [name for name in names if name not in _local and is_joint(name)]
        per_sample = tuple(name for name in names if name not in _local and name not in joint_names)

        files = [os.path.abspath(os.path.expanduser(p)) if p.endswith(".py") else p for p in plugins]

        def pool(*parts: tuple[str, ...], joint: bool, count: int, seconds: float, resident_mb: int) -> Pool:
            kind = WorkerKind(
                name="grading",
                module="oarjax.grading.worker",
                setup={
                    "parts": parts,  # rewards that grade a sample together
                    "joint": joint,  # they see a batch or a group, or are async
                    "settings": dict(settings or {}),
                    "plugins": files,
                    "deadline": seconds,  # per sample, of a joint call per verdict
                    "concurrency": concurrency,
                    "address_mb": 4 * memory_mb,
                    "memory_mb": resident_mb,
                    "style": style,
                    "pattern": pattern,
                },
                deadline=seconds,
                memory_mb=resident_mb,
                grace=GRACE if joint else 0.0,
                joint=joint,
                code=tuple(files),
            )
            return Pool(kind, lambda: RewardBatch(parts, joint=joint, workers=count), workers=count)

        self.pools: list[Pool] = []
        if per_sample:
            limits = {"count": worker_count(workers), "seconds": deadline, "resident_mb": memory_mb}
            self.pools.append(pool(per_sample, joint=False, **limits))
        if joint_names:
            limits = {"count": 1, "seconds": call_deadline, "resident_mb": 4 * memory_mb}
            self.pools.append(pool(*((name,) for name in joint_names), joint=True, **limits))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._closed = False

    def __enter__(self) -> Grader:
        for pool in self.pools:
            pool.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; grading in progress raises GraderError."""
        self._closed = True
        for pool in self.pools:
            pool.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def grade(self, samples: Sequence[Sample]) -> Grades:
        """Grade and wait.

        Raises:
            GraderError: workers cannot be started, or the grader is closed.
        """
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> Future[Grades]:
        """Grade in the background; futures are done in the order of submission."""
        if self._closed:
            raise GraderError("the grader is closed; grade inside its `with` block")
        samples = tuple(samples)
        return self._thread.submit(self._join, [pool.submit(samples) for pool in self.pools], samples)

    def _join(self, graded: Sequence[Future[list[RewardScores]]], samples: tuple[Sample, ...]) -> Grades:
        local = self._grade_here(samples) if self._local else []
        parts = [*(part for future in graded for part in future.result()), *local]
        return joined(parts, self._rewards, [[sample.asks(name) for name, _ in self._rewards] for sample in samples])

    def _grade_here(self, samples: Sequence[Sample]) -> list[RewardScores]:
        """Call the callables of this process; one that hangs cannot be stopped."""
        readings = [with_answer(sample, self._style, self._pattern) for sample in samples]
        ready = [sample for sample, _ in readings]
        parts = []
        for name, function in self._local.items():
            lost: Graded = (np.nan, "crash", "no verdict")
            outcomes = [failure or (lost if sample.asks(name) else SKIPPED) for sample, failure in readings]
            for rows in rows_of_calls(name, ready):

                def emit(place: int, outcome: Graded, rows: list[int] = rows, into: list[Graded] = outcomes) -> None:
                    if readings[rows[place]][1] is None:
                        into[rows[place]] = outcome

                make_call(function, calls_of(name), [ready[row] for row in rows], self._limits, emit)
            values = np.asarray([value for value, *_ in outcomes], np.float32)[:, None]
            verdicts: list[Verdict] = [verdict for _, verdict, _ in outcomes]
            notes = [note for *_, note in outcomes]
            parts.append(RewardScores((name,), values, verdicts, [s.extracted for s in ready], notes, f"{name}: "))
        return parts


def joined(
    parts: Sequence[RewardScores], rewards: Sequence[tuple[str, float]], asked: Sequence[Sequence[bool]]
) -> Grades:
    """Join the scores of all rewards, in the order of ``rewards``; a sample gets the worst of its verdicts.

    Of each sample those rewards are added up that it ``asked`` for.
    """
    columns = {name: part.values[:, column] for part in parts for column, name in enumerate(part.names)}
    weights = np.array([weight for _, weight in rewards], np.float32)
    nonzero = weights != 0
    values = np.stack([columns[name] for name, _ in rewards], 1)
    masked = np.where(np.asarray(asked, bool).reshape(values.shape), values, np.float32(0))
    return Grades(
        rewards=masked[:, nonzero] @ weights[nonzero],
        per_reward={name: columns[name] for name, _ in rewards},
        verdicts=[min(verdicts, key=WORST.index) for verdicts in zip(*(part.verdicts for part in parts))],
        answers=[next((a for a in texts if a is not None), None) for texts in zip(*(part.answers for part in parts))],
        notes=[
            "; ".join(part.label + note for part, note in zip(parts, notes) if note)
            for notes in zip(*(part.notes for part in parts))
        ],
    )


def worker_count(count: int | Literal["auto"], *, cores: int | None = None) -> int:
    """Resolve ``auto`` by the cores that this process may use: half of them, at least 2 and at most 32."""
    if count != "auto":
        return count
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // 2, 2), 32)


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
            (_local[name],) = find_rewards([name])
            stack.callback(_local.pop, name, None)
            pairs.append((name, float(weight)))
        yield pairs


def reads_answers(names: Sequence[str]) -> bool:
    """Return True if the code of one of these rewards has the name ``extracted``, a sample's answer.

    Raises:
        ValueError: an unknown reward.
    """
    functions = [inspect.unwrap(function) for function in find_rewards(names)]
    code = [getattr(f, "__code__", getattr(type(f).__call__, "__code__", None)) for f in functions]
    for part in code:  # grows by the functions within
        code += [constant for constant in getattr(part, "co_consts", ()) if isinstance(constant, CodeType)]
    return any("extracted" in getattr(part, "co_names", ()) for part in code)


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
                code = getattr(inspect.unwrap(_local[name]), "__code__", None)
                source = type(_local[name]).__qualname__ if code is None else _instructions(code)
            digests[name] = hashlib.sha256(source.encode()).hexdigest()
    return digests
