"""Every built-in credit method, in the order of help texts and the lab. Importing this imports no JAX.

A new method is a file with its functions and an entry here. Config choices, help texts, the lab, studies, ``mfu`` and
``oarjax plan`` read these entries.
"""

from __future__ import annotations

from typing import Any

from oarjax.credit.method import OF_REFERENCE, CreditMethod, Role

_GATE = "oarjax.credit.gate:weigh"
_EXACT = ("masking", "probe", "gate", "answer")

METHODS: dict[str, CreditMethod] = {
    method.name: method
    for method in (
        CreditMethod(
            name="oar_p",
            label="OAR-P",
            about="how far the outcome moves when a token is changed",
            needs=("importance",),
            score="oarjax.credit.oar.oar_p:score",
            weigh=_GATE,
            answer="probed",
            forwards="oarjax.costs:oar_p_forwards",
            roles=("permuted_of",),
            sections=_EXACT,
            lab={
                "OAR-P": {},
                "OAR-P, 2nd choice": {"masking": {"counterfactual": "second_choice"}},
                "OAR-P, mean": {"masking": {"counterfactual": "mean_embedding"}},
                "OAR-P, deleted": {"masking": {"counterfactual": "deleted"}},
            },
        ),
        CreditMethod(
            name="oar_screened",
            label="OAR-P screened",
            about="OAR-P of the tokens that a cheaper method puts first",
            needs=("importance",),
            score="oarjax.credit.oar.oar_screened:score",
            weigh=_GATE,
            answer="probed",
            check="oarjax.credit.oar.oar_screened:check",
            forwards="oarjax.costs:oar_screened_forwards",
            noisy="oarjax.credit.oar.oar_screened:noisy",
            roles=("permuted_of",),
            sections=(*_EXACT, "screen", "fisher", "local", "estimator", "sigma", "draws"),
            lab={"OAR-P, screened": {}},
        ),
        CreditMethod(
            name="oar_l",
            label="OAR-L",
            about="OAR-P that recomputes only the nearest tokens and the answer",
            needs=("importance",),
            score="oarjax.credit.oar.oar_l:score",
            weigh=_GATE,
            answer="probed",
            check="oarjax.credit.oar.oar_l:check",
            forwards="oarjax.costs:oar_l_forwards",
            cuts=True,
            roles=("permuted_of", "screen.by"),
            sections=(*_EXACT, "local"),
        ),
        CreditMethod(
            name="oar_f",
            label="OAR-F",
            about="OAR-P to second order, by backward passes",
            needs=("importance",),
            score="oarjax.credit.oar.oar_f:score",
            weigh=_GATE,
            answer="probed",
            check="oarjax.credit.oar.oar_f:check",
            forwards="oarjax.costs:oar_f_forwards",
            noisy="oarjax.credit.oar.oar_f:noisy",
            roles=("permuted_of", "screen.by"),
            sections=(*_EXACT, "fisher"),
        ),
        CreditMethod(
            name="oar_g",
            label="OAR-G",
            about="the outcome's gradient by the embeddings, under noise",
            needs=("importance",),
            score="oarjax.credit.oar.oar_g:score",
            shared="oarjax.credit.oar.oar_g:score_shared",
            weigh=_GATE,
            answer="probed",
            check="oarjax.credit.oar.oar_p:check_units",
            forwards="oarjax.costs:oar_g_forwards",
            noisy="oarjax.credit.oar.oar_g:noisy",
            roles=("permuted_of", "screen.by"),
            sections=("estimator", "sigma", "draws", "probe", "gate", "answer"),
            lab={
                "OAR-G, 1 draw": {"estimator": "linearised", "draws": 1},
                "OAR-G, 4 draws": {"estimator": "linearised", "draws": 4},
                "OAR-G, 16 draws": {"estimator": "linearised", "draws": 16},
                "OAR-G noisy, 1 draw": {"estimator": "noisy", "draws": 1},
                "OAR-G noisy, 4 draws": {"estimator": "noisy", "draws": 4},
            },
        ),
        CreditMethod(
            name="grail",
            label="GRAIL",
            about="the saliency of the answer's likelihood, standardised and clipped",
            needs=("importance",),
            score="oarjax.credit.methods.grail:score",
            weigh="oarjax.credit.methods.grail:weigh",
            answer="read",
            forwards="oarjax.costs:grail_forwards",
            sections=("grail", "answer"),
        ),
        CreditMethod(
            name="ktae",
            label="KTAE",
            about="a bonus for token ids that tell a group's correct completions from its wrong ones",
            kind="bonus",
            coupling="group",
            needs=("tokens", "groups"),
            weigh="oarjax.credit.methods.ktae:weigh",
            sections=("ktae",),
        ),
        CreditMethod(
            name="gtpo",
            label="GTPO",
            about="rewards shared out by entropy among a group's rows at a position",
            kind="advantages",
            coupling="group",
            needs=("entropies", "groups"),
            weigh="oarjax.credit.methods.gtpo:weigh",
        ),
        CreditMethod(
            name="token_baseline",
            label="token baseline",
            about="the group's optimal baseline at every position",
            kind="advantages",
            coupling="group",
            needs=("score_norms", "groups"),
            weigh="oarjax.credit.methods.token_baseline:weigh",
        ),
        CreditMethod(
            name="delta",
            label="DelTA",
            about="more for tokens whose gradient lies on their own side of the batch",
            coupling="batch",
            needs=("hidden", "logps"),
            weigh="oarjax.credit.methods.delta:weigh",
            sections=("delta",),
        ),
        CreditMethod(
            name="causal_spans",
            label="causal spans",
            about="the drop in the answer's probability when a line or sentence is masked",
            needs=("importance",),
            score="oarjax.credit.methods.causal_spans:score",
            weigh=_GATE,
            answer="read",
            check="oarjax.credit.methods.causal_spans:check",
            forwards="oarjax.costs:oar_p_forwards",
            sections=("masking", "gate", "answer"),
            lab={},
        ),
        CreditMethod(
            name="dgpo",
            label="DGPO",
            about="more where the policy has moved from the reference and is undecided",
            needs=("hellinger", "spread"),
            weigh="oarjax.credit.methods.dgpo:weigh",
            sections=("dgpo",),
            lab={},
        ),
        CreditMethod(
            name="fipo",
            label="FIPO",
            about="more where what follows has become likelier since the rollout, anew in every update",
            reweigh="oarjax.credit.methods.fipo:reweigh",
            sections=("fipo",),
            lab={},
        ),
        CreditMethod(
            name="crpo",
            label="CRPO",
            about="several rewards, each normalised in the group before they are added",
            kind="sequence",
            advantage="oarjax.credit.methods.crpo:decoupled_advantages",
            lab={},
        ),
        CreditMethod(
            name="egca",
            label="EGCA",
            about="the whole advantage on marked tokens",
            needs=("marks",),
            weigh="oarjax.credit.methods.egca:weigh",
            sections=("marks",),
            lab={},
        ),
        CreditMethod(
            name="critic_search",
            label="CriticSearch",
            about="a share of the advantage from labels of the turns",
            kind="advantages",
            needs=("marks", "turns"),
            weigh="oarjax.credit.methods.critic_search:weigh",
            sections=("critic_search", "marks"),
            lab={},
        ),
        CreditMethod(
            name="shear",
            label="SHEAR",
            about="windows weigh by the distance of their states from opposing rows",
            coupling="group",
            needs=("hidden", "groups"),
            weigh="oarjax.credit.methods.shear:weigh",
            sections=("shear",),
            lab={},
        ),
        CreditMethod(
            name="rlsd",
            label="RLSD",
            about="a teacher who is told the answer sets the size of a token's credit",
            needs=("teacher_logps", "logps", "iteration"),
            weigh="oarjax.credit.methods.rlsd:weigh",
            sections=("rlsd", "teacher"),
            lab={},
        ),
        CreditMethod(
            name="serl",
            label="SERL",
            about="the same on marked tokens alone",
            needs=("teacher_logps", "logps", "iteration", "marks"),
            weigh="oarjax.credit.methods.rlsd:weigh_marked",
            sections=("rlsd", "teacher", "marks"),
            lab={},
        ),
        CreditMethod(
            name="sdpg",
            label="SDPG",
            about="GRPO and a KL term towards the policy that is told the answer",
            kind="auxiliary",
            needs=("teacher_prompt",),
            loss="oarjax.credit.methods.sdpg:loss",
            sections=("sdpg", "teacher"),
            lab={},
        ),
        CreditMethod(
            name="entropy_top",
            label="entropy, top share",
            about="the share of highest entropy alone",
            coupling="batch",
            needs=("entropies",),
            weigh="oarjax.credit.entropy:weigh_top",
            sections=("entropy",),
            lab={},
        ),
        CreditMethod(
            name="entropy",
            label="entropy, gated",
            about="entropies through OAR's gate",
            needs=("entropies",),
            weigh="oarjax.credit.entropy:weigh",
            sections=("gate",),
            lab={"entropy": {}},
        ),
        CreditMethod(
            name="keywords",
            label="keywords",
            about="more for the words of a list",
            needs=("tokens", "keyword_table"),
            weigh="oarjax.credit.keywords:weigh",
            sections=("keywords",),
            lab={},
        ),
        CreditMethod(
            name="random",
            label="random, gated",
            about="random scores through OAR's gate, a control",
            weigh="oarjax.credit.controls:weigh_random",
            noisy=True,
            sections=("gate",),
            lab={"random": {}},
        ),
        CreditMethod(
            name="permuted",
            label="permuted",
            about="another method's weights on the wrong tokens, the control",
            needs=("importance",),
            score="permuted_of",
            weigh="oarjax.credit.controls:weigh_permuted",
            noisy=True,
            sections=("permuted_of", "gate"),
            lab={},
        ),
        CreditMethod(
            name="uniform",
            label="GRPO",
            about="plain GRPO",
            weigh="oarjax.credit.controls:weigh_uniform",
            lab={"uniform (GRPO)": {}},
        ),
    )
}
"""Name -> record."""

