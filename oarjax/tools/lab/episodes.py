"""``oarjax credit`` on episodes: what each turn, and what the environment said before it, means for the answer.

Importance is exact OAR-P's with whole turns as units: how far the answer moves if all tokens of one are changed. That
of an observation is an attribution only: no method trains on what the environment said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oarjax.config.changes import changed
from oarjax.credit.oar.oar_g import row_keys
from oarjax.data.problems import Problem
from oarjax.errors import ConfigError
from oarjax.report.files import cut, short, visible
from oarjax.report.html import write_html
from oarjax.run.hints import played_turns
from oarjax.run.run import Run
from oarjax.step.minibatches import join, take
from oarjax.storage.durable import write_durably
from oarjax.system.json import to_json
from oarjax.tools.lab.completions import Completions, usable_rows
from oarjax.tools.lab.lab import credit_tokens, score_methods
from oarjax.tools.lab.programs import make_programs
from oarjax.training.held_out import Graded, graded_batches
from oarjax.types import AnswerSpan, Rollout

FindAnswers = Callable[[Rollout], AnswerSpan]
PRINTED, WIDEST = 3, 60
"""Episodes in the terminal, and characters of a text there."""


@dataclass(frozen=True)
class LabTurn:
    """A turn of an episode. Untrusted text."""

    observed: str  # what the environment said before it
    observed_importance: float
    text: str
    importance: float
    share: float  # of the importance of all turns and observations before the answer; NaN of the turn that holds it
    reward: float  # the environment's
    weights: Mapping[str, float]  # by method: mean over its tokens


@dataclass(frozen=True)
class LabEpisode:
    prompt: str
    answer: str | None
    reference: str
    reward: float
    turns: Sequence[LabTurn]


@dataclass(frozen=True)
class EpisodesResult:
    title: str
    facts: Mapping[str, str]
    episodes: Sequence[LabEpisode]


class GradedEpisodes(NamedTuple):
    """Graded episodes."""

    completions: Completions
    answers: list[str | None]
    rewards: np.ndarray  # [R]


def choose_episodes(
    batches: Iterable[Graded], by_index: Mapping[int, Problem], find_answers: FindAnswers, *, most: int
) -> GradedEpisodes:
    """Choose the first ``most`` episodes that have an answer after a turn.

    Args:
        by_index: the problems of the batches, by their row numbers.

    Raises:
        ConfigError: none has.
    """
    rollouts, problems, answers, rewards, considered = [], [], [], [], 0
    for batch in batches:
        rows = usable_rows(find_answers(batch.rollout), shortest=1)[: most - len(problems)]
        samples = len(batch.rollout.ended) // len(batch.problems)
        rollouts.append(take(batch.rollout, rows))
        problems += [by_index[int(batch.problems[row // samples])] for row in rows]
        answers += [batch.grades.answers[row] for row in rows]
        rewards += batch.grades.rewards[rows].tolist()
        considered += len(batch.rollout.ended)
        if len(problems) == most:
            break
    if not problems:
        raise ConfigError(
            f"lab: none of {considered} episodes has an answer after a turn; set a trained policy, or the "
            "credit.answer.style of its answers"
        )
    rollout, referenced = join(rollouts), np.ones(len(problems), bool)
    completions = Completions(rollout, find_answers(rollout), problems, referenced, len(problems), considered)
    return GradedEpisodes(completions, answers, np.asarray(rewards, np.float32))


def with_observations(rollout: Rollout, span: AnswerSpan) -> AnswerSpan:
    """Return spans whose units are turns, 2k + 1, and observations before turn k, 2k, up to the answer."""
    completion, answer = np.asarray(rollout.completion), np.asarray(span.answer)
    turns = np.zeros(completion.shape, np.int32) if rollout.origin is None else np.asarray(rollout.origin.turns)
    before_answer = np.cumsum(answer, axis=1) == 0
    observed = np.asarray(rollout.extent) & ~completion & before_answer & answer.any(1, keepdims=True)
    units = (2 * turns + completion).astype(np.int32)
    return replace(span, reasoning=np.asarray(span.reasoning) | observed, units=units)  # pyright: ignore[reportArgumentType]


def measure_episodes(run: Run) -> EpisodesResult:
    """Play ``lab.problems`` episodes of data.eval (else data.train), and measure every turn of them.

    Raises:
        ConfigError: no episode has an answer after a turn.
    """
    cfg, lab = run.cfg, run.cfg.lab
    settings = lab.methods if "methods" in lab.model_fields_set else {cfg.credit.label: {}}
    methods = {name: changed(cfg.credit, changes) for name, changes in settings.items()}
    encoded, params = run.train if run.held_out is None else run.held_out, run.load()
    programs = make_programs(run, params)
    with run.console.status("episodes"), run.grader() as grader, ExitStack() as stack:
        stack.callback(lambda: run.environments and run.environments.close())
        batches = graded_batches(run, grader, params, encoded)
        played = choose_episodes(batches, encoded.by_index, run.find_answers, most=lab.problems)
    completions, rewards, rollout = played.completions, played.rewards, played.completions.rollout
    with run.console.status("importance of every turn"):
        exact = changed(cfg.credit, {"method": "oar_p", "masking": {"unit": "turn"}})
        units, place = with_observations(rollout, completions.span), partial(run.place, layout="rows")
        score = partial(jax.jit(programs.attribute(exact)), params)
        importance = in_batches(score, (replace(rollout, origin=None), units), place, size=lab.batch, seed=cfg.seed)
    with run.console.status("scores of every method"):
        scored = score_methods(run, programs, completions, list(dict.fromkeys(methods.values())))
    credits = {n: credit_tokens(run, completions, c, scored.get(c), rewards).weights for n, c in methods.items()}
    numbers, extent, episodes = np.asarray(units.units), np.asarray(rollout.extent), []
    for b, turns in enumerate(played_turns(rollout, run.table)):
        total, inside = float(importance[b].sum()), set(numbers[b][np.asarray(completions.span.reasoning)[b]].tolist())

        def of(values: np.ndarray, unit: int, b: int = b) -> np.ndarray:
            return values[b][(numbers[b] == unit) & extent[b]]

        lab_turns = [
            LabTurn(
                observed=turn.observed,
                observed_importance=float(of(importance, 2 * k).sum()),
                text=turn.text,
                importance=(turn_importance := float(of(importance, 2 * k + 1).sum())),
                share=turn_importance / total if total and 2 * k + 1 in inside else float("nan"),
                reward=turn.reward,
                weights={name: float(of(weights, 2 * k + 1).mean()) for name, weights in credits.items()},
            )
            for k, turn in enumerate(turns)
        ]
        problem = completions.problems[b]
        episodes.append(LabEpisode(problem.prompt, played.answers[b], problem.reference, float(rewards[b]), lab_turns))
    facts = {k: str(v) for k, v in run.facts().items()}
    facts["episodes"] = f"{len(episodes)} with an answer after a turn, out of {completions.considered}"
    return EpisodesResult(cfg.policy.path, facts, episodes)


def in_batches(
    score: Callable[..., Any], trees: Sequence[Any], place: Callable[[Any], Any], *, size: int, seed: int
) -> np.ndarray:
    """Score all rows, ``size`` at a time."""
    rows, parts = len(jax.tree.leaves(trees[0])[0]), []
    for start in range(0, rows, size):
        indices = np.resize(np.arange(start, min(start + size, rows)), size)
        keys = row_keys(jax.random.key(seed), jnp.asarray(indices))
        parts.append(jax.device_get(score(*(place(take(tree, indices)) for tree in trees), keys)))
    return np.concatenate(parts)[:rows]


# Shown ---------------------------------------------------------------------------------------------------------------

HEADING = ("said before", "imp.", "turn", "imp.", "share", "reward")


def cells(episode: LabEpisode) -> list[list[str]]:
    """Return the cells of a table with a line per turn, under ``HEADING`` and the methods' names."""
    return [
        [
            turn.observed.strip("\n"),
            short(turn.observed_importance) if turn.observed else "",
            turn.text.strip("\n"),
            *(("", "") if np.isnan(turn.share) else (short(turn.importance), f"{turn.share:.0%}")),
            short(turn.reward),
            *(short(weight) for weight in turn.weights.values()),
        ]
        for turn in episode.turns
    ]


