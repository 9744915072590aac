"""The seam between training and whatever draws its rollouts: the run's own sampler, an engine, or records.

A row is a list of ids to which turns are only ever appended: the prompt, what the policy writes in turn 0, perhaps what
an environment answers, what the policy writes in turn 1, and so on. ``rollout_of`` lays rows out as the arrays that are
trained on: ``Rollout.extent`` marks all that follows the prompt, ``Rollout.completion`` what the policy wrote of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from oarjax.types import Origin, Params, PromptBatch, Rollout


class RowId(NamedTuple):
    """Identify a turn: the iteration, the batch drawn in it (refills are further ones), row and turn."""

    iteration: int
    attempt: int
    row: int
    turn: int = 0


class Request(NamedTuple):
    """One turn to be drawn."""

    id: RowId
    tokens: Int32[np.ndarray, "n"]  # of the row so far
    prompt_length: int  # the first of them, which no turn wrote
    key: tuple[int, ...]  # words of the batch's key; the noise is that of ``fold_in(key, row)``
    max_new: int


class Turn(NamedTuple):
    """One turn as it was drawn."""

    id: RowId
    tokens: Int32[np.ndarray, "T"]  # the stop token included
    logps: Float[np.ndarray, "T"]  # under the distribution that was drawn from, after the filters
    versions: Int32[np.ndarray, "T"]  # iterations that the policy had learned from
    finish: Literal["stop", "length", "error"]
    whole_logps: Float[np.ndarray, "T"] | None = None  # before the filters; None: equal to ``logps``, or not known
    experts: Int[np.ndarray, "n L k"] | None = None  # chosen at each input of prompt and completion, if recorded
    teacher_logps: Float[np.ndarray, "T"] | None = None  # of another policy, if recorded
    observed: tuple[int, ...] = ()  # what an environment said since the row's turn before
    reward: float | None = None  # an environment's, for this turn; None: there is no environment
    state: str | None = None  # the environment's public attributes at its end, as JSON
    failed: str = ""  # why the environment did, where ``finish`` is error


class Batch(NamedTuple):
    """The first turns of ``group_size`` rows of every prompt."""

    prompts: PromptBatch  # numpy
    key: Key[Array, ""]
    iteration: int
    attempt: int
    group_size: int
    max_new: int

    @property
    def requests(self) -> list[Request]:
        """Return a request per row."""
        words = tuple(int(word) for word in np.asarray(jax.random.key_data(self.key)).reshape(-1))
        prompts = [ids[valid] for ids, valid in zip(np.asarray(self.prompts.tokens), np.asarray(self.prompts.valid))]
        return [
            Request(RowId(self.iteration, self.attempt, b), ids, len(ids), words, self.max_new)
            for b, ids in enumerate(ids for ids in prompts for _ in range(self.group_size))
        ]


class EndedRows(NamedTuple):
    """Completions that ended while others are still being drawn. The arrays hold all B rows, on the device or host."""

    rows: Int[np.ndarray, "r"]  # those that ended since the last report
    tokens: Int32[Array, "B T"]
    lengths: Int32[Array, "B"]
    ended: Bool[Array, "B"]
    turns: tuple[Turn, ...] = ()  # theirs, from sources that draw row by row


class Spent(NamedTuple):
    """Counts of draws that add up, and differences of which the largest stays."""

    steps: float = 0
    tokens: float = 0.0
    row_steps: float = 0  # rows in the batch, step by step
    attended: float = 0.0
    slots_read: float = 0  # slots of the rows' own caches, step by step
    redrawn: float = 0  # rows drawn again because the record of their batch was not complete
    syncing: float = 0.0  # seconds in which an engine was given weights and probed, or other devices were
    gap_mean: float = 0.0  # of the probe's log-probs: the engine's and our own, in nats
    gap_p99: float = 0.0
    gap_max: float = 0.0

    def plus(self, other: Spent) -> Spent:
        pairs = zip(self._fields, self, other)
        return Spent(*(max(a, b) if name.startswith("gap") else a + b for name, a, b in pairs))

    def metrics(self) -> dict[str, float]:
        """Return decode steps, the share of their rows that were unfinished, and that of empty slots read."""
        metrics = {"rows_redrawn": float(self.redrawn)} if self.redrawn else {}
        if self.syncing:
            metrics["sync_seconds"] = self.syncing
        if self.gap_max:
            gaps = {"sync_gap": self.gap_mean, "sync_gap/p99": self.gap_p99, "sync_gap/max": self.gap_max}
            metrics |= gaps
        if self.steps == 0:
            return {"decode_steps": 0.0, **metrics}
        return metrics | {
            "decode_steps": float(self.steps),
            "decode_occupancy": self.tokens / self.row_steps,
            "decode_padding": 1 - self.attended / self.slots_read,
        }


Report = Callable[[EndedRows], object]


@runtime_checkable
class Source(Protocol):
    """Draws turns."""

    @property
    def together(self) -> bool:
        """True if all rows of a batch are drawn together, the same ones at every attempt."""
        ...

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw a batch and return its turns in the order of their rows.

        Args:
            report: called with rows as they end, those that end last perhaps left out.
            rows: the only ones wanted, ascending; None: all. A source that draws rows together returns all of them.
        """
        ...

    def sync(self, params: Params, version: int) -> None:
        """Draw with these parameters from now on; ``version`` counts the iterations that they have learned from."""
        ...

    def spent(self) -> Spent:
        """Return the counts of the draws since the last call."""
        ...

    def close(self) -> None:
        """Let go of parameters and connections."""
        ...


