"""Play episodes of an environment in worker processes, turn by turn.

The protocol has no state: an episode is its columns, its seed and the policy's turns so far. The worker that holds the
episode's live instance plays the last turn on it. If there is none (its worker was killed, this is a resumed run, or
another process), a worker begins the episode again and plays all its turns, so a deterministic environment gives the
same answer either way. Where the replay's observations differ from ``Episode.observations``, and for a class with
``replayable = False``, the episode ends as failed instead.

Workers, deadlines and limits are those of rewards (``oarjax/grading/pool.py``): a turn that hangs, and one that ends
its worker twice, costs its episode alone.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

from oarjax.environments.contract import load_environment, tool_schemas
from oarjax.errors import UserError
from oarjax.grading.grader import worker_count
from oarjax.grading.link import InvalidMessage
from oarjax.grading.pool import CallQueue, Pool, Worker, WorkerKind
from oarjax.types import Verdict


class Episode(NamedTuple):
    """An episode so far.

    Attributes:
        columns: of its row, for ``reset``; what JSON can hold.
        seed: of the episode; those with equal columns and seed are played alike.
        texts: the policy's turns so far, without stop tokens.
        observations: what the environment said after each of them but the last, to check replays; () checks nothing.
    """

    columns: dict[str, Any]
    seed: int
    texts: tuple[str, ...]
    observations: tuple[str, ...] = ()


class Step(NamedTuple):
    """The environment's answer to an episode's last turn.

    Attributes:
        text: what the environment says; None: the episode is over.
        reward: of the last turn, at the end with the final reward; 0.0 without one.
        failed: "", or why the episode ended ungraded: "timeout: ..." or "crash: ...".
        state: public attributes of the instance at the end of an episode, for ``Sample.environment``; else None.
    """

    text: str | None
    reward: float = 0.0
    failed: str = ""
    state: dict[str, Any] | None = None


class Environments:
    """Play episodes in worker processes. Use as a context manager; workers end with it, and with this process.

    Args:
        name: the class: ``file.py:Class``, ``module:Class`` or a built-in name, see ``oarjax.environments.contract``.
        settings: keyword arguments of its constructor.
        workers: number of processes; auto: half of the cores, at least 2.
        deadline: seconds per turn; a worker's start-up does not count.
        memory_mb: resident memory of a worker and its descendants, with all live instances that it holds.
        field: of the config, which errors name.

    Raises:
        ConfigError: there is no such class, or it is no environment.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        workers: int | Literal["auto"] = 2,
        deadline: float = 30.0,
        memory_mb: int = 2048,
        field: str = "environment",
    ):
        self._class, self._field = load_environment(name, settings, field=field), field
        file, _, cls = name.rpartition(":")
        if file.endswith(".py"):  # a worker may start after this process has gone to another folder
            name = f"{os.path.abspath(os.path.expanduser(file))}:{cls}"
        kind = WorkerKind(
            name="environments",
            module="oarjax.environments.worker",
            setup={
                "name": name,
                "settings": dict(settings or {}),
                "deadline": deadline,
                "address_mb": 4 * memory_mb,
                "memory_mb": memory_mb,
            },
            deadline=deadline,
            memory_mb=memory_mb,
            joint=True,
            code=() if name.startswith("builtin:") else (name,),
            reply="answer",
        )
        numbers = count()
        self._pool = Pool(
            kind, lambda: _Turns(numbers, replayable=self._class.replayable), workers=worker_count(workers)
        )

    def __enter__(self) -> Environments:
        self._pool.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers with their live instances."""
        self._pool.close()

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for chat templates; [] for a class with ``step(text)``."""
        return tool_schemas(self._class, field=self._field)

    @property
    def replayable(self) -> bool:
        """False: an episode whose live instance is lost ends as failed."""
        return self._class.replayable

    def advance(self, episodes: Sequence[Episode]) -> list[Step]:
        """Play the last turn of each episode, and wait.

        Raises:
            UserError: ``reset`` returned a text, or the class raised this error.
            GraderError: workers cannot be started, or the pool is closed.
        """
        if any(not episode.texts for episode in episodes):
            raise ValueError("advance: expected episodes with at least one turn of the policy")
        return self._submit(episodes, finish=False)

    def finish(self, episodes: Sequence[Episode]) -> list[Step]:
        """End episodes that the policy or a limit ended after an observation, and wait.

        Their steps hold the final reward alone. Call it for every episode that no step ended: it frees the instance.

        Args:
            episodes: with all turns that were played, and the observations after each of them.

        Raises:
            UserError: ``reset`` returned a text, or the class raised this error.
            GraderError: workers cannot be started, or the pool is closed.
        """
        return self._submit(episodes, finish=True)

    def _submit(self, episodes: Sequence[Episode], *, finish: bool) -> list[Step]:
        identities = [json.dumps([episode.columns, episode.seed], sort_keys=True) for episode in episodes]
        items = [_Item(episode, finish, identity) for episode, identity in zip(episodes, identities)]
        return self._pool.submit(items).result()


class _Live(NamedTuple):
    """A live instance: its number in its worker, and what it has said."""

    number: int
    observations: tuple[str, ...]


NOT_LIVE = _Live(-1, ())


