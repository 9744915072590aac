"""From the rollouts of an iteration to the minibatches that are scored and trained on. Numpy, on the host.

The device programs have one shape per completion bucket: rows are divided into k minibatches of M microbatches of b
rows, the used ones first, and a traced count says how many microbatches are worth running. So leaving rows
out (groups of equal rewards) saves work and never compiles anything anew.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from oarjax.types import AnswerSpan, Grades, Rollout


def bucket(length: int, step: int, limit: int) -> int:
    """The smallest multiple of ``step`` that holds ``length``, at most ``limit``."""
    return min(limit, -(-max(length, 1) // step) * step)


def trim(rollout: Rollout, span: AnswerSpan, rows: Int[np.ndarray, "R"], *, length: int) -> tuple[Rollout, AnswerSpan]:
    """Cut the completion axis to its first ``length`` positions, which hold every token of the chosen rows.

    Raises:
        ValueError: one of these completions is longer than ``length``.
    """
    cut = rollout.completion.shape[1] - length
    if cut == 0:
        return rollout, span
    if rollout.completion[rows, length:].any():
        raise ValueError(f"trim: completions reach {rollout.completion[rows].sum(1).max()} tokens, more than {length}")
    end = rollout.tokens.shape[1] - cut
    short = replace(
        rollout,
        tokens=rollout.tokens[:, :end],
        valid=rollout.valid[:, :end],
        completion=rollout.completion[:, :length],
        behaviour_logps=rollout.behaviour_logps[:, :length],
        filtered_logps=rollout.filtered_logps[:, :length],
    )
    units = None if span.units is None else span.units[:, :length]
    return short, replace(span, reasoning=span.reasoning[:, :length], answer=span.answer[:, :length], units=units)


def join(rollouts: list[Rollout]) -> Rollout:
    """Rollouts of several prompt batches as one; shorter prompts get more left padding."""
    width = max(r.tokens.shape[1] for r in rollouts)

    def joined(name: str) -> np.ndarray:
        parts = [np.asarray(vars(r)[name]) for r in rollouts]
        if name in ("tokens", "valid"):
            parts = [np.pad(x, ((0, 0), (width - x.shape[1], 0))) for x in parts]
        return np.concatenate(parts)

    return Rollout(**{name: joined(name) for name in vars(rollouts[0])})  # pyright: ignore[reportArgumentType]


def join_grades(parts: list[Grades], rows: np.ndarray) -> Grades:
    """Grades of several draws as one, and of these the chosen rows."""
    verdicts = [v for g in parts for v in g.verdicts]
    answers = [a for g in parts for a in g.answers]
    notes = [n for g in parts for n in g.notes]
    return Grades(
        rewards=np.concatenate([g.rewards for g in parts])[rows],
        per_reward={n: np.concatenate([g.per_reward[n] for g in parts])[rows] for n in parts[0].per_reward},
        verdicts=[verdicts[i] for i in rows],
        answers=[answers[i] for i in rows],
        notes=[notes[i] for i in rows],
    )


def take(tree: Any, rows: Int[np.ndarray, "R"]) -> Any:
    """The chosen rows of every array in a tree."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], tree)


class MinibatchPlan(NamedTuple):
    """How the rows of an iteration are divided into optimizer updates: row i of ``rows`` goes to minibatch i % k."""

    rows: Int[np.ndarray, "R"]  # indices of the rows to train on
    minibatches: int
    microbatch: int
    capacity: int  # rows that all minibatches hold together; fixes the shapes

    def split(self, tree: Any) -> list[Any]:
        """Return one tree of [M, b, ...] arrays per minibatch from [B, ...] arrays; missing rows are zeros (False).

        Raises:
            ValueError: more rows than the capacity, or a capacity that the shapes do not divide.
        """
        room, left = divmod(self.capacity, self.minibatches)
        if left or room % self.microbatch:
            raise ValueError(
                f"split: {self.capacity} rows do not divide into {self.minibatches} minibatches "
                f"of microbatches of {self.microbatch} rows"
            )
        if len(self.rows) > self.capacity:
            raise ValueError(f"split: {len(self.rows)} rows chosen, room for {self.capacity}")

        def padded(x: Any, rows: np.ndarray) -> np.ndarray:
            values = np.asarray(x)[rows]
            out = np.zeros((room, *values.shape[1:]), values.dtype)
            out[: len(values)] = values
            return out.reshape(-1, self.microbatch, *values.shape[1:])

        return [jax.tree.map(partial(padded, rows=rows), tree) for rows in self.chosen]

    def collect(self, minibatches: list[Any], like: np.ndarray) -> np.ndarray:
        """Put the [M, b, T] values of every minibatch back into their rows of a copy of ``like`` [B, T]."""
        out = np.array(like)
        for rows, x in zip(self.chosen, minibatches):
            values = np.asarray(x).reshape(-1, *np.shape(x)[2:])[: len(rows)]
            out[rows, : values.shape[1]] = values
        return out

    @property
    def chosen(self) -> list[Int[np.ndarray, "r"]]:
        """Rows of each minibatch, in its order."""
        return [self.rows[k :: self.minibatches] for k in range(self.minibatches)]

    @property
    def used(self) -> list[np.ndarray]:
        """Number of microbatches of each minibatch that hold a row."""
        return [np.asarray(-(-len(rows) // self.microbatch), np.int32) for rows in self.chosen]


def informative_first(constant: Bool[np.ndarray, "Q"], *, prompts: int, group_size: int) -> Int[np.ndarray, "B"]:
    """Rows of the ``prompts`` groups to keep out of Q drawn: those with unequal rewards first, in drawing order."""
    groups = np.argsort(constant, kind="stable")[:prompts]
    return (np.sort(groups)[:, None] * group_size + np.arange(group_size)).reshape(-1)
