"""Measure a method's scores against causal evidence, and the spread of its weights: one number per row.

A figure is NaN where it is undefined for a row (no causal token, constant scores): leave such rows out of means.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from oarjax.credit.diagnose import ess_ratio, recall_at_k, separation, spearman, top_mass
from oarjax.credit.oar.oar_screened import top_share


class CausalEvidence(NamedTuple):
    """Evidence that scores are measured against. An unknown mask is None."""

    reasoning: Bool[Array, "B T"]  # tokens to rank
    exact: Float[Array, "B T"]  # exact OAR-P
    direct: Bool[Array, "B T"] | None  # tokens whose change changes the answer, see oarjax.tools.lab.interventions
    total: Bool[Array, "B T"] | None  # tokens whose change changes the reward
    known: Bool[Array, "B T"] | None  # tokens known to carry the computation
    wrong_step: Bool[Array, "B T"] | None = None  # the first wrong step of a failed completion


def agreement(scores: Float[Array, "B T"], evidence: CausalEvidence, *, share: float) -> dict[str, Float[Array, "B"]]:
    """Compare scores with exact OAR-P (Spearman), and with each set of causal tokens, exact OAR-P's top among them:
    its recall in the top ``share`` of the scores, and the AUC of the scores."""
    mask = evidence.reasoning
    values = {"spearman": spearman(scores, evidence.exact, mask)}
    exact = top_share(evidence.exact, mask, share=share)
    for name, causal in (("exact", exact), *_sets(evidence)):
        values[f"recall_{name}"] = recall_at_k(scores, causal, mask, share=share)
        values[f"auc_{name}"] = separation(scores, causal, mask)
    return values


def best_agreement(evidence: CausalEvidence, *, share: float) -> dict[str, Float[Array, "B"]]:
    """Compute the recall of a perfect ranking: below 1 where the causal tokens outnumber the top."""
    return {
        f"recall_{name}": recall_at_k(causal.astype(evidence.exact.dtype), causal, evidence.reasoning, share=share)
        for name, causal in _sets(evidence)
    }


def _sets(evidence: CausalEvidence) -> list[tuple[str, Bool[Array, "B T"]]]:
    """List the known sets of causal tokens."""
    masks = {"direct": evidence.direct, "total": evidence.total, "known": evidence.known, "wrong": evidence.wrong_step}
    return [(name, causal) for name, causal in masks.items() if causal is not None]


def concentration(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], *, share: float
) -> dict[str, Float[Array, "B"]]:
    """Compute the ESS ratio of the weights, and the mass on their top ``share``."""
    return {"ess": ess_ratio(weights, reasoning), "top_mass": top_mass(weights, reasoning, share=share)}
