"""Count FLOPs of forwards, iterations and credit methods.

Model FLOPs are 2 per multiply-add of the matrix products that an algorithm needs: attention is causal, and a prefix
that a group or a row's counterfactuals share is counted once. Recomputation (remat), padding and rejected samples do
not count, so a utilisation computed from these numbers is the share of the hardware that worked for the model. With
``recomputed`` or ``buckets``, a function counts the FLOPs that a program executes instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from oarjax.models.decoder import Decoder

Number = int | float


@dataclass(frozen=True)
class RowTokens:
    """Token counts of a row, or means over many rows."""

    prompt: Number
    completion: Number
    reasoning: Number = 0  # of the completion
    prompt_rows: int = 1  # rows of a group that compute their prompt once where they can (update.prompt_rows)
    units: Number | None = None  # of the reasoning, such as turns, that a counterfactual changes whole; None: tokens

    @property
    def tokens(self) -> Number:
        return self.prompt + self.completion

    @property
    def alone(self) -> RowTokens:
        """Return the same row with its prompt to itself."""
        return replace(self, prompt_rows=1)


# Passes --------------------------------------------------------------------------------------------------------------


def pass_flops(d: Decoder, *, tokens: Number, context: Number, read: Number) -> float:
    """Count a forward over ``tokens`` that attend to ``context`` positions on average, with logits at ``read`` of them.

    2 * parameters per token in the layers' products, 4 * layers * (heads * head_dim) * context in attention's,
    ``memory_flops`` in recurrent states, and 2 * head per position that is read.
    """
    return float(
        tokens * (2.0 * d.trunk_params + d.memory_flops + 4.0 * d.layers * d.heads_width * context)
        + 2.0 * d.head_params * read
    )


def row_flops(d: Decoder, row: RowTokens, *, read: Number) -> float:
    """Count a forward over a row and its part of the prompt's."""
    prompt = pass_flops(d, tokens=row.prompt, context=row.prompt / 2, read=0)
    completion = pass_flops(d, tokens=row.completion, context=row.prompt + row.completion / 2, read=read)
    return prompt / row.prompt_rows + completion


def clean_flops(d: Decoder, row: RowTokens) -> float:
    """Count the pass over a row that every attribution begins with, the unit of ``CreditMethod.forwards``."""
    return row_flops(d, row, read=1)


def scoring_flops(d: Decoder, row: RowTokens) -> float:
    """Count the log-probabilities of a row's completion."""
    return row_flops(d, row, read=row.completion)


def sampling_flops(d: Decoder, *, prompts: Number, rows: Number, prompt: Number, completion: Number) -> float:
    """Count each prompt once, then every completion: prefill yields its first token, its last is not fed back."""
    prefill = prompts * pass_flops(d, tokens=prompt, context=prompt / 2, read=1)
    return prefill + rows * pass_flops(d, tokens=completion - 1, context=prompt + completion / 2, read=completion - 1)


def update_flops(d: Decoder, row: RowTokens, *, recomputed: Number = 0) -> float:
    """Count a forward and backward of a row; a backward counts as two forwards plus ``recomputed`` of the layers."""
    return (3 + recomputed) * row_flops(d, row, read=0) + 3 * 2.0 * d.head_params * row.completion


def adapted_update_flops(d: Decoder, row: RowTokens, *, adapters: Number) -> float:
    """Count an update that trains only ``adapters`` parameters: the other weights get no gradients.

    Matrices and head count a forward and half a backward, attention and adapters a forward and a full backward.
    """
    tokens = row.prompt / row.prompt_rows + row.completion
    linear = pass_flops(d, tokens=tokens, context=0, read=row.completion)
    attention = row_flops(d, row, read=row.completion) - linear
    return 2 * linear + 3 * attention + 6.0 * adapters * tokens


# Credit methods -------------------------------------------------------------------------------------------------------


def gradient_flops(d: Decoder, row: RowTokens, *, draws: int, recomputed: Number = 0) -> float:
    """Count OAR-G: a push and a pull through the linearised completion per draw."""
    return clean_flops(d, row) + 2 * _redone_flops(d, row, recomputed) + draws * 2 * _linear_flops(d, row)


def fisher_flops(d: Decoder, row: RowTokens, *, outcomes: int, recomputed: Number = 0) -> float:
    """Count OAR-F: a pull per outcome."""
    return clean_flops(d, row) + _redone_flops(d, row, recomputed) + outcomes * _linear_flops(d, row)


def saliency_flops(d: Decoder, row: RowTokens, *, recomputed: Number = 0) -> float:
    """Count GRAIL: one pull, and the head forward and back at every token of the answer."""
    answer = max(row.completion - row.reasoning, 1)
    head = 2.0 * d.head_params * 2 * answer
    return clean_flops(d, row) + _redone_flops(d, row, recomputed) + _linear_flops(d, row) + head


