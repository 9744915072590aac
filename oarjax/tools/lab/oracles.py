"""Run both oracles over a set of completions: decode branches and compare them. See ``interventions.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from oarjax.step.minibatches import bucket, take
from oarjax.tools.lab.interventions import Branches, Choices
from oarjax.types import AnswerSpan, Rollout


class Continuation(NamedTuple):
    """A branch with its decoded continuation."""

    tokens: list[int]  # of the whole completion
    ended: bool  # by a stop token


@runtime_checkable
class Decode(Protocol):
    """Continue K branches of rows [B, N] greedily; prompts are padded to ``width``."""

    def __call__(self, tokens: Any, valid: Any, branches: Branches, *, width: int, max_new: int) -> Rollout: ...


AnswerChanges = Callable[[Rollout, Any, Any, Any], Any]
"""(rollout of b rows, reasoning, answer, other) -> result of ``answer_choice_changes``, bool [b, T]."""
AnswerOf = Callable[[Sequence[int]], str | None]
"""Extracts a completion's answer, None if it has none."""
RewardsOf = Callable[[Sequence[int], Sequence[Continuation]], Float[np.ndarray, "K"]]
"""(rows, completions) -> rewards, NaN where unknown."""


class Branch(NamedTuple):
    """One row of ``Branches``, and the maximum number of tokens to decode."""

    row: int
    until: int
    at: int
    token: int
    limit: int


