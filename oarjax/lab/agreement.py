"""How well a method's scores agree with the truth, and how its weights are spread. One number per row.

NaN where a figure is undefined for a row (no causal token, constant scores): leave such rows out of a mean.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from oarjax.credit.diagnose import ess_ratio, recall_at_k, separation, spearman, top_mass
from oarjax.credit.oar_screened import top_share


class Evidence(NamedTuple):
    """What scores are measured by; a mask that is None is not known."""

    reasoning: Bool[Array, "B T"]  # the tokens that are ranked
    exact: Float[Array, "B T"]  # exact OAR-P
    direct: Bool[Array, "B T"] | None  # tokens whose change changes the answer, see oarjax.lab.interventions
    total: Bool[Array, "B T"] | None  # tokens whose change changes the reward
    known: Bool[Array, "B T"] | None  # tokens known to carry the computation


def agreement(scores: Float[Array, "B T"], evidence: Evidence, *, share: float) -> dict[str, Float[Array, "B"]]:
    """Spearman's correlation with exact OAR-P; how much of each set of tokens the top ``share`` of scores holds, where
    ``recall_exact`` is of exact OAR-P's own top; and how well the scores separate each set from the rest."""
    mask = evidence.reasoning
    found = {"spearman": spearman(scores, evidence.exact, mask)}
    exact = top_share(evidence.exact, mask, share=share)
    for name, causal in (("exact", exact), *_sets(evidence)):
        found[f"recall_{name}"] = recall_at_k(scores, causal, mask, share=share)
        found[f"auc_{name}"] = separation(scores, causal, mask)
    return found


def best_agreement(evidence: Evidence, *, share: float) -> dict[str, Float[Array, "B"]]:
    """The recall of a ranking that has every causal token first: below 1 where they are more than the top holds."""
    return {
        f"recall_{name}": recall_at_k(causal.astype(evidence.exact.dtype), causal, evidence.reasoning, share=share)
        for name, causal in _sets(evidence)
    }


def _sets(evidence: Evidence) -> list[tuple[str, Bool[Array, "B T"]]]:
    """The sets of causal tokens that are known."""
    named = {"direct": evidence.direct, "total": evidence.total, "known": evidence.known}
    return [(name, causal) for name, causal in named.items() if causal is not None]


def concentration(
    weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"], *, share: float
) -> dict[str, Float[Array, "B"]]:
    """ESS ratio, and the mass on the top ``share`` of the weights."""
    return {"ess": ess_ratio(weights, reasoning), "top_mass": top_mass(weights, reasoning, share=share)}
