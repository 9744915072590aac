"""Stream problems as batches of padded arrays.

Grain decides the order: a fresh shuffle every epoch, a function of the seed alone. Prompts that are too long are left
out. Every process builds the same whole batches and sends its devices their rows (``system.processes.to_devices``), so
neither order nor shape depends on the number of processes, no process runs out of rows before the others, and any
number of them can resume a saved position. A batch at the end of an epoch is filled from the next epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

import grain
import numpy as np
from jaxtyping import Bool, Int32
from transformers import PreTrainedTokenizerFast

from oarjax.data.mixture import MixedRows, check_position
from oarjax.data.problems import Problem
from oarjax.data.rows import DataError
from oarjax.data.tokenizer import encode, errors_at, render_prompt
from oarjax.types import PromptBatch


@dataclass(frozen=True)
class Encoded:
    """Problems within the length limit, with their ids; only SFT pairs have ``completions``."""

    problems: tuple[Problem, ...]
    prompts: tuple[list[int], ...]
    completions: tuple[list[int], ...]
    dropped: int  # number of problems left out because they are too long
    parts: tuple[int, ...] = ()  # problems of each data set of a mixture, in order; (): there is one
    observed: tuple[list[bool], ...] = ()  # ids of completions that an environment said; only of pairs with turns

    def __len__(self) -> int:
        return len(self.problems)

    @cached_property
    def part_of(self) -> dict[int, int]:
        """Map row numbers to the number of their data set."""
        parts = np.repeat(np.arange(len(self.parts)), self.parts).tolist()
        return {problem.index: part for problem, part in zip(self.problems, parts, strict=True)}

    @cached_property
    def by_index(self) -> dict[int, Problem]:
        """Map row numbers of the dataset, which a PromptBatch carries, to problems."""
        return {problem.index: problem for problem in self.problems}


@dataclass(frozen=True)
class SFTBatch:
    """Prompts LEFT-padded to S beside completions RIGHT-padded to T, as in a TrainBatch."""

    tokens: Int32[np.ndarray, "B N"]
    valid: Bool[np.ndarray, "B N"]
    completion: Bool[np.ndarray, "B T"]  # the tokens to imitate, the stop token included


def encode_problems(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    template: Literal["chat", "plain"],
    system_prompt: str | None,
    prompt_format: str,
    max_prompt: int,
    thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> Encoded:
    """Encode prompts. Prompts of more than ``max_prompt`` tokens are left out and counted, never cut.

    Raises:
        DataError: no prompt is left.
    """
    pairs = [
        (problem, ids)
        for problem in problems
        if len(ids := _render(tokenizer, problem, template, system_prompt, prompt_format, thinking, tools))
        <= max_prompt
    ]
    if not pairs:
        raise DataError(f"all {len(problems)} prompts are longer than {max_prompt} tokens; raise data.max_prompt")
    fitting, prompts = zip(*pairs)
    return Encoded(fitting, prompts, (), len(problems) - len(fitting))


def encode_pairs(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    template: Literal["chat", "plain"],
    system_prompt: str | None,
    prompt_format: str,
    max_length: int,
    stop_id: int,
    thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] = (),
    reply: Callable[[str], list[int]] | None = None,
) -> Encoded:
    """Encode prompts with the completions to imitate: the answer field's ids, then ``stop_id``.

    With ``reply``, the ids of what an environment says, rows may have a column ``turns`` instead: what the policy and
    the environment write, by turns; the policy's are imitated. Pairs of more than ``max_length`` tokens in all are left
    out and counted.

    Raises:
        DataError: no pair is left.
    """
    triples = []
    for problem in problems:
        prompt = _render(tokenizer, problem, template, system_prompt, prompt_format, thinking, tools)
        with errors_at(problem.place):
            turns = [problem.answer] if reply is None else problem.columns.get("turns", [problem.answer])
            turn_ids = [[*encode(tokenizer, turn), stop_id] for turn in turns[::2]]
            reply_ids = [reply(turn) for turn in turns[1::2]] if reply is not None else []
        parts = [part for pair in zip_longest(turn_ids, reply_ids, fillvalue=[]) for part in pair]
        completion = [i for part in parts for i in part]
        if len(prompt) + len(completion) <= max_length:
            observed = [k % 2 == 1 for k, part in enumerate(parts) for _ in part]
            triples.append((problem, prompt, completion, observed))
    if not triples:
        raise DataError(f"all {len(problems)} pairs are longer than {max_length} tokens; raise sft.max_length")
    fitting, prompts, completions, observed = zip(*triples)
    return Encoded(fitting, prompts, completions, len(problems) - len(fitting), observed=observed if reply else ())


def pad_prompts(prompts: Sequence[Sequence[int]], *, length: int, pad_id: int, problems: Sequence[int]) -> PromptBatch:
    """Left-pad prompts to ``length`` positions; the mask comes from the prompts' lengths."""
    tokens, valid = left_pad(prompts, length=length, pad_id=pad_id)
    return PromptBatch(tokens=tokens, valid=valid, problem=np.asarray(problems, np.int32))  # pyright: ignore[reportArgumentType]


