"""Inputs and results of the functions of a credit method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.credit.clean_pass import LinearPass
from oarjax.credit.probe import Probe
from oarjax.credit.settings import CreditSettings
from oarjax.models.policy import Policy
from oarjax.types import AnswerSpan, Hints, Params, Rollout, Scores, TokenValues, TrainBatch


class Signals(NamedTuple):
    """Measurements of completions under the policy that generated them; None where the method asks for none."""

    importance: Float[Array, "B T"] | None = None  # scores, 0 outside the reasoning
    entropies: Float[Array, "B T"] | None = None  # of the distribution that each token was drawn from, nats
    tokens: Int[Array, "B T"] | None = None  # completion ids
    rows: Int[Array, "B"] | None = None  # numbers of the rows in the iteration, to key draws by; None: in order
    groups: Int[Array, "B"] | None = None  # number of each row's prompt
    logps: Float[Array, "B T"] | None = None  # of the tokens, nats
    score_norms: Float[Array, "B T"] | None = None  # |d log pi(y) / d logits|^2 = 1 - 2 pi(y) + sum_v pi(v)^2
    hidden: Float[Array, "B T D"] | None = None  # final states, which predict the tokens
    hellinger: Float[Array, "B T"] | None = None  # 1 - sum_v sqrt(pi(v) pi_ref(v)), in [0, 1]
    spread: Float[Array, "B T"] | None = None  # entropy over log V, in [0, 1]
    teacher_logps: Float[Array, "B T"] | None = None  # of the tokens under the prompt of credit.teacher, nats
    marks: Float[Array, "B T"] | None = None  # see ``oarjax.types.Hints``
    turns: Int[Array, "B T"] | None = None
    iteration: Int[Array, ""] | int | None = None  # counted from 1


class KeywordTable(NamedTuple):
    """Spellings of a word list in token ids, and which ids continue a word. Numpy arrays."""

    grams: np.ndarray  # i32[K, L], ids in order, then -1
    opens: np.ndarray  # bool[K]: the first byte is a letter or digit
    closes: np.ndarray  # bool[K]: the last byte is
    begins: np.ndarray  # bool[V]: the id's first byte is
    ends: np.ndarray  # bool[V]: the id's last byte is


class Context(NamedTuple):
    """The run's settings, fixed while a program is compiled."""

    credit: CreditSettings
    temperature: float = 1.0  # the sampler's
    head_chunk: int = 2048  # token positions per chunk of the vocabulary head
    mask_id: int = 0  # stands in for a changed token
    probe: Probe | None = None  # the outcome; given to ``score`` alone
    keyword_table: KeywordTable | None = None


class CreditInputs(NamedTuple):
    """Hold what ``weigh`` receives of a minibatch. Rows that only fill it up have empty spans and masks."""

    signals: Signals  # those that the method needs
    span: AnswerSpan  # reasoning and answer of every completion, bool[B, T]
    advantages: Float[Array, "B"]  # of the rows, from their group's rewards
    completion: Bool[Array, "B T"]  # tokens that count; what stands elsewhere is unused
    key: Key[Array, ""]  # of the iteration, for methods that draw


class Scored(NamedTuple):
    """Scores of the tokens, and the clean states computed on the way: a run then needs no other pass for log-probs."""

    importance: Float[Array, "B T"] | None
    hidden: Float[Array, "B T D"] | None = None  # states that predict the completion's tokens
    values: TokenValues | None = None  # of a method of kind values


Score = Callable[[Policy, Params, Rollout, AnswerSpan, Key[Array, "B"], Context], Scored | Float[Array, "B T"]]
"""(policy, params, rollout, span, row keys, context) -> importance; outside ``span.reasoning`` unused."""

SharedScore = Callable[[Policy, Params, LinearPass, Rollout, AnswerSpan, Key[Array, "B"], Context], Float[Array, "B T"]]
"""(policy, params, clean pass, rollout, span, row keys, context) -> importance."""

Weigh = Callable[[CreditInputs, Context], Float[Array, "B T"]]
"""(inputs, context) -> what the method's kind says, finite; outside the completion unused."""

Reweigh = Callable[[Float[Array, "B T"], TrainBatch, Context], Float[Array, "B T"]]
"""(current log-probs, microbatch, context) -> weights >= 0 of this update, detached; outside the completion unused."""

Advantage = Callable[..., Float[Array, "B"]]
"""(rewards [B, K], weights [K], group_size, scale, ddof, eps) -> A [B]; NaN rewards are of rows without a grade."""

Loss = Callable[[Policy, Params, Float[Array, "B T D"], TrainBatch, Context], Float[Array, "B T"]]
"""(policy, params, states that predict the tokens, batch, context) -> a term for every token's loss."""


def signals_of(
    scores: Scores,
    tokens: Int[Array, "B N"],
    numbers: Int[Array, "B"],
    *,
    length: int,
    group_size: int,
    hints: Hints | None = None,
    iteration: Int[Array, ""] | int = 1,
) -> Signals:
    """Collect the signals of scored rows; ``numbers`` count the rows of an iteration, groups one after the other."""
    return Signals(
        importance=scores.importance,
        tokens=tokens[:, -length:],
        rows=numbers,
        groups=numbers // group_size,
        marks=None if hints is None else hints.marks,
        turns=None if hints is None else hints.turns,
        iteration=iteration,
        **(scores.measured or {}),
    )


def required(signals: Signals | Scored, name: str, context: Context) -> Any:
    """Return a signal that the method needs.

    Raises:
        ValueError: it is None. A run computes what its method declares, so only callers that build signals themselves
            can see this.
    """
    signal = getattr(signals, name)
    if signal is None:
        method = context.credit.method
        raise ValueError(f"credit method {method}: needs the signal {name}, got None; give Signals({name}=...)")
    return signal


def all_required(signals: Signals, names: Sequence[str], context: Context) -> tuple[Any, ...]:
    """Return several signals that the method needs; see ``required``."""
    return tuple(required(signals, name, context) for name in names)


def probe_of(context: Context) -> Probe:
    """Return the outcome probe.

    Raises:
        ValueError: the context has none.
    """
    if context.probe is None:
        raise ValueError("score: needs an outcome probe, got None; give Context(probe=...)")
    return context.probe