def decode_branches(
    decode: Decode, rollout: Rollout, branches: Sequence[Branch], *, rows: int, stop_ids: Sequence[int] = ()
) -> list[Continuation]:
    """Decode every branch greedily, ``rows`` at a time, branches of similar length together.

    A branch whose last token was changed to a stop token has ended.
    """
    total, length = rollout.completion.shape[1], rollout.tokens.shape[1]
    prompt = np.asarray(rollout.valid[:, : length - total]).sum(1)
    lengths = np.array([prompt[b.row] + b.until for b in branches], int)
    order = np.argsort(lengths, kind="stable")
    out: list[Continuation] = [Continuation([], False)] * len(branches)
    for start in range(0, len(order), rows):
        indices = order[start : start + rows]
        filled = np.resize(indices, rows)  # the last batch keeps the others' shape
        fields = zip(*(branches[int(i)][:4] for i in filled))
        limit = max(branches[i].limit for i in indices)
        decoded = decode(
            rollout.tokens,  # type: ignore[arg-type]
            rollout.valid,  # type: ignore[arg-type]
            Branches(*(np.array(f, np.int32) for f in fields)),  # type: ignore[arg-type]
            width=bucket(int(lengths[indices].max()), -(-length // 4), length),
            max_new=bucket(limit, max(-(-total // 4), 1), max(total, limit)),
        )
        for k, i in enumerate(indices):
            branch = branches[i]
            is_token = np.asarray(decoded.completion[k])
            new_ids = np.asarray(decoded.tokens[k, -len(is_token) :])[is_token].tolist()
            ids = np.asarray(rollout.tokens[branch.row, length - total :])[: branch.until].tolist()
            if branch.at >= 0:
                ids[branch.at] = branch.token
            if branch.at == branch.until - 1 and branch.token in stop_ids:
                out[i] = Continuation(ids, True)
                continue
            has_ended = bool(decoded.ended[k]) and len(new_ids) <= branch.limit
            out[i] = Continuation(ids + new_ids[: branch.limit], has_ended)
    return out


class Direct(NamedTuple):
    flips: Bool[np.ndarray, "B T"]
    usable: Bool[np.ndarray, "B"]  # the unchanged completion, decoded greedily, gives an answer
    decoded: int  # changed tokens whose answer had to be decoded


def direct_flips(
    decode: Decode,
    changes: AnswerChanges,
    rollout: Rollout,
    span: AnswerSpan,
    choice: Choices,
    *,
    answer_of: AnswerOf,
    answer_tokens: int,
    batch: int,
    rows: int,
    pad_id: int,
) -> Direct:
    """Mark reasoning tokens whose change to the policy's next choice, the rest kept, changes the decoded answer.

    Answers are compared as text. The clean answer is decoded once. A change that leaves every greedy choice the same
    leaves the answer the same; only the answers after other changes are decoded.
    """
    total = rollout.completion.shape[1]
    reasoning, answer = np.asarray(span.reasoning), np.asarray(span.answer)
    begins = np.where(answer.any(1), answer.argmax(1), total)
    rows_asked = np.flatnonzero(answer.any(1) & reasoning.any(1))
    clean = decode_branches(
        decode,
        rollout,
        [Branch(int(r), int(begins[r]), -1, 0, answer_tokens) for r in rows_asked],
        rows=rows,
    )
    clean_answers = {int(r): answer_of(c.tokens) for r, c in zip(rows_asked, clean)}
    rewritten, decoded_part = _replace_completions(
        rollout, {int(r): c.tokens for r, c in zip(rows_asked, clean)}, begins, pad_id
    )
    wide = ((0, 0), (0, decoded_part.shape[1] - total))
    usable = np.array([clean_answers.get(r) is not None for r in range(len(begins))])
    departs = np.zeros(decoded_part.shape, bool)
    for start in range(0, len(begins), batch):
        indices = np.resize(np.arange(start, min(start + batch, len(begins))), batch)
        part = take(rewritten, indices)
        masks = (np.pad(reasoning & usable[:, None], wide), decoded_part, np.pad(np.asarray(choice.other), wide))
        departs[indices] = np.asarray(changes(part, *(x[indices] for x in masks)))
    candidates = np.argwhere(departs[:, :total] & reasoning)
    branches = [Branch(int(r), int(begins[r]), int(t), int(choice.other[r, t]), answer_tokens) for r, t in candidates]
    flips = np.zeros(reasoning.shape, bool)
    for (r, t), continuation in zip(candidates, decode_branches(decode, rollout, branches, rows=rows)):
        flips[r, t] = answer_of(continuation.tokens) != clean_answers[int(r)]
    return Direct(flips, usable, len(branches))


def _replace_completions(
    rollout: Rollout, completions: dict[int, list[int]], begins: np.ndarray, pad_id: int
) -> tuple[Rollout, Bool[np.ndarray, "B T"]]:
    """Replace the rows' completions, and mark the tokens at or after ``begins``."""
    total = rollout.completion.shape[1]
    length = max(total, *(len(c) for c in completions.values())) if completions else total
    split = rollout.tokens.shape[1] - total
    tokens = np.full((len(begins), length), pad_id, np.int32)
    is_token = np.zeros(tokens.shape, bool)
    for row, ids in completions.items():
        tokens[row, : len(ids)], is_token[row, : len(ids)] = ids, True
    zeros = np.zeros(tokens.shape, np.float32)
    result = Rollout(
        tokens=np.concatenate([rollout.tokens[:, :split], tokens], 1),  # type: ignore[arg-type]
        valid=np.concatenate([rollout.valid[:, :split], is_token], 1),  # type: ignore[arg-type]
        completion=is_token,  # type: ignore[arg-type]
        behaviour_logps=zeros,  # type: ignore[arg-type]
        filtered_logps=zeros,  # type: ignore[arg-type]
        ended=rollout.ended,
    )
    return result, is_token & (np.arange(length) >= begins[:, None])


class Total(NamedTuple):
    flips: Bool[np.ndarray, "B T"]
    usable: Bool[np.ndarray, "B"]  # every reward that the row needs is known
    decoded: int


def total_flips(
    decode: Decode,
    rollout: Rollout,
    span: AnswerSpan,
    choice: Choices,
    rewards: Float[np.ndarray, "B"],
    *,
    rewards_of: RewardsOf,
    limit: int,
    rows: int,
    stop_ids: Sequence[int],
) -> Total:
    """Mark reasoning tokens whose change to the policy's next choice, all after it decoded again, changes the reward.

    Both sides of the comparison are decoded greedily: after the changed token, and after the unchanged one. If only
    greedy choices follow the unchanged token, the completion itself is its continuation. Otherwise it is decoded, once
    for all tokens between two that were not greedy choices. ``limit`` is the maximum length of a completion;
    ``rewards`` are those of the unchanged completions.
    """
    reasoning, is_token = np.asarray(span.reasoning), np.asarray(rollout.completion)
    total = is_token.shape[1]
    completion = np.asarray(rollout.tokens)[:, -total:]
    departs = is_token & (completion != np.asarray(choice.first))
    positions = [(int(r), int(t)) for r, t in np.argwhere(reasoning)]
    # First token after t that is not the first choice: the unchanged text's greedy continuation ends before it.
    upto = np.full((len(is_token), total + 1), total)
    for t in range(total - 1, -1, -1):
        upto[:, t] = np.where(departs[:, t], t, upto[:, t + 1])
    ends = sorted({(r, int(upto[r, t + 1])) for r, t in positions if upto[r, t + 1] < total})
    branches = [Branch(r, t + 1, t, int(choice.other[r, t]), limit - t - 1) for r, t in positions]
    branches += [Branch(r, u, -1, 0, limit - u) for r, u in ends]
    continuations = decode_branches(decode, rollout, branches, rows=rows, stop_ids=stop_ids)
    values = rewards_of([b.row for b in branches], continuations)
    unchanged = dict(zip(ends, values[len(positions) :]))
    flips, usable = np.zeros(reasoning.shape, bool), np.isfinite(np.asarray(rewards, np.float32))
    for (r, t), value in zip(positions, values):
        baseline = unchanged.get((r, int(upto[r, t + 1])), rewards[r])
        usable[r] &= bool(np.isfinite(value) and np.isfinite(baseline))
        flips[r, t] = value != baseline
    return Total(flips & usable[:, None], usable, len(branches))
