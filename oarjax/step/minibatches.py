"""From the rollouts of an iteration to the minibatches that are scored and trained on. Numpy, on the host.

Rows are divided into k minibatches of M microbatches of b rows, the used ones first. Within a minibatch they are
sorted by length, never across, and every microbatch has its own bucket: the prompt and completion positions that its
longest rows need. Device programs take the whole minibatch and cut microbatches to a bucket, so there is one
compilation per bucket; leaving rows out (groups of equal rewards) saves work and never recompiles.

With ``prompt_rows`` of s, rows are sorted in units of s rows of one group, neighbours in length, so that scores and
updates compute the prompt of a unit once. A unit is padded to its longest row: few rows of similar length pad less,
many save more of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import ArrayLike

from oarjax.config.inputs import DataConfig
from oarjax.config.learning import RolloutConfig
from oarjax.types import AnswerSpan, Evidence, Grades, Privileged, Rollout


def bucket(length: int, step: int, limit: int | None = None) -> int:
    """Return the smallest multiple of ``step`` that holds ``length``, at most ``limit``."""
    size = -(-max(length, 1) // step) * step
    return size if limit is None else min(limit, size)


def widest_prompt(data: DataConfig, rollout: RolloutConfig) -> int:
    """Return the positions that the longest prompt of a config is padded to."""
    return bucket(data.max_prompt, rollout.prompt_bucket)


def prompt_buckets(step: int, limit: int) -> list[int]:
    """Return ``step`` times 1, 2, 3, 4, 6, 8, 12, 16, 24 ... below ``limit``, and the limit."""
    return _buckets(step, limit, per_doubling=2)


def completion_buckets(step: int, limit: int) -> list[int]:
    """Return ``step`` times 1 to 8, 10, 12, 14, 16, 20 ... below ``limit``, and the limit: most positions are there."""
    return _buckets(step, limit, per_doubling=4)


def _buckets(step: int, limit: int, *, per_doubling: int) -> list[int]:
    """Return multiples of ``step`` below ``limit``, so many between a size and its double, and the limit."""
    sizes, multiple = [], 1
    while multiple * step < limit:
        sizes.append(multiple * step)
        multiple += max(2 ** (multiple.bit_length() - 1) // per_doubling, 1)
    return [*sizes, limit]


class Bucket(NamedTuple):
    """Positions that a microbatch is padded to."""

    prompt: int
    completion: int
    prompt_rows: int = 1  # rows that follow one another with the same prompt, which is computed once for them


class Piece(NamedTuple):
    """Consecutive microbatches of one bucket: ``start`` .. ``stop`` - 1 of a minibatch."""

    bucket: Bucket | None  # None: as wide as the arrays are
    start: np.integer[Any] | int
    stop: np.integer[Any] | int

    @property
    def microbatches(self) -> int:
        return int(self.stop) - int(self.start)


def cut(tree: Any, bucket: Bucket | None, *, length: int, room: int = 0) -> Any:
    """Cut the [b, S + T] and [b, T] arrays of a microbatch to a bucket, T = length + room positions of completion.

    Prompts lose columns on the left, completions on the right and never the ``room`` that is added to every bucket.
    A teacher's prompts stay as wide as they are.
    """
    if bucket is None:
        return tree

    def columns(x: Any) -> Any:
        if isinstance(x, Privileged) or x.ndim < 2:
            return x
        prompt = x.shape[1] - length - room
        return x[:, max(prompt - bucket.prompt, 0) : prompt + bucket.completion + room]

    return jax.tree.map(columns, tree, is_leaf=lambda x: isinstance(x, Privileged))


def sizes_of(rollout: Rollout, *, prompt_bucket: int, completion_bucket: int) -> Int[np.ndarray, "B 2"]:
    """Return the bucket of every row: positions of its prompt and of its completion."""
    steps = {"prompt_bucket": prompt_bucket, "completion_bucket": completion_bucket}
    return row_sizes(np.asarray(rollout.valid), length=rollout.completion.shape[1], **steps)


def row_sizes(
    valid: Bool[np.ndarray, "B N"], *, length: int, prompt_bucket: int, completion_bucket: int
) -> Int[np.ndarray, "B 2"]:
    """Return every row's bucket, from its real tokens; completions have the last ``length`` of N positions."""
    width = valid.shape[1] - length
    tokens = np.stack([valid[:, :width].sum(1), valid[:, width:].sum(1)], 1)
    limits = [prompt_buckets(prompt_bucket, width), completion_buckets(completion_bucket, length)]
    return np.stack([padded(n, sizes) for n, sizes in zip(tokens.T, limits)], 1)


def padded(lengths: ArrayLike, sizes: Sequence[int]) -> Int[np.ndarray, "R"]:
    """Return for every length the smallest of rising ``sizes`` that holds it; none may exceed the last."""
    return np.asarray(sizes)[np.searchsorted(sizes, lengths)]