@runtime_checkable
class Continuing(Source, Protocol):
    """Draws further turns, too."""

    def go_on(self, batch: Batch, requests: Sequence[Request]) -> list[Turn]:
        """Draw the next turn of some rows of a batch, in the order of the requests."""
        ...


def continuing(source: Source) -> Continuing:
    """Return a source that draws further turns.

    Raises:
        TypeError: this one does not.
    """
    if not isinstance(source, Continuing):
        raise TypeError(f"{type(source).__name__} draws single turns only")
    return source


class SamplerSource:
    """The run's own sampler, which draws a batch together.

    Args:
        sample: (params, prompts, key, report=) -> rollout.
        spent: returns the counts of its draws since the last call.
        prepare: training layout -> params as ``sample`` reads them.
        place, fetch: numpy -> device, laid out for the sampler; and back.
        sample_on: as ``sample``, a row per prompt, for rows that go on; None: single turns only.
        row_number: (batch, row) -> the number in ``PromptBatch.problem`` by which ``sample_on`` finds the row's key.
    """

    together = True

    def __init__(
        self,
        sample: Callable[..., Rollout],
        spent: Callable[[], Spent],
        prepare: Callable[[Params], Params],
        place: Callable[[Any], Any],
        fetch: Callable[[Any], Any],
        sample_on: Callable[..., Rollout] | None = None,
        row_number: Callable[[Batch, int], int] = lambda batch, row: row,
    ) -> None:
        self._sample, self._prepare, self._place, self._fetch = sample, prepare, place, fetch
        self._sample_on, self._row_number = sample_on, row_number
        self.spent = spent
        self._params, self._prepared, self._version = None, None, 0

    def sync(self, params: Params, version: int) -> None:
        """Draw with these parameters from now on; they are prepared once something is drawn."""
        self._params, self._prepared, self._version = params, None, version

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw all rows of a batch."""
        options = {"report": report} if report else {}
        rollout = self._fetch(self._sample(self._ready(), self._place(batch.prompts), batch.key, **options))
        return turns_of(batch, rollout, version=self._version)

    def go_on(self, batch: Batch, requests: Sequence[Request]) -> list[Turn]:
        """Draw the next turns of rows, which are computed again from their prompts on."""
        if self._sample_on is None:
            raise ValueError("SamplerSource: expected sample_on, to draw further turns")
        numbers = [self._row_number(batch, row) for row in range(len(batch.requests))]
        prompts = rows_so_far(batch, requests, numbers)
        words, kind = np.asarray(jax.random.key_data(batch.key)), jax.random.key_impl(batch.key)
        key = jax.random.wrap_key_data(
            jax.numpy.asarray(words), impl=kind
        )  # it is the training mesh's, the prompts are the sampler's
        rollout = self._fetch(self._sample_on(self._ready(), self._place(prompts), key))
        return [turn_of_row(rollout, request.id, version=self._version) for request in requests]

    def _ready(self) -> Any:
        if self._prepared is None:
            self._prepared = self._prepare(self._params)
        return self._prepared

    def close(self) -> None:
        """Free the parameters."""
        self._params = self._prepared = None


def turns_of(batch: Batch, rollout: Rollout, *, version: int) -> list[Turn]:
    """Take a rollout of single turns apart; all arrays are numpy."""
    ids = (RowId(batch.iteration, batch.attempt, b) for b in range(len(rollout.ended)))
    return [turn_of_row(rollout, id, version=version) for id in ids]


def turn_of_row(rollout: Rollout, id: RowId, *, version: int) -> Turn:
    """Take a row's last turn out of a rollout, in which all before it counts as prompt; all arrays are numpy."""
    b, width = id.row, rollout.tokens.shape[1] - rollout.completion.shape[1]
    extent = np.asarray(rollout.extent[b])
    logps, whole_logps = (np.asarray(x[b])[extent] for x in (rollout.filtered_logps, rollout.behaviour_logps))
    return Turn(
        id,
        np.asarray(rollout.tokens[b, width:])[extent],
        logps,
        np.full(len(logps), version, np.int32),
        "stop" if rollout.ended[b] else "length",
        None if np.array_equal(logps, whole_logps, equal_nan=True) else whole_logps,
        None if rollout.experts is None else np.asarray(rollout.experts[b])[np.asarray(rollout.valid[b])],
    )


