"""Bind the environment of a config to rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oarjax.config.learning import EnvironmentConfig
from oarjax.data.streams import Encoded
from oarjax.data.tokenizer import text_of
from oarjax.rollout.source import Continuing, Source
from oarjax.rollout.stop_strings import cut_text
from oarjax.sources.episodes import EpisodeSource, Played


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
    if not isinstance(source, Continuing):
        raise TypeError(f"{type(source).__name__} draws single turns only")
    by_index = problems.by_index

    def text(ids: Sequence[int]) -> str:
        return cut_text(text_of(ids, table), stop)

    def columns(problem: int) -> dict[str, object]:
        return by_index[problem].columns

    return EpisodeSource(source, environments, text, reply, columns, most=environment.turns)