def widen(rollout: Rollout, width: int) -> Rollout:
    """Pad prompts on the left to ``width`` positions, so that arrays have one shape whatever the batch of prompts."""
    columns = max(width - (rollout.tokens.shape[1] - rollout.completion.shape[1]), 0)

    return replace(rollout, **{name: _left_padded(vars(rollout)[name], columns) for name in WHOLE_ROWS})


WHOLE_ROWS = ("tokens", "valid", "experts")
"""Arrays of a rollout that have the prompt's columns, too."""


def _left_padded(x: Any, columns: int) -> Any:
    """Put so many columns of zeros before [B, N ...]; None stays None."""
    return None if x is None else np.pad(np.asarray(x), ((0, 0), (columns, 0), *[(0, 0)] * (np.ndim(x) - 2)))


def trim(rollout: Rollout, span: AnswerSpan, rows: Int[np.ndarray, "R"], *, length: int) -> tuple[Rollout, AnswerSpan]:
    """Cut the completion axis to its first ``length`` positions, which hold every token of the chosen rows.

    Raises:
        ValueError: one of these completions is longer than ``length``.
    """
    surplus = rollout.completion.shape[1] - length
    if surplus == 0:
        return rollout, span
    if rollout.extent[rows, length:].any():
        raise ValueError(f"trim: completions reach {rollout.extent[rows].sum(1).max()} tokens, more than {length}")
    end = rollout.tokens.shape[1] - surplus
    trimmed = replace(
        rollout,
        tokens=rollout.tokens[:, :end],
        valid=rollout.valid[:, :end],
        experts=None if rollout.experts is None else rollout.experts[:, :end],
        completion=rollout.completion[:, :length],
        behaviour_logps=rollout.behaviour_logps[:, :length],
        filtered_logps=rollout.filtered_logps[:, :length],
        teacher_logps=None if rollout.teacher_logps is None else rollout.teacher_logps[:, :length],
        origin=None,
    )
    units = None if span.units is None else span.units[:, :length]
    return trimmed, replace(span, reasoning=span.reasoning[:, :length], answer=span.answer[:, :length], units=units)


def join(rollouts: list[Rollout]) -> Rollout:
    """Join rollouts of several prompt batches; shorter prompts get more left padding."""
    width = max(r.tokens.shape[1] for r in rollouts)

    def join_field(name: str) -> Any:
        parts = [vars(r)[name] for r in rollouts]
        if name in WHOLE_ROWS:
            parts = [_left_padded(x, width - r.tokens.shape[1]) for x, r in zip(parts, rollouts)]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)  # None stays None

    return Rollout(**{name: join_field(name) for name in vars(rollouts[0])})  # pyright: ignore[reportArgumentType]