def left_pad(
    rows: Sequence[Sequence[int]], *, length: int, pad_id: int
) -> tuple[Int32[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Write rows of ids at the right edge of an array [B, length]; return it with the mask of real ids."""
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[length - len(ids) :] = ids
    lengths = np.array([len(ids) for ids in rows])
    return tokens, np.arange(length) >= length - lengths[:, None]


def right_pad(
    rows: Sequence[Sequence[int]], *, length: int, pad_id: int
) -> tuple[Int32[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Write rows of ids at the left edge of an array [B, length]; return it with the mask of real ids."""
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])
    return tokens, np.arange(length) < lengths[:, None]


def bucketed(rows: Iterable[Sequence[int]], bucket: int) -> int:
    """Round the longest row's length up to a multiple of ``bucket``, so that few shapes are compiled."""
    return -(-max(len(ids) for ids in rows) // bucket) * bucket


class Stream:
    """Yield endless batches of row numbers below ``rows``, from a position that can be saved.

    The order depends on ``seed``, ``rows`` and ``shuffle`` alone.
    """

    def __init__(self, rows: int, *, batch: int, seed: int, shuffle: bool) -> None:
        order = grain.MapDataset.range(rows).seed(seed % 2**32)
        # As good as endless; grain's own endlessness is one item too long for batches of one.
        order = (order.shuffle() if shuffle else order).repeat(sys.maxsize // (2 * rows))
        # No threads: they would only delay a handful of integers, and could outlive the run.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._batches = iter(order.batch(batch, batch_fn=list).to_iter_dataset(options))
        self._identity = {"rows": rows, "batch": batch, "seed": seed, "shuffle": shuffle}

    def next_rows(self) -> list[int]:
        return [int(row) for row in next(self._batches)]

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values, equal on every process."""
        return {**self._identity, "position": self._batches.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a saved position, as ``check_position`` allows."""
        check_position(state, self._identity)
        self._batches.set_state(state["position"])


@dataclass(frozen=True)
class PromptOrder:
    """Say in which order prompts are drawn: see ``Stream``, and ``MixedRows`` for a mixture or a share below 1."""

    seed: int
    shuffle: bool
    weights: Sequence[float] = (1.0,)  # of the data sets
    share: Callable[[int], float] | None = None  # of a problem's turns in which it is drawn


class PromptStream:
    """Yield endless batches of ``prompts`` prompts. ``state`` and ``restore`` resume exactly."""

    def __init__(self, encoded: Encoded, order: PromptOrder, *, prompts: int, bucket: int, pad_id: int) -> None:
        self._encoded, self._bucket, self._pad_id = encoded, bucket, pad_id
        settings: dict[str, Any] = {"batch": prompts, "seed": order.seed, "shuffle": order.shuffle}
        share, parts = order.share, encoded.parts or (len(encoded),)
        self._stream: Stream | MixedRows
        if len(parts) == 1 and share is None:
            self._stream = Stream(len(encoded), **settings)
        else:
            settings["share"] = share and (lambda row: share(encoded.problems[row].index))
            self._stream = MixedRows(parts, order.weights, **settings)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> tuple[PromptBatch, list[Problem]]:
        rows = self._stream.next_rows()
        length = bucketed((self._encoded.prompts[row] for row in rows), self._bucket)
        return _prompt_batch(self._encoded, rows, length, self._pad_id)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)


class SFTStream:
    """Yield endless shuffled batches of prompt and completion pairs, of one shape; resume as PromptStream does."""

    def __init__(
        self,
        encoded: Encoded,
        *,
        batch: int,
        prompt_bucket: int,
        completion_bucket: int,
        pad_id: int,
        seed: int,
    ) -> None:
        self._encoded, self._pad_id = encoded, pad_id
        self._widths = bucketed(encoded.prompts, prompt_bucket), bucketed(encoded.completions, completion_bucket)
        self._stream = Stream(len(encoded), batch=batch, seed=seed, shuffle=True)

    def __iter__(self) -> SFTStream:
        return self

    def __next__(self) -> SFTBatch:
        rows = self._stream.next_rows()
        prompts, completions = self._encoded.prompts, self._encoded.completions
        width, length = self._widths
        left, left_valid = left_pad([prompts[row] for row in rows], length=width, pad_id=self._pad_id)
        right, extent = right_pad([completions[row] for row in rows], length=length, pad_id=self._pad_id)
        completion = extent.copy()
        for mask, row in zip(completion, rows if self._encoded.observed else ()):
            mask[: len(completions[row])] &= ~np.asarray(self._encoded.observed[row])
        return SFTBatch(
            tokens=np.concatenate([left, right], axis=1),
            valid=np.concatenate([left_valid, extent], axis=1),
            completion=completion,
        )

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)


