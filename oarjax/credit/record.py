"""Describe built-in credit methods for help texts, configs and tables. Importing this imports no JAX.

A record names the module that computes the method, which ends in its ``METHOD`` (``oarjax.credit.method.CreditMethod``)
and is imported when a run resolves the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Measure = Literal["logps", "entropies", "score_norms", "hidden", "hellinger", "spread", "teacher_logps"]
"""Signals that are read off the policy's states; ``oarjax.credit.measures`` computes them."""

Signal = (
    Literal["importance", "tokens", "keyword_table", "groups", "marks", "turns", "teacher_prompt", "iteration"]
    | Measure
)
"""Signals that a method may need beside spans, advantages and masks; a run computes only these."""

Kind = Literal["weights", "values", "bonus", "advantages", "sequence", "auxiliary"]
"""What a method changes. The first four are what ``weigh`` returns, [B, T]; see ``oarjax.credit.kinds``.

weights     w >= 0, which multiply the row's advantage
values      the same, and a term of the loss that moves every token listed at a place by its own value (``loss``)
bonus       b, which is added to it
advantages  the tokens' own advantages, in its place
sequence    the row's advantage itself (``advantage``); weights of 1
auxiliary   a term of the loss (``loss``); weights of 1
"""

Coupling = Literal["row", "group", "batch"]
"""The rows that a row's credit depends on: itself, those of its prompt, or all of the minibatch."""

Role = Literal["permuted_of", "screen.by", "signed_values.by", "turn_oar.by", "score"]
"""Fields of credit, and of a custom method, that name another method, for those that may stand there."""

KINDS: tuple[str, ...] = get_args(Kind)
MEASURES: tuple[str, ...] = get_args(Measure)
OF_REFERENCE, OF_TEACHER, OF_MARKS = {"hellinger"}, {"teacher_logps", "teacher_prompt"}, {"marks", "turns"}
"""Signals that need the reference policy, ``credit.teacher`` and ``credit.marks``."""
SIGNALS: tuple[str, ...] = (*get_args(get_args(Signal)[0]), *MEASURES)


WrittenFrom = Literal["released code", "description", "ours"]
"""What a method was written from: its authors' code, somebody's description of it, or our own formula."""

EXPERIMENTAL = "experimental (written from a description, not matched against the authors' code)"
"""Meaning of ``oarjax/credit/experimental/``, where the methods whose evidence is a description are."""

CUSTOM = "custom"
"""The value of credit.method for the method that credit.function names."""


@dataclass(frozen=True)
class MethodRecord:
    """Name, needs and settings of a built-in credit method."""

    name: str
    """The value of credit.method."""
    label: str
    """Its name in tables and curves."""
    about: str
    """One line for help texts."""
    module: str
    """The module whose ``METHOD`` has the functions."""
    evidence: WrittenFrom = "ours"
    kind: Kind = "weights"
    coupling: Coupling = "row"
    needs: tuple[str, ...] = ()
    """The signals (``SIGNALS``) that it reads."""
    roles: tuple[Role, ...] = ()
    sections: tuple[str, ...] = ()
    """Sections and fields of credit that it reads."""
    lab: Mapping[str, Mapping[str, Any]] | None = field(default=None, hash=False)
    """Its rows in the lab: name to show -> fields of credit to change. None: one row, named after the label."""

    @property
    def experimental(self) -> bool:
        """Return True if the method was written from a description, not matched against the authors' code."""
        return self.evidence == "description"