def by_turn(result: EpisodesResult) -> str:
    """Say what the turns of each number are worth on average."""
    max_turns, parts = max(len(episode.turns) for episode in result.episodes), []
    for k in range(max_turns):
        shares = [e.turns[k].share for e in result.episodes if len(e.turns) > k and not np.isnan(e.turns[k].share)]
        parts += [f"turn {k + 1} {np.mean(shares):.0%} in {len(shares)} episodes"] if shares else []
    return f"Mean share of the importance before the answer: {'; '.join(parts)}."


NOTE = (
    "imp.: importance, how far the answer moves if all tokens of a turn, or of what the environment said, are changed "
    "(exact OAR-P). That of the environment's words is an attribution: nothing trains on them. Columns of methods: the "
    "mean weight of a turn's tokens. The turn that holds the answer has no importance."
)


def print_episodes(console: Console, result: EpisodesResult) -> None:
    """Print a few episodes, turn by turn, and the means over all of them."""
    for episode in result.episodes[:PRINTED]:
        head = f"{episode.prompt}: answer {episode.answer}, expected {episode.reference}"
        table = Table(title=Text(visible(cut(head, 2 * WIDEST))), title_justify="left", box=box.SIMPLE_HEAD)
        for name in (*HEADING, *episode.turns[0].weights):
            table.add_column(Text(visible(name)))
        for line in cells(episode):
            table.add_row(*(Text(visible(cut(text, WIDEST))) for text in line))
        console.print(table)
    console.print(by_turn(result), markup=False)
    console.print(NOTE, style="dim", markup=False)


def write_episodes(folder: Path, result: EpisodesResult, *, shown: int, html: bool) -> None:
    """Write credit.json, and credit.html with the first ``shown`` episodes if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / "credit.json", to_json(asdict(result), indent=1) + "\n")
    if html:
        cards = [
            asdict(episode) | {"reward": short(episode.reward), "good": episode.reward > 0, "cells": cells(episode)}
            for episode in result.episodes[:shown]
        ]
        write_html(
            folder / "credit.html",
            "tools/lab/episodes.html",
            title=f"{result.title}: credit of turns",
            facts=result.facts,
            header=[*HEADING, *result.episodes[0].turns[0].weights],
            episodes=cards,
            notes=[by_turn(result), NOTE],
        )