def join_grades(parts: list[Grades], rows: np.ndarray) -> Grades:
    """Join the grades of several draws, and take the chosen rows."""
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
    """Take the chosen rows of every array in a tree."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], tree)


class MinibatchPlan(NamedTuple):
    """Division of an iteration's rows into optimizer updates: row i of ``rows`` goes to minibatch i % k."""

    rows: Int[np.ndarray, "R"]  # indices of the rows to train on
    minibatches: int
    microbatch: int
    capacity: int  # rows that all minibatches hold together; fixes the shapes
    sizes: Int[np.ndarray, "B 2"] | None = None  # every row's bucket, to sort by; None: in order and uncut
    prompt_rows: int = 1  # rows of a unit, which share the pass over their prompt
    group_size: int = 1

    def split(self, tree: Any) -> list[Any]:
        """Return one tree of [M, b, ...] arrays per minibatch from [B, ...] arrays; missing rows are zeros (False).

        Raises:
            ValueError: more rows than the capacity, or a capacity that the shapes do not divide.
        """
        room, remainder = divmod(self.capacity, self.minibatches)
        if remainder or room % self.microbatch:
            raise ValueError(
                f"split: {self.capacity} rows do not divide into {self.minibatches} minibatches "
                f"of microbatches of {self.microbatch} rows"
            )
        if len(self.rows) > self.capacity:
            raise ValueError(f"split: {len(self.rows)} rows chosen, room for {self.capacity}")

        def to_microbatches(x: Any, rows: np.ndarray) -> np.ndarray:
            values = np.asarray(x)[rows]
            out = np.zeros((room, *values.shape[1:]), values.dtype)
            out[: len(values)] = values
            return out.reshape(-1, self.microbatch, *values.shape[1:])

        return [jax.tree.map(partial(to_microbatches, rows=rows), tree) for rows in self.chosen]

    def collect(self, minibatches: list[Any], like: np.ndarray) -> np.ndarray:
        """Put the [M, b, T] values of every minibatch back into their rows of a copy of ``like`` [B, T]."""
        out = np.array(like)
        for rows, x in zip(self.chosen, minibatches):
            values = np.asarray(x).reshape(-1, *np.shape(x)[2:])[: len(rows)]
            out[rows, : values.shape[1]] = values
        return out

    @property
    def chosen(self) -> list[Int[np.ndarray, "r"]]:
        """Rows of each minibatch, in the order of its microbatches: by completion, then by prompt."""
        parts = [self.rows[k :: self.minibatches] for k in range(self.minibatches)]
        if self.sizes is None:
            return parts
        return [self._sorted(rows, self.sizes) for rows in parts]

    def _sorted(self, rows: Int[np.ndarray, "r"], sizes: Int[np.ndarray, "B 2"]) -> Int[np.ndarray, "r"]:
        """Sort the units of a minibatch's rows by the bucket of each.

        Raises:
            ValueError: units do not divide the rows that a group has here.
        """
        groups = rows // self.group_size
        if self.prompt_rows > 1:
            rows = rows[np.lexsort((sizes[rows, 1], groups))]
        if (np.unique(groups, return_counts=True)[1] % self.prompt_rows).any():
            raise ValueError(f"prompt_rows: {self.prompt_rows} does not divide the rows of every group; use 1")
        units = rows.reshape(-1, self.prompt_rows)
        return units[np.lexsort(sizes[units].max(1).T)].reshape(-1)

    @property
    def used(self) -> list[np.ndarray]:
        """Number of microbatches of each minibatch that hold a row."""
        return [np.asarray(-(-len(rows) // self.microbatch), np.int32) for rows in self.chosen]

    @property
    def pieces(self) -> list[tuple[Piece, ...]]:
        """The microbatches of each minibatch that hold a row, those of one bucket together."""
        return [self._pieces(rows) for rows in self.chosen]

    def _pieces(self, rows: Int[np.ndarray, "r"]) -> tuple[Piece, ...]:
        firsts = range(0, len(rows), self.microbatch)
        if self.sizes is None or not len(rows):  # without rows one empty piece, for zeros of the right shape
            size = None if self.sizes is None else Bucket(*self.sizes.min(0).tolist())
            return (Piece(size and size._replace(prompt_rows=self.prompt_rows), np.int32(0), np.int32(len(firsts))),)
        longest = [self.sizes[rows[i : i + self.microbatch]].max(0).tolist() for i in firsts]
        microbatch_buckets = [Bucket(prompt, completion, self.prompt_rows) for prompt, completion in longest]
        starts = [i for i, b in enumerate(microbatch_buckets) if i == 0 or b != microbatch_buckets[i - 1]]
        stops = [*starts[1:], len(microbatch_buckets)]
        return tuple(Piece(microbatch_buckets[i], np.int32(i), np.int32(j)) for i, j in zip(starts, stops))


def padding_share(plan: MinibatchPlan, rollout: Rollout, times: Sequence[int]) -> float:
    """Return the share of padding among the positions that are computed, minibatch k so many times.

    The prompt that several rows share is computed once.
    """
    length = rollout.completion.shape[1]
    width = rollout.tokens.shape[1] - length
    positions = tokens = 0.0
    for rows, pieces, n in zip(plan.chosen, plan.pieces, times, strict=True):
        for piece in pieces:
            prompt, completion, _ = piece.bucket or (width, length, 1)
            positions += n * piece.microbatches * plan.microbatch * (prompt / plan.prompt_rows + completion)
        valid = np.asarray(rollout.valid)[rows]
        tokens += n * float(valid[:, :width].sum() / plan.prompt_rows + valid[:, width:].sum())
    return 1 - tokens / positions if positions else 0.0


def trim_evidence(evidence: Evidence) -> Evidence:
    """Cut the columns of a fetched minibatch that no row of it fills."""
    e, (M, b) = evidence, evidence.numbers.shape
    length = e.rollout.completion.shape[-1]
    prompt = e.rollout.tokens.shape[-1] - length
    prompt_columns = np.flatnonzero(np.asarray(e.rollout.valid)[..., :prompt].any((0, 1)))
    completion_columns = np.flatnonzero(np.asarray(e.rollout.extent).any((0, 1)))
    smallest = Bucket(prompt - int(prompt_columns.min(initial=prompt - 1)), 1 + int(completion_columns.max(initial=0)))

    def narrow(tree: Any, room: int = 0) -> Any:
        flat = jax.tree.map(lambda x: np.asarray(x).reshape(M * b, *np.shape(x)[2:]), tree)
        part = cut(flat, smallest, length=length, room=room)
        return jax.tree.map(lambda x: x.reshape(M, b, *x.shape[1:]), part)

    rollout, span, scores, completion, weights = narrow((e.rollout, e.span, e.scores, e.completion, e.weights))
    probed = e.probed and narrow(e.probed, e.probed[0].completion.shape[-1] - length)
    fields = {"rollout": rollout, "span": span, "scores": scores, "completion": completion, "weights": weights}
    return replace(e, **fields, probed=probed, hints=narrow(e.hints))


def informative_first(constant: Bool[np.ndarray, "Q"], *, prompts: int, group_size: int) -> Int[np.ndarray, "B"]:
    """Return the rows of ``prompts`` groups out of Q drawn: those with unequal rewards first, in drawing order."""
    groups = np.argsort(constant, kind="stable")[:prompts]
    return (np.sort(groups)[:, None] * group_size + np.arange(group_size)).reshape(-1)
