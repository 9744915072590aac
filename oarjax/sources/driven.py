"""Rollouts of episodes that a program of others drives: it asks our token server, turn by turn, and tells the reward.

The policy's ids and log-probs are those of our own sampler, kept before the program sees them; what comes back from it
is the ids that it adds between turns, and a reward. A request has to continue its row, ids unchanged, as everywhere:
an episode that rewrites its history or forks ends ungraded. Episodes that are unfinished when a run dies are drawn
again, from reset.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from oarjax.config.learning import RolloutConfig
from oarjax.data.problems import Problem
from oarjax.data.rows import DataError
from oarjax.data.streams import Encoded
from oarjax.environments.player import Ended, PlayerError
from oarjax.rollout.source import Batch, Continuing, Report, Request, Source, Turn, continuing
from oarjax.sources.episodes import EpisodesFromTurns
from oarjax.sources.server import Sampling, TokenServer, TurnAsked, cut
from oarjax.system.processes import gather, is_first

GATHERING = (0.05, 2.0)
"""Bounds of the seconds that a batch waits for another request: half of what the batch before it took."""

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that the run has, too."""

NUMBERS = count()


@runtime_checkable
class Driver(Protocol):
    """Plays episodes, see ``oarjax.environments.player.Player``."""

    deadline: float
    turns: int

    def start(self, url: str, token: str, ended: Callable[[Ended | None], object]) -> None: ...
    def play(self, name: str, task: Mapping[str, Any]) -> None: ...
    def cancel(self, name: str) -> None: ...
    def close(self) -> None: ...


@dataclass
class _DrivenRow:
    """An episode so far."""

    request: Request  # of its next turn
    turns: list[Turn] = field(default_factory=list)
    limit: str = ""  # it asked for one turn more: finish of the last one, "length" without room for it, else "stop"
    ended: Ended | None = None
    since: float = 0.0  # when it was answered


class DriverLink:
    """A token server, a driver and their news, for all draws of a run; open until ``close``."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._news: queue.SimpleQueue[TurnAsked | Ended | None] = queue.SimpleQueue()
        self._server: TokenServer | None = None

    def open(self) -> None:
        """Start the driver, unless it is started.

        Raises:
            ConfigError: it cannot play.
        """
        if self._server is None:
            self._server = TokenServer(self._news.put)
            self.driver.start(self._server.url, self._server.token, self._news.put)

    def begin(self, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin episodes by name."""
        self.open()
        for name, task in tasks.items():
            self.driver.play(name, task)

    def news(self, most: int, timeout: float, gather: float) -> list[TurnAsked | Ended]:
        """Wait for a request or an end, and then for others, each within ``gather`` seconds, ``most`` in all.

        Raises:
            PlayerError: the driver has ended.
        """
        items: list[TurnAsked | Ended] = []
        while len(items) < most:
            try:
                item = self._news.get(timeout=gather if items else max(timeout, 0.0))
            except queue.Empty:
                break
            if item is None:
                raise PlayerError(
                    "rollout.environment: the process that plays episodes has ended; see its messages above, and start "
                    "the same command again, which plays unfinished episodes from reset"
                )
            items.append(item)
        return items

    def episodes(
        self, source: Source, problems: Encoded, rollout: RolloutConfig, stop_ids: Sequence[int], vocab: int
    ) -> DrivenEpisodes:
        """Return a source of episodes of ``problems``, whose column ``task`` holds the task, from one of turns."""
        tasks = lambda problem: task_of(problems.by_index[problem])  # noqa: E731
        return DrivenEpisodes(continuing(source), self, tasks, rollout, stop_ids=stop_ids, vocab=vocab)

    def close(self) -> None:
        """End the driver, and listen no longer."""
        if self._server is not None:
            self.driver.close()
            self._server.close()
            self._server = None