SHORT = 128
"""Tokens below which it does not pay to compute rows that go on in several widths."""


def widths_of_rows(max_new: int) -> list[int]:
    """List the positions beyond the prompts' of rows that go on: a quarter, half or all of ``max_new``, so that
    programs are few.
    """
    return [size for size in (max_new // 4, max_new // 2) if size >= SHORT] + [max_new]


def rows_so_far(batch: Batch, requests: Sequence[Request], numbers: Sequence[int]) -> PromptBatch:
    """Lay out the rows of a batch that go on as prompts, [B]; the others are one token, after which they are full.

    Their widths are the prompts' and one of ``widths_of_rows``.
    """
    width, T = np.shape(batch.prompts.tokens)[1], batch.max_new
    longest = max((len(request.tokens) - request.prompt_length for request in requests), default=0)
    width += next(size for size in widths_of_rows(T) if size >= longest)
    tokens, valid = np.zeros((len(numbers), width), np.int32), np.zeros((len(numbers), width), bool)
    written = np.full(len(numbers), T - 1, np.int32)
    valid[:, -1] = True
    for request in requests:
        at = slice(width - len(request.tokens), width)
        tokens[request.id.row, at], valid[request.id.row, at] = request.tokens, True
        written[request.id.row] = len(request.tokens) - request.prompt_length
    return PromptBatch(tokens, valid, np.asarray(numbers, np.int32), written)  # pyright: ignore[reportArgumentType]


def requested(batch: Batch, turns: Sequence[Turn]) -> list[tuple[Request, Turn]]:
    """Put beside every turn what it answered: the row's prompt, its earlier turns, and what was said between them.

    Raises:
        ValueError: a row has no turn, or not all up to its last.
    """
    rows, pairs = dict(enumerate(batch.requests)), []
    for turn in sorted(turns, key=lambda turn: turn.id):
        expected = rows[turn.id.row]
        if turn.id.turn != expected.id.turn:
            raise ValueError(f"{turn.id}: expected the row's turn {expected.id.turn}")
        context = np.concatenate([expected.tokens, np.asarray(turn.observed, np.int32)])
        request = expected._replace(tokens=context)
        pairs.append((request, turn))
        tokens = np.concatenate([context, turn.tokens])
        rows[turn.id.row] = request._replace(id=turn.id._replace(turn=turn.id.turn + 1), tokens=tokens)
    return pairs


def rollout_of(batch: Batch, pairs: Sequence[tuple[Request, Turn]], *, pad_id: int) -> Rollout:
    """Lay the turns of a batch's rows out as arrays, ``batch.max_new`` positions after the prompts.

    Between two turns of a row stand the ids that the later request adds; the policy did not write them.

    Raises:
        ValueError: a request does not continue its row, or a row is too long or has no turn.
    """
    tokens, valid = (
        np.repeat(np.asarray(x), batch.group_size, axis=0) for x in (batch.prompts.tokens, batch.prompts.valid)
    )
    count, T = len(tokens), batch.max_new
    ids, completion = np.full((count, T), pad_id, np.int32), np.zeros((count, T), bool)
    whole_logps, logps = np.zeros((2, count, T), np.float32)
    turns, versions = np.zeros((count, T), np.int32), np.full((count, T), -1, np.int32)
    ended, lengths, experts = np.zeros(count, bool), np.zeros(count, np.int32), None
    teacher = np.zeros((count, T), np.float32) if any(turn.teacher_logps is not None for _, turn in pairs) else None
    rewards, failed, states = np.zeros((count, T), np.float32), np.full(count, "", object), np.full(count, None)
    plays = any(turn.reward is not None for _, turn in pairs)
    for request, turn in sorted(pairs, key=lambda pair: pair[0].id):
        b, prompt, length = request.id.row, request.prompt_length, lengths[request.id.row]
        start, stop = len(request.tokens) - prompt, len(request.tokens) - prompt + len(turn.tokens)
        if start < length or not np.array_equal(request.tokens[prompt : prompt + length], ids[b, :length]):
            raise ValueError(f"{request.id}: the request does not continue its row; ids are only ever appended")
        if stop > T:
            raise ValueError(f"{request.id}: {stop} ids after the prompt, room for {T}")
        span = slice(start, stop)
        ids[b, length:start], ids[b, span], completion[b, span] = request.tokens[prompt + length :], turn.tokens, True
        logps[b, span], whole_logps[b, span] = turn.logps, turn.logps if turn.whole_logps is None else turn.whole_logps
        turns[b, length:stop], versions[b, span] = request.id.turn, turn.versions
        lengths[b], ended[b] = stop, turn.finish != "length"
        failed[b] = turn.failed
        rewards[b, stop - 1], states[b] = turn.reward or 0, turn.state
        if teacher is not None:
            teacher[b, span] = 0 if turn.teacher_logps is None else turn.teacher_logps
        if turn.experts is not None:
            if experts is None:
                experts = np.zeros((count, tokens.shape[1] + T, *turn.experts.shape[1:]), turn.experts.dtype)
            at = tokens.shape[1] - prompt
            experts[b, at : at + len(turn.experts)] = turn.experts
    if missing_rows := set(range(count)) - {request.id.row for request, _ in pairs}:
        raise ValueError(f"rows {sorted(missing_rows)} of {count} have no turn")
    episode = (batch.attempt * count + np.arange(count)).astype(np.int32)
    return Rollout(
        tokens=np.concatenate([tokens, ids], axis=1),  # pyright: ignore[reportArgumentType]
        valid=np.concatenate([valid, np.arange(T) < lengths[:, None]], axis=1),  # pyright: ignore[reportArgumentType]
        completion=completion,  # pyright: ignore[reportArgumentType]
        behaviour_logps=whole_logps,  # pyright: ignore[reportArgumentType]
        filtered_logps=logps,  # pyright: ignore[reportArgumentType]
        ended=ended,  # pyright: ignore[reportArgumentType]
        experts=experts,  # pyright: ignore[reportArgumentType]
        teacher_logps=teacher,  # pyright: ignore[reportArgumentType]
        origin=Origin(turns, versions, episode, *((rewards, failed, states) if plays else ())),  # pyright: ignore[reportArgumentType]
    )