def _redone_flops(d: Decoder, row: RowTokens, recomputed: Number) -> float:
    """Count the recomputation of one direction through the linearised completion, once for all draws or outcomes."""
    context = row.prompt + row.completion / 2
    return recomputed * pass_flops(d, tokens=row.completion, context=context, read=0)


def _linear_flops(d: Decoder, row: RowTokens) -> float:
    """Count one direction through the linearised completion: a forward, with attention's products twice.

    The derivative of a product of two activations has two terms; weights are constant.
    """
    context = row.prompt + row.completion / 2
    return pass_flops(d, tokens=row.completion, context=2 * context, read=1)


def masked_flops(d: Decoder, row: RowTokens, *, share: float, buckets: int | None = None) -> float:
    """Count OAR-P of a ``share`` of the reasoning, spread evenly: a forward from each token to the row's end.

    The prompt and the tokens before it are shared. With ``buckets``, suffixes start at one of that many positions, as
    in the executed program.
    """
    total, length = clean_flops(d, row), row.completion
    if buckets is None:
        # Token t is input t + 1; means over t = 0 .. R - 1 of the inputs from there on, and of what they see.
        R = row.reasoning
        suffix = max(length - (R + 1) / 2, 0)
        attended = suffix * row.prompt + max(length**2 - (R + 1) * (2 * R + 1) / 6, 0) / 2
        return total + share * R * pass_flops(d, tokens=suffix, context=attended / suffix if suffix else 0, read=1)
    for j in range(buckets):
        low, high = length * j / buckets, length * (j + 1) / buckets
        count = share * max(min(high, row.reasoning) - low, 0)
        total += count * pass_flops(d, tokens=length - low, context=row.prompt + (low + length) / 2, read=1)
    return total


def local_flops(d: Decoder, row: RowTokens, *, window: int, answers: int, padded: bool = False) -> float:
    """Count OAR-L: 1 + window + answers positions per reasoning token.

    The changed token and its window attend to the tokens before them, the answer to the whole row. With ``padded``,
    every position attends to all slots of the row, as in the executed program.
    """
    near, places = 1 + window, 1 + window + answers
    if padded:
        attended = places * (row.tokens + places)
    else:
        attended = near * (row.prompt + row.reasoning / 2) + answers * row.tokens
    token_flops = pass_flops(d, tokens=places, context=attended / places, read=1)
    return clean_flops(d, row) + row.reasoning * token_flops


# An iteration ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of one iteration."""

    row: RowTokens  # the mean row
    prompts: Number  # prompts drawn, each prefilled once
    rows: Number  # completions drawn
    used: Number  # rows that are scored and trained on
    epochs: int = 1
    old_logps: bool = False  # more than one update per rollout
    measured: bool = False  # the credit method reads signals of the policy's states
    reference: bool = False  # a KL term, or a signal that compares with the reference
    teacher: bool = False  # rows are scored under a teacher's prompts too, of the same length
    distilled: bool = False  # and compared with it in every update
    outcome: bool = False  # the probability of the reference answer is the reward
    adapters: Number | None = None  # trained parameters; None = all
    fused: bool = False  # the update starts from the credit method's clean pass


@runtime_checkable
class Scoring(Protocol):
    """The scoring of a credit method; ``oarjax.credit.resolved.ResolvedMethod`` is one."""

    @property
    def keeps_states(self) -> bool:
        """True if its clean pass also serves log-probabilities and signals."""
        ...

    @property
    def grouped(self) -> bool:
        """True if its clean pass computes the prompt of several rows of a group once."""
        ...

    def forwards(self, row: RowTokens, d: Decoder) -> float:
        """Count the scoring of one row, in clean passes over that row."""
        ...


def iteration_flops(d: Decoder, work: Work, method: Scoring) -> dict[str, float]:
    """Count the phases of one iteration: sample, score (credit included) and update."""
    row, scored = work.row, work.row if method.grouped else work.row.alone
    clean = clean_flops(d, scored)
    score = method.forwards(scored, d) * clean
    keeps_states = bool(score) and method.keeps_states
    if work.old_logps or work.measured:
        score += scoring_flops(d, scored) - clean if keeps_states else scoring_flops(d, row)
    if work.outcome and not keeps_states:
        score += clean_flops(d, row)
    score += work.reference * scoring_flops(d, row) + work.teacher * scoring_flops(d, row.alone)
    if work.fused:
        score -= clean
    trained = update_flops(d, row) if work.adapters is None else adapted_update_flops(d, row, adapters=work.adapters)
    trained += work.distilled * scoring_flops(d, row.alone)
    sampled = sampling_flops(d, prompts=work.prompts, rows=work.rows, prompt=row.prompt, completion=row.completion)
    return {"sample": sampled, "score": work.used * score, "update": work.used * work.epochs * trained}