@dataclass
class _Item:
    """An episode whose last turn is to be played, or that is to be ended after it (``finish``)."""

    episode: Episode
    finish: bool
    identity: str
    live: _Live = NOT_LIVE
    """Plays the call in progress; it grows with the replies."""
    turn: int = 0
    """Turn of the next reply: 0 is the reset, and an end without a turn counts as one."""
    failed: str = ""
    step: Step | None = None

    @property
    def played(self) -> int:
        """The number of turns that the instance has played before."""
        return len(self.episode.texts) - (not self.finish)

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """The name of its instance in ``Worker.held``."""
        return self.identity, self.episode.texts[: self.played]

    def matches(self, live: _Live) -> bool:
        """Return True if an instance has said what the episode has heard."""
        heard = self.episode.observations[: self.played]
        return heard == live.observations[: len(heard)]


class _Turns(CallQueue):
    """Turns of one or more submissions that are played together: the queue, and the steps so far.

    ``Worker.held`` has the worker's live instances, by ``_Item.key``.
    """

    def __init__(self, numbers: Iterator[int], *, replayable: bool):
        self._numbers, self._replayable = numbers, replayable
        self._items: list[_Item] = []
        self._queue: deque[int] = deque()
        self._tried: set[int] = set()
        self._submitted: deque[tuple[list[_Item], Future[list[Step]]]] = deque()

    def add(self, items: Sequence[_Item], future: Future[list[Step]]) -> None:
        if future.set_running_or_notify_cancel():
            self._queue.extend(range(len(self._items), len(self._items) + len(items)))
            self._items += items
            self._submitted.append((list(items), future))
            self.open += len(items)

    def deliver(self) -> None:
        while self._submitted:
            steps = [item.step for item in self._submitted[0][0] if item.step is not None]
            if len(steps) < len(self._submitted[0][0]):
                return
            self._submitted.popleft()[1].set_result(steps)

    def fail(self, error: BaseException) -> None:
        while self._submitted:
            self._submitted.popleft()[1].set_exception(error)

    def take(self, worker: Worker, workers: Sequence[Worker]) -> tuple[dict[str, Any], list[int]] | None:
        """Take a turn whose instance this worker holds, else one whose instance nobody holds."""
        for index in self._queue if worker.held else ():
            item = self._items[index]
            if any(map(item.matches, worker.held.get(item.key, ()))):
                return self._call(index, worker)
        for index in list(self._queue):
            item = self._items[index]
            if any(any(map(item.matches, peer.held.get(item.key, ()))) for peer in workers):
                continue
            if item.played and not self._replayable:
                self.give_up([index], "crash", "its instance is lost, and its class says replayable = False")
                continue
            return self._call(index, worker)
        return None

    def _call(self, index: int, worker: Worker) -> tuple[dict[str, Any], list[int]]:
        self._queue.remove(index)
        item = self._items[index]
        columns, seed, texts, _ = item.episode
        instances = worker.held.get(item.key, [])
        live = next(filter(item.matches, instances), None)
        operations = [("reset", ""), *(("play", text) for text in texts), ("finish", "")][: None if item.finish else -1]
        item.turn, item.failed = 0, ""
        if live is not None:
            instances.remove(live)
            if not instances:
                del worker.held[item.key]
            item.turn, operations = len(operations) - 1, operations[-1:]
        item.live = live or _Live(next(self._numbers), ())
        message = {"instance": item.live.number, "columns": columns, "seed": seed, "turn": item.turn}
        return {**message, "operations": operations}, [index] * len(operations)

    def put_back(self, items: list[int]) -> None:
        self._queue.extendleft(set(items))

    def settle(self, item: int, reply: dict[str, Any], worker: Worker) -> None:
        entry = self._items[item]
        match reply:
            case {
                "turn": entry.turn,
                "text": str() | None as observation,
                "reward": float(reward),
                "state": dict() | None as state,
                "failed": str(failed),
                "refused": str(refused),
            } if math.isfinite(reward):
                pass
            case _:
                raise InvalidMessage("an invalid reply")
        if refused:
            raise UserError(refused)
        if failed and not entry.failed:
            entry.failed = f"crash: {failed}"
        self._compare(entry, observation)
        if observation is not None and entry.turn:
            entry.live = _Live(entry.live.number, (*entry.live.observations, observation))
        if entry.turn == len(entry.episode.texts) + entry.finish:
            entry.step = Step(None, 0.0, entry.failed) if entry.failed else Step(observation, reward, state=state)
            self.open -= 1
            if entry.step.text is not None:
                worker.held.setdefault((entry.identity, entry.episode.texts), []).append(entry.live)
        entry.turn += 1

    @staticmethod
    def _compare(item: _Item, observation: str | None) -> None:
        """Note a replayed turn that went on in another way than the episode."""
        if item.failed or not 0 < item.turn <= item.played:
            return
        heard = item.episode.observations[item.turn - 1 : item.turn]
        if observation is None or (heard and heard[0] != observation):
            what = "ended the episode" if observation is None else "got another observation"
            item.failed = f"crash: turn {item.turn}, played again, {what}; set replayable = False in its class"

    def retry(self, items: list[int], note: str) -> None:
        for item in set(items):
            if item in self._tried or not self._replayable:
                self.give_up([item], "crash", note)
            else:
                self._tried.add(item)
                self._queue.appendleft(item)

    def give_up(self, items: list[int], verdict: Verdict, note: str) -> None:
        for index in set(items):
            if index in self._queue:
                self._queue.remove(index)
            self._items[index].step = Step(None, 0.0, f"{verdict}: {note}")
            self.open -= 1
