"""Rollouts of several turns: the policy writes, an environment answers, until it ends the episode.

An episode is one row: ids are only ever appended, and nothing is tokenised twice. What the environment says is no
part of ``Rollout.completion``, so it reaches neither loss nor advantages. Environments are asked by text, in
processes of their own (``oarjax.environments``); the first process of a run asks for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from oarjax.config.learning import EnvironmentConfig
from oarjax.data.streams import Encoded
from oarjax.data.tokenizer import text_of
from oarjax.environments.pool import Episode, Step
from oarjax.rollout.source import Batch, Continuing, Report, Request, RowId, Source, Spent, Turn, continuing
from oarjax.rollout.stop_strings import cut_text
from oarjax.system.processes import gather, is_first
from oarjax.types import Params


@runtime_checkable
class Played(Protocol):
    """Answer turns as ``oarjax.environments.pool`` does."""

    def advance(self, episodes: Sequence[Episode]) -> list[Step]: ...
    def finish(self, episodes: Sequence[Episode]) -> list[Step]: ...


class _Row(NamedTuple):
    """An episode that goes on."""

    request: Request  # of its next turn
    observed: tuple[int, ...]  # the last ids of the request, which the environment said
    episode: Episode  # so far


class EpisodesFromTurns:
    """Episodes that are made of a source's turns: what they share, whoever plays them.

    Args:
        source: draws turns; parameters go to it, and ``close`` closes it, not who plays.
    """

    together = True

    def __init__(self, source: Continuing) -> None:
        self._source = source

    def sync(self, params: Params, version: int) -> None:
        """Draw with these parameters from now on."""
        self._source.sync(params, version)

    def spent(self) -> Spent:
        """Return the counts of the draws since the last call."""
        return self._source.spent()

    def close(self) -> None:
        """Close the source of turns."""
        self._source.close()


class EpisodeSource(EpisodesFromTurns):
    """Draw episodes from a source of turns.

    Args:
        source: draws turns.
        environments: answer turns; asked by the first process alone.
        text: of what the policy wrote in a turn.
        reply: ids of what an environment says after the policy's stop id, up to where the policy writes again.
        columns_of: returns the columns of a problem's row.
        most: turns of an episode, >= 1.
    """

    def __init__(
        self,
        source: Continuing,
        environments: Played,
        text: Callable[[Sequence[int]], str],
        reply: Callable[[str], list[int]],
        columns_of: Callable[[int], Mapping[str, Any]],
        *,
        most: int,
    ) -> None:
        super().__init__(source)
        self._environments, self._text, self._reply = environments, text, reply
        self._columns_of, self._most = columns_of, most

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw all episodes of a batch; ``report`` is not called, since rewards see whole episodes."""
        starts = zip(batch.requests, np.repeat(batch.prompts.problem, batch.group_size), episode_seeds(batch))
        going = [_Row(request, (), Episode(dict(self._columns_of(int(p))), seed, ())) for request, p, seed in starts]
        finished: dict[RowId, Turn] = {}
        limited: dict[RowId, Episode] = {}  # by a limit: their environments have not ended them
        new_turns = self._source.draw(batch)
        while going:
            turns = [turn._replace(observed=row.observed) for row, turn in zip(going, new_turns, strict=True)]
            answers = iter(
                self._ask(
                    self._environments.advance,
                    [
                        with_turn(row.episode, self._text(turn.tokens.tolist()))
                        for row, turn in zip(going, turns)
                        if turn.finish == "stop"
                    ],
                )
            )
            following = []
            for row, turn in zip(going, turns):
                if turn.finish != "stop":  # cut: nobody answers half a turn
                    finished[turn.id], limited[turn.id] = turn._replace(reward=0.0), row.episode
                    continue
                episode, step = next(answers)
                finished[turn.id] = _after(turn, step)
                if step.text is None:
                    continue
                episode = episode._replace(observations=(*episode.observations, step.text))
                observed = self._reply(step.text)
                tokens = np.concatenate([row.request.tokens, turn.tokens, np.asarray(observed, np.int32)])
                next_id = turn.id._replace(turn=turn.id.turn + 1)
                if next_id.turn == self._most:
                    limited[turn.id] = episode
                elif len(tokens) - row.request.prompt_length >= batch.max_new:  # no room for another turn
                    finished[turn.id], limited[turn.id] = finished[turn.id]._replace(finish="length"), episode
                else:
                    request = row.request._replace(id=next_id, tokens=tokens)
                    following.append(_Row(request, tuple(observed), episode))
            going = following
            new_turns = self._source.go_on(batch, [row.request for row in going]) if going else []
        self._finish(finished, limited)
        return [finished[id] for id in sorted(finished)]

    def _finish(self, ended: dict[RowId, Turn], stopped: dict[RowId, Episode]) -> None:
        """Add what environments give at the end to the last turns of episodes that they did not end themselves."""
        for id, (_, step) in zip(stopped, self._ask(self._environments.finish, list(stopped.values()))):
            turn = ended[id]
            ended[id] = _after(turn, step)

    def _ask(
        self, ask: Callable[[Sequence[Episode]], list[Step]], episodes: list[Episode]
    ) -> list[tuple[Episode, Step]]:
        """Ask on the first process, for all of them."""
        if not episodes:
            return []
        given = gather([list(step) for step in ask(episodes)] if is_first() else None)[0]
        return list(zip(episodes, (Step(*step) for step in given), strict=True))


def _after(turn: Turn, step: Step) -> Turn:
    """Return a turn with what the environment gave for it, and its state at the end as JSON."""
    finish = "error" if step.failed else turn.finish
    reward, state = (turn.reward or 0.0) + step.reward, None if step.state is None else json.dumps(step.state)
    return turn._replace(reward=reward, finish=finish, state=state, failed=step.failed)


def with_turn(episode: Episode, text: str) -> Episode:
    """Return an episode after a turn of the policy."""
    return episode._replace(texts=(*episode.texts, text))


def episode_seeds(batch: Batch) -> list[int]:
    """Return the seed of every row's environment: one for all rows of a problem, from the batch's key."""
    words = batch.requests[0].key
    seeds = [int(np.random.SeedSequence([*words, int(p)]).generate_state(1)[0]) for p in batch.prompts.problem]
    return [seed for seed in seeds for _ in range(batch.group_size)]


def play(
    source: Source,
    environments: Played,
    environment: EnvironmentConfig,
    reply: Callable[[str], list[int]],
    problems: Encoded,
    table: Sequence[bytes],
    stop: Sequence[str],
) -> EpisodeSource:
    """Return a source of episodes from one of turns.

    Args:
        reply: the ids of what an environment says.
        problems: whose columns environments see.
        table: the bytes of every token id.
        stop: strings that end a turn.
    """
    by_index = problems.by_index

    def text(ids: Sequence[int]) -> str:
        return cut_text(text_of(ids, table), stop)

    def columns(problem: int) -> dict[str, object]:
        return by_index[problem].columns

    return EpisodeSource(continuing(source), environments, text, reply, columns, most=environment.turns)
