"""The record of a credit method, the same for built-in and custom ones. It imports no JAX.

A method has up to two halves. ``score`` reads the policy, where the rollout is scored, and gives every token an
importance. ``weigh`` reads signals, answer spans, group advantages and masks, and returns what its kind says: token
weights, bonuses or advantages. Functions are given as such, or by dotted path ("module:function"), which is imported
when the method is first used. ``oarjax.credit.signals`` has what they receive.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Measure = Literal["logps", "entropies", "score_norms", "hidden", "hellinger", "spread", "teacher_logps"]
"""Signals that are read off the policy's states; ``oarjax.credit.measures`` computes them."""

Signal = (
    Literal["importance", "tokens", "keyword_table", "groups", "marks", "turns", "teacher_prompt", "iteration"]
    | Measure
)
"""Signals that a method may need beside spans, advantages and masks; a run computes only these."""

Kind = Literal["weights", "bonus", "advantages", "sequence", "auxiliary"]
"""What a method changes. The first three are what ``weigh`` returns, [B, T]; see ``oarjax.credit.kinds``.

weights     w >= 0, which multiply the row's advantage
bonus       b, which is added to it
advantages  the tokens' own advantages, in its place
sequence    the row's advantage itself (``advantage``); weights of 1
auxiliary   a term of the loss (``loss``); weights of 1
"""

Coupling = Literal["row", "group", "batch"]
"""The rows that a row's credit depends on: itself, those of its prompt, or all of the minibatch."""

Role = Literal["permuted_of", "screen.by"]
"""Fields of credit that name another method, for those that may stand there."""

KINDS: tuple[str, ...] = get_args(Kind)
MEASURES: tuple[str, ...] = get_args(Measure)
OF_REFERENCE, OF_TEACHER, OF_MARKS = {"hellinger"}, {"teacher_logps", "teacher_prompt"}, {"marks", "turns"}
"""Signals that need the reference policy, ``credit.teacher`` and ``credit.marks``."""
SIGNALS: tuple[str, ...] = (*get_args(get_args(Signal)[0]), *MEASURES)


@dataclass(frozen=True)
class CreditMethod:
    """Pure functions that give every token of a completion its share of the advantage.

    ``CreditMethod(weigh)`` reads spans, advantages and masks alone. A method that reweights another one's scores is
    ``CreditMethod(weigh, needs=("importance",), score="oar_p")``; one that scores tokens itself gives a function.
    """

    weigh: str | Callable[..., Any] = "oarjax.credit.controls:weigh_uniform"
    """(signals, span, advantages [B], completion [B, T], key, context) -> [B, T]; see ``signals.Weigh``."""
    needs: tuple[str, ...] = ()
    """The signals (``SIGNALS``) that ``weigh`` reads; others are None."""
    score: str | Callable[..., Any] | None = None
    """(policy, params, rollout, span, row keys, context) -> importance [B, T]; see ``signals.Score``. Or the name of
    a built-in method, or of a field of credit that holds one, whose importance this method reads."""
    shared: str | Callable[..., Any] | None = None
    """(policy, params, ``clean_pass.LinearPass``, rollout, span, row keys, context) -> the importance that ``score``
    gives, from a pass that the update shares. Only for methods whose weights of a row depend on that row alone."""
    reweigh: str | Callable[..., Any] | None = None
    """(log-probs [B, T], batch, context) -> weights [B, T] on top, taken anew in every update; see ``signals.Reweigh``.
    There must be several updates per rollout, or there is nothing to tell them by."""
    advantage: str | Callable[..., Any] | None = None
    """Of kind sequence: (rewards [B, K], their weights [K], group size, advantage section) -> A [B]."""
    loss: str | Callable[..., Any] | None = None
    """Of kind auxiliary: (policy, params, states [B, T, D], batch, context) -> [B, T], added to the tokens' losses."""
    name: str = "custom"
    """The value of credit.method."""
    label: str = "custom"
    """What tables and curves call it."""
    about: str = ""
    """One line for help texts."""
    kind: Kind = "weights"
    coupling: Coupling = "row"
    """Of ``group`` a minibatch must hold whole groups: there can be one per iteration only."""
    answer: Literal["unread", "probed", "read"] = "unread"
    """Whether scoring needs an answer in the completion: never, unless the probe reads something else, always."""
    check: str | Callable[..., Any] | None = None
    """(credit section, custom probe or None) -> None; raises ConfigError for settings that cannot go together."""
    forwards: float | str | Callable[..., float] = 0.0
    """What scoring costs, in forward passes over the row: a number, or (credit section, row, decoder) -> number, with
    ``oarjax.costs.Row`` and ``Decoder``. What signals cost (log-probs, entropies) is not part of it."""
    noisy: bool | str | Callable[..., bool] = False
    """Whether another key gives other scores, or (credit section) -> bool."""
    cuts: bool = False
    """Whether scoring computes places in the middle of a row again, which no policy with recurrent states allows."""
    roles: tuple[Role, ...] = ()
    sections: tuple[str, ...] = ()
    """Sections and fields of credit that it reads."""
    lab: Mapping[str, Mapping[str, Any]] | None = field(default=None, hash=False)
    """Its rows in the lab: name to show -> fields of credit to change. None: one row, named after the label."""


def resolve(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Import the function that a dotted path names; return functions as they are."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