CUSTOM = "custom"
"""The value of credit.method for the method that credit.function names."""


def choices(role: Role | None = None) -> tuple[str, ...]:
    """List the built-in methods, or those that may stand in the field ``role``."""
    return tuple(name for name, m in METHODS.items() if role is None or role in m.roles)


def label(method: str, permuted_of: str, function: str | None = None) -> str:
    """Return the name of a method in tables: of a custom one its function's.

    The permuted control has that of the method whose weights it shuffles.
    """
    if method == CUSTOM:
        return (function or CUSTOM).rpartition(":")[2]
    return f"{METHODS[permuted_of].label} permuted" if method == "permuted" else METHODS[method].label


def lab_methods() -> dict[str, dict[str, Any]]:
    """Build the rows of the lab: name to show -> fields of credit to change."""
    rows = {}
    for name, m in METHODS.items():
        for shown, changes in ({m.label: {}} if m.lab is None else m.lab).items():
            rows[shown] = {"method": name, **changes}
    return rows


def reads_reference(method: str) -> bool:
    """Return whether a built-in method compares the policy with the reference."""
    return method in METHODS and bool(OF_REFERENCE & set(METHODS[method].needs))


def summary() -> str:
    """Describe every method in one line, for help texts."""
    return "; ".join(f"{name}: {m.about}" for name, m in METHODS.items())