def task_of(problem: Problem) -> Mapping[str, Any]:
    """Return the task of a problem.

    Raises:
        DataError: it has none.
    """
    task = problem.columns.get("task")
    if not isinstance(task, Mapping):
        raise DataError(
            f"{problem.place}: expected a task of verifiers in the column task, got {task!r:.60}; "
            "write the rows with oarjax/environments/verifiers_player.py tasks TASKSET"
        )
    return task


class DrivenEpisodes(EpisodesFromTurns):
    """Draw episodes that a driver plays, with a source of turns.

    Args:
        task_of: returns the task of a problem.
        stop_ids: that end turns of the source.
        vocab: ids of the tokenizer.
    """

    def __init__(
        self,
        source: Continuing,
        link: DriverLink,
        task_of: Callable[[int], Mapping[str, Any]],
        rollout: RolloutConfig,
        *,
        stop_ids: Sequence[int],
        vocab: int,
    ) -> None:
        super().__init__(source)
        self._link, self._task_of = link, task_of
        self._rollout, self._stop_ids, self._vocab = rollout, tuple(stop_ids), vocab
        self._gather = GATHERING[0]

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw all episodes of a batch; ``report`` is not called, since rewards see whole episodes.

        Raises:
            PlayerError: the driver cannot play.
        """
        problems = np.repeat(batch.prompts.problem, batch.group_size)
        names = {f"{next(NUMBERS)}-{request.id.row}": _DrivenRow(request) for request in batch.requests}
        if is_first():
            self._link.begin({name: self._task_of(int(p)) for name, p in zip(names, problems)})
        for row in names.values():
            row.since = time.monotonic()
        while going := {name: row for name, row in names.items() if row.ended is None}:
            requests: dict[str, TurnAsked] = {}
            news = gather(self._heard(batch, going, requests) if is_first() else None)[0]
            for fields in news["ended"]:
                names[fields[0]].ended = Ended(*fields)
            for name, limit in news["limit"]:
                names[name].limit = limit
            self._answer(batch, names, news["asked"], requests)
        never = [row for row in names.values() if not row.turns]
        failed = [row.ended.failed for row in names.values() if row.ended and not row.limit and row.ended.failed]
        if len(never) == len(names):
            why = (failed and failed[0]) or "they end without, and say that they did not fail"
            raise PlayerError(f"rollout.environment: no episode asks for a turn: {why}")
        if never:  # every row has a turn, that of a failed one too
            for row, turn in zip(never, self._source.go_on(batch, [row.request for row in never])):
                row.turns.append(turn)
        return [turn for row in names.values() for turn in _closed(row)]

    def _answer(
        self,
        batch: Batch,
        names: Mapping[str, _DrivenRow],
        news: Sequence[Sequence[Any]],
        asked: Mapping[str, TurnAsked],
    ) -> None:
        """Draw the turns that are asked for, keep them, and send them."""
        requests, wants, observations = [], [], []
        for name, tokens, max_tokens, stops in news:
            row, ids = names[name], np.asarray(tokens, np.int32)
            observations.append(tuple(ids[len(row.request.tokens) :].tolist()))
            requests.append(row.request._replace(tokens=ids))
            wants.append(Sampling(max_tokens, tuple(stops), {}))
        if not requests:
            return
        start = time.monotonic()
        turns = self._source.go_on(batch, requests)
        self._gather = float(np.clip((time.monotonic() - start) / 2, *GATHERING))
        for (name, *_), request, want, observed, turn in zip(news, requests, wants, observations, turns, strict=True):
            row, (ids, finish) = names[name], cut(turn.tokens, turn.finish, want, self._stop_ids)
            turn = _shortened(turn, len(ids))._replace(finish=finish, observed=observed, reward=0.0)  # pyright: ignore[reportArgumentType]
            row.turns.append(turn)
            next_id = request.id._replace(turn=request.id.turn + 1)
            row.request = request._replace(id=next_id, tokens=np.concatenate([request.tokens, turn.tokens]))
            row.since = time.monotonic()
            if name in asked:
                asked[name].answer(turn.tokens, turn.logps, finish)

    def _heard(
        self, batch: Batch, going: Mapping[str, _DrivenRow], asked: dict[str, TurnAsked]
    ) -> dict[str, list[Any]]:
        """Wait for news of episodes that go on; refuse what no turn can answer."""
        due = min(row.since for row in going.values()) + self._link.driver.deadline
        news: dict[str, list[Any]] = {"ended": [], "limit": [], "asked": []}
        over = set[str]()
        for item in self._link.news(len(going), due - time.monotonic(), self._gather):
            if isinstance(item, Ended):
                if item.name in going and item.name not in over:
                    news["ended"].append(list(item))
                    over.add(item.name)
                continue
            row = going.get(item.model)
            if row is None or item.model in over or item.model in asked:
                item.refuse(
                    409, f"{item.model}: no episode of that name waits for a turn; an episode asks one at a time"
                )
                continue
            room = batch.max_new - (len(item.tokens) - row.request.prompt_length)
            if room < 1 or len(row.turns) == self._link.driver.turns:
                news["limit"].append([item.model, "length" if room < 1 else "stop"])
                item.refuse(
                    400, f"maximum context length: {batch.max_new} tokens, or {len(row.turns)} turns, are reached"
                )
            elif why := self._wrong(row, item):
                item.refuse(400, why)
                news["ended"].append([item.model, 0.0, why, None])
                over.add(item.model)
                self._link.driver.cancel(item.model)
            else:
                asked[item.model] = item
        now = time.monotonic()
        for name, row in going.items():
            if name not in over and name not in asked and now > row.since + self._link.driver.deadline:
                news["ended"].append([name, 0.0, "timeout: it neither asked for a turn nor ended in time", None])
                self._link.driver.cancel(name)
        news["asked"] = [
            [name, request.tokens.tolist(), request.sampling.max_tokens, list(request.sampling.stop_ids)]
            for name, request in sorted(asked.items())
            if not request.gone
        ]
        return news

    def _wrong(self, row: _DrivenRow, asked: TurnAsked) -> str:
        """Say why a request cannot be answered with the next turn of its row; "" if it can."""
        tokens = row.request.tokens
        if len(asked.tokens) < len(tokens) or not np.array_equal(asked.tokens[: len(tokens)], tokens):
            what = "its turns so far" if row.turns else "the prompt of data.train"
            return f"the request does not begin with {what}; ids are only ever appended"
        if asked.tokens.max() >= self._vocab:
            return f"token_ids: expected ids below {self._vocab}, got {asked.tokens.max()}"
        settings = {name: getattr(self._rollout, name) for name in SETTINGS}
        for name, value in asked.sampling.others.items():
            off = name == "top_k" and value == -1
            if (0 if off else value) != settings.get(name, 0) and (name in settings or value):
                return f"{name}: the run draws with {settings.get(name, 'none')}, got {value!r:.60}; leave it out"
        return ""


def _shortened(turn: Turn, length: int) -> Turn:
    """Return the first tokens of a turn."""
    whole_logps = None if turn.whole_logps is None else turn.whole_logps[:length]
    return turn._replace(
        tokens=turn.tokens[:length], logps=turn.logps[:length], versions=turn.versions[:length], whole_logps=whole_logps
    )


def _closed(row: _DrivenRow) -> list[Turn]:
    """Return the turns of an episode that is over, the last one with its end."""
    *earlier, last = row.turns
    end = row.ended
    assert end is not None
    failed = end.failed and (end.state is None or not row.limit)  # at a limit its task may call the refusal a failure
    why, finish = (end.failed, "error") if failed else ("", row.limit or last.finish)
    state = None if end.state is None else json.dumps(end.state)
    # of those before, one that was cut at the request's own limit did not end the row
    earlier = [turn._replace(finish="stop") for turn in earlier]
    return [*earlier, last._replace(finish=finish, reward=end.reward, state=state, failed=why)]
