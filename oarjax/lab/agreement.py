"""Measures of a method's scores against causal evidence, and of its weights' spread. One number per row.

NaN where a figure is undefined for a row (no causal token, constant scores): leave such rows out of means.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from oarjax.credit.diagnose import ess_ratio, recall_at_k, separation, spearman, top_mass
from oarjax.credit.oar.oar_screened import top_share


class Evidence(NamedTuple):
    """Evidence that scores are measured against; None for a mask that is unknown."""

    reasoning: Bool[Array, "B T"]  # the tokens that are ranked
    exact: Float[Array, "B T"]  # exact OAR-P
    direct: Bool[Array, "B T"] | None  # tokens whose change changes the answer, see oarjax.lab.interventions
    total: Bool[Array, "B T"] | None  # tokens whose change changes the reward
    known: Bool[Array, "B T"] | None  # tokens known to carry the computation
    wrong: Bool[Array, "B T"] | None = None  # the first wrong step of a failed completion


def agreement(scores: Float[Array, "B T"], evidence: Evidence, *, share: float) -> dict[str, Float[Array, "B"]]:
    """Compute Spearman's correlation with exact OAR-P, and for each set of causal tokens (exact OAR-P's top among them)
    the share of it in the top ``share`` of scores, and how well the scores separate it from the rest."""
    mask = evidence.reasoning
    values = {"spearman": spearman(scores, evidence.exact, mask)}
    exact = top_share(evidence.exact, mask, share=share)
    for name, causal in (("exact", exact), *_sets(evidence)):
        values[f"recall_{name}"] = recall_at_k(scores, causal, mask, share=share)
        values[f"auc_{name}"] = separation(scores, causal, mask)
    return values


def best_agreement(evidence: Evidence, *, share: float) -> dict[str, Float[Array, "B"]]:
    """Compute the recall of a perfect ranking: below 1 where the causal tokens outnumber the top."""
    return {
        f"recall_{name}": recall_at_k(causal.astype(evidence.exact.dtype), causal, evidence.reasoning, share=share)
        for name, causal in _sets(evidence)
    }


def _sets(evidence: Evidence) -> list[tuple[str, Bool[Array, "B T"]]]:
    """List the known sets of causal tokens."""
    named = {"direct": evidence.direct, "total": evidence.total, "known": evidence.known, "wrong": evidence.wrong}
    return [(name, causal) for name, causal in named.items() if causal is not None]


def concentration(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], *, share: float
) -> dict[str, Float[Array, "B"]]:
    """Compute the ESS ratio, and the mass on the top ``share`` of the weights."""
    return {"ess": ess_ratio(weights, reasoning), "top_mass": top_mass(weights, reasoning, share=share)}
