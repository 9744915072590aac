"""Grade a rollout while the devices compute; rows that end early while the others are still decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from oarjax.config.learning import EnvironmentConfig, GradingConfig, RolloutConfig
from oarjax.credit.settings import AnswerSettings
from oarjax.data.problems import Problem
from oarjax.data.tokenizer import text_of
from oarjax.environments.player import Player
from oarjax.environments.pool import Environments
from oarjax.grading.grader import Grader
from oarjax.grading.recorded import Grading
from oarjax.grading.rewards import Sample, calls_of, wants_ids
from oarjax.rl.advantages import overlong_penalty
from oarjax.rollout.source import EndedRows
from oarjax.rollout.stop_strings import cut_text
from oarjax.sources.driven import DriverLink
from oarjax.step.minibatches import join_grades
from oarjax.system.processes import gather_grades, share, values_here
from oarjax.types import Grades, Rollout, Verdict


def grader_of(grading: GradingConfig, answer: AnswerSettings) -> Grader:
    """Make the grader that a config asks for."""
    return Grader(
        tuple((r.name, r.weight) for r in grading.rewards),
        settings={r.name: r.settings for r in grading.rewards if r.settings},
        plugins=grading.plugins,
        workers=grading.workers,
        deadline=grading.deadline,
        call_deadline=grading.call_deadline,
        concurrency=grading.concurrency,
        memory_mb=grading.memory_mb,
        style="boxed" if answer.style == "none" else answer.style,
        pattern=answer.pattern,
    )


def open_environments(
    environment: EnvironmentConfig | None, grading: GradingConfig, tokenizer: str
) -> Environments | DriverLink | None:
    """Start the processes that play a run's environment; ``tokenizer``: folder or name of the policy's.

    Raises:
        ConfigError: rollout.environment names no environment.
    """
    if environment is None:
        return None
    if environment.taskset is not None:
        return DriverLink(Player(environment, tokenizer))
    return start_environments(environment, grading).__enter__()


def start_environments(environment: EnvironmentConfig, grading: GradingConfig) -> Environments:
    """Make the processes that play a class of the user's; the caller starts and closes them.

    Raises:
        ConfigError: rollout.environment names no environment.
    """
    return Environments(
        environment.name,
        environment.settings,
        workers=grading.workers,
        deadline=environment.deadline,
        memory_mb=grading.memory_mb,
        field="rollout.environment.name",
    )


class RolloutGrading:
    """Grade one process's share of a rollout.

    The rows submitted together depend on the draw alone, never on a clock, so a resumed run submits the same and finds
    their verdicts recorded.

    Args:
        problems: of all rows of the rollout.
        table: the bytes of every token id.
        group: rows per prompt.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        grading: GradingConfig,
        grader: Grading,
        problems: Sequence[Problem],
        table: Sequence[bytes],
        *,
        group: int,
    ):
        self._rollout, self._grading, self._grader = rollout, grading, grader
        self._problems, self._table, self._group = problems, table, group
        self._together = any(calls_of(r.name) != "sample" for r in grading.rewards)
        self._ids = any(wants_ids(r.name) for r in grading.rewards)
        self._share = share(len(problems))
        self._submitted: list[tuple[Int[np.ndarray, "r"], Future[Grades]]] = []

    def report(self, news: EndedRows) -> None:
        """Start grading rows that ended: those of this process's share that its own devices hold.

        Rewards that see a group or a batch wait for all of it.
        """
        if self._together:
            return
        rows, (tokens, lengths, ended) = values_here(
            (news.tokens, news.lengths, news.ended), np.intersect1d(news.rows, self._share)
        )
        if len(rows):
            ids = [row[:length].tolist() for row, length in zip(tokens, lengths)]
            self._submit(rows, [[row] for row in ids], ended.tolist())

    def rest(self, rollout: Rollout) -> Callable[[], Grades]:
        """Start grading the other rows; calling the result waits for the grades of all rows of all processes.

        The overlong penalty is subtracted from the rewards.
        """
        early_rows = [rows for rows, _ in self._submitted]
        other_rows = np.setdiff1d(self._share, np.concatenate(early_rows)) if early_rows else self._share
        if len(other_rows) or not early_rows:
            turns, played = written_turns(rollout), list(zip(turn_rewards(rollout), last_states(rollout), strict=True))
            ended = np.asarray(rollout.ended)[other_rows].tolist()
            self._submit(other_rows, [turns[b] for b in other_rows], ended, [played[b] for b in other_rows])
        lengths = np.asarray(rollout.extent).sum(1)

        @cache  # called more than once, and all processes must gather equally often
        def wait() -> Grades:
            return self._penalised(without_failed(gather_grades(self._mine()), rollout), lengths)

        return wait

    def _submit(
        self,
        rows: Int[np.ndarray, "r"],
        turns: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[bool],
        played: Sequence[tuple[Sequence[float], dict[str, Any] | None]] = (),
    ) -> None:
        samples = [
            Sample(
                prompt=self._problems[b].prompt,
                completion="\n".join(cut_text(text_of(ids, self._table), self._rollout.stop) for ids in row_turns),
                answer=self._problems[b].reference,
                ended=bool(has_ended),
                tokens=sum(map(len, row_turns)),
                columns=self._problems[b].columns,
                group=int(b) // self._group,
                limit=self._rollout.max_new,
                chat=self._problems[b].chat,
                rewards=self._problems[b].rewards,
                completion_ids=[i for ids in row_turns for i in ids] if self._ids else (),
                turn_rewards=gains,
                environment=state,
            )
            for b, row_turns, has_ended, (gains, state) in zip(
                rows, turns, ended, played or [((), None)] * len(rows), strict=True
            )
        ]
        self._submitted.append((rows, self._grader.submit(samples)))

    def _mine(self) -> Grades:
        """Wait for the grades of this process's share, in the order of its rows."""
        parts = [future.result() for _, future in self._submitted]
        order = np.argsort(np.concatenate([rows for rows, _ in self._submitted]))
        return join_grades(parts, order)

    def _penalised(self, grades: Grades, lengths: Int[np.ndarray, "B"]) -> Grades:
        window = self._grading.overlong_window
        if window == 0:
            return grades
        penalty = np.asarray(
            overlong_penalty(
                jnp.asarray(lengths),
                max_length=self._rollout.max_new,
                window=window,
                penalty=self._grading.overlong_penalty,
            ),
            np.float32,
        )
        return replace(grades, rewards=grades.rewards - penalty, per_reward={**grades.per_reward, "overlong": -penalty})