def eval_order(encoded: Encoded) -> list[int]:
    """Sort rows by prompt length, longest first: this saves padding, and a lack of memory shows in the first batch."""
    return sorted(range(len(encoded)), key=lambda row: -len(encoded.prompts[row]))


def eval_batches(
    encoded: Encoded, *, batch: int, bucket: int, pad_id: int, order: Sequence[int] | None = None
) -> Iterator[tuple[PromptBatch, list[Problem], int]]:
    """Iterate over the problems of ``order``, by default all: (prompts, problems, number of real rows).

    The last batch is padded with its first problem to keep the shape; only the leading rows are real.
    """
    order = range(len(encoded)) if order is None else order
    for start in range(0, len(order), batch):
        rows = list(order[start : start + batch])
        real = len(rows)
        rows += [rows[0]] * (batch - real)
        length = bucketed((encoded.prompts[row] for row in rows), bucket)
        yield *_prompt_batch(encoded, rows, length, pad_id), real


def _prompt_batch(encoded: Encoded, rows: list[int], length: int, pad_id: int) -> tuple[PromptBatch, list[Problem]]:
    problems = [encoded.problems[row] for row in rows]
    prompts = [encoded.prompts[row] for row in rows]
    return pad_prompts(prompts, length=length, pad_id=pad_id, problems=[p.index for p in problems]), problems


def _render(
    tokenizer: PreTrainedTokenizerFast,
    problem: Problem,
    template: Literal["chat", "plain"],
    system_prompt: str | None,
    prompt_format: str,
    thinking: bool | None,
    tools: Sequence[dict[str, Any]],
) -> list[int]:
    with errors_at(problem.place):
        return render_prompt(
            tokenizer,
            problem.prompt,
            template=template,
            system_prompt=system_prompt if problem.system is None else problem.system,
            prompt_format=prompt_format,
            tools=tools,
            thinking=thinking,
            chat=problem.chat,
        )