def written_turns(rollout: Rollout) -> list[list[list[int]]]:
    """Return the ids that the policy wrote in each turn of every row."""
    completion = np.asarray(rollout.completion)
    ids = np.asarray(rollout.tokens)[:, -completion.shape[1] :]
    turns = np.zeros(ids.shape, int) if rollout.origin is None else np.asarray(rollout.origin.turns)
    return [
        [row[mask & (number == k)].tolist() for k in range(1 + int(number[mask].max(initial=0)))]
        for row, mask, number in zip(ids, completion, turns)
    ]


def turn_rewards(rollout: Rollout) -> list[list[float]]:
    """Return what environments gave for each turn of every row; nothing where there are none."""
    if rollout.origin is None or rollout.origin.rewards is None:
        return [[] for _ in rollout.ended]
    gains, extent = np.asarray(rollout.origin.rewards), np.asarray(rollout.extent)
    turns = np.asarray(rollout.origin.turns)
    return [
        [float(gain[mask & (number == k)].sum()) for k in range(1 + int(number[mask].max(initial=0)))]
        for gain, mask, number in zip(gains, extent, turns)
    ]


def last_states(rollout: Rollout) -> list[dict[str, Any] | None]:
    """Return the public attributes of every row's environment at its end; None without one."""
    if rollout.origin is None or rollout.origin.states is None:
        return [None] * len(rollout.ended)
    return [None if state is None else json.loads(state) for state in rollout.origin.states]


def without_failed(grades: Grades, rollout: Rollout) -> Grades:
    """Return grades without those of rows whose environment failed."""
    reasons = [] if rollout.origin is None or rollout.origin.failed is None else list(rollout.origin.failed)
    if not any(reasons):
        return grades
    failed, nan = np.array([bool(reason) for reason in reasons]), np.float32(np.nan)
    return replace(
        grades,
        rewards=np.where(failed, nan, grades.rewards),
        per_reward={name: np.where(failed, nan, values) for name, values in grades.per_reward.items()},
        verdicts=[_verdict_of(why) if why else verdict for why, verdict in zip(reasons, grades.verdicts)],
        notes=[f"the environment failed: {why}" if why else note for why, note in zip(reasons, grades.notes)],
    )


def _verdict_of(reason: str) -> Verdict:
    return "timeout" if reason.startswith("timeout") else "crash"
