"""Every built-in credit method, in the order of help texts and the lab. Importing this imports no JAX.

A new method is a file that ends in its ``METHOD``, and an entry here; settings are a class and a field in
``settings.py``, which the entry names in ``sections``. Config choices, help texts, the lab and studies read these
entries; a run imports the module of its method (``oarjax.credit.method.built_in``).
"""

from __future__ import annotations

from typing import Any

from oarjax.credit.record import CUSTOM, EXPERIMENTAL, OF_REFERENCE, MethodRecord, Role

_EXACT = ("masking", "probe", "gate", "answer")

METHODS: dict[str, MethodRecord] = {
    method.name: method
    for method in (
        MethodRecord(
            name="oar_p",
            label="OAR-P",
            about="how much the outcome changes when a token is replaced",
            module="oarjax.credit.oar.oar_p",
            evidence="released code",
            needs=("importance",),
            roles=("permuted_of", "turn_oar.by", "score"),
            sections=_EXACT,
            lab={
                "OAR-P": {},
                "OAR-P, 2nd choice": {"masking": {"counterfactual": "second_choice"}},
                "OAR-P, mean": {"masking": {"counterfactual": "mean_embedding"}},
                "OAR-P, deleted": {"masking": {"counterfactual": "deleted"}},
            },
        ),
        MethodRecord(
            name="oar_screened",
            label="OAR-P screened",
            about="OAR-P of the tokens that a cheaper method ranks highest",
            module="oarjax.credit.oar.oar_screened",
            needs=("importance",),
            roles=("permuted_of", "turn_oar.by", "score"),
            sections=(*_EXACT, "screen", "fisher", "local", "estimator", "sigma", "draws"),
            lab={"OAR-P, screened": {}},
        ),
        MethodRecord(
            name="oar_l",
            label="OAR-L",
            about="OAR-P that recomputes only the nearest tokens and the answer",
            module="oarjax.credit.oar.oar_l",
            needs=("importance",),
            roles=("permuted_of", "screen.by", "signed_values.by", "turn_oar.by", "score"),
            sections=(*_EXACT, "local"),
        ),
        MethodRecord(
            name="oar_f",
            label="OAR-F",
            about="OAR-P to second order, by backward passes",
            module="oarjax.credit.oar.oar_f",
            needs=("importance",),
            roles=("permuted_of", "screen.by", "signed_values.by", "turn_oar.by", "score"),
            sections=(*_EXACT, "fisher"),
        ),
        MethodRecord(
            name="oar_g",
            label="OAR-G",
            about="the outcome's gradient with respect to the embeddings, under noise",
            module="oarjax.credit.oar.oar_g",
            needs=("importance",),
            roles=("permuted_of", "screen.by", "signed_values.by", "turn_oar.by", "score"),
            sections=("estimator", "sigma", "draws", "probe", "gate", "answer"),
            lab={
                "OAR-G, 1 draw": {"estimator": "linearised", "draws": 1},
                "OAR-G, 4 draws": {"estimator": "linearised", "draws": 4},
                "OAR-G, 16 draws": {"estimator": "linearised", "draws": 16},
                "OAR-G noisy, 1 draw": {"estimator": "noisy", "draws": 1},
                "OAR-G noisy, 4 draws": {"estimator": "noisy", "draws": 4},
            },
        ),
        MethodRecord(
            name="grail",
            label="GRAIL",
            about="the saliency of the answer's likelihood, standardised and clipped",
            module="oarjax.credit.methods.grail",
            evidence="released code",
            needs=("importance",),
            roles=("signed_values.by", "score"),
            sections=("grail", "answer"),
        ),
        MethodRecord(
            name="ktae",
            label="KTAE",
            about="a bonus for token ids that tell a group's correct completions from its wrong ones",
            module="oarjax.credit.methods.ktae",
            evidence="released code",
            kind="bonus",
            coupling="group",
            needs=("tokens", "groups"),
            sections=("ktae",),
        ),
        MethodRecord(
            name="gtpo",
            label="GTPO",
            about="rewards shared out by entropy among a group's rows at a position",
            module="oarjax.credit.experimental.gtpo",
            evidence="description",
            kind="advantages",
            coupling="group",
            needs=("entropies", "groups"),
        ),
        MethodRecord(
            name="token_baseline",
            label="token baseline",
            about="the group's optimal baseline at every position",
            module="oarjax.credit.methods.token_baseline",
            evidence="released code",
            kind="advantages",
            coupling="group",
            needs=("score_norms", "groups"),
        ),
        MethodRecord(
            name="delta",
            label="DelTA",
            about="more for tokens whose gradient points toward their own side (correct or wrong) of the batch",
            module="oarjax.credit.methods.delta",
            evidence="released code",
            coupling="batch",
            needs=("hidden", "logps"),
            sections=("delta",),
        ),
        MethodRecord(
            name="causal_spans",
            label="causal spans",
            about="the drop in the answer's log-probability when a calculation or sentence is masked",
            module="oarjax.credit.methods.causal_spans",
            evidence="released code",
            needs=("importance",),
            sections=("masking", "causal_spans", "answer"),
            lab={},
        ),
        MethodRecord(
            name="dgpo",
            label="DGPO",
            about="more where the policy has moved from the reference and is undecided",
            module="oarjax.credit.experimental.dgpo",
            evidence="description",
            needs=("hellinger", "spread"),
            sections=("dgpo",),
            lab={},
        ),
        MethodRecord(
            name="fipo",
            label="FIPO",
            about="more where what follows has become likelier since the rollout, recomputed in every update",
            module="oarjax.credit.methods.fipo",
            evidence="released code",
            sections=("fipo",),
            lab={},
        ),
        MethodRecord(
            name="crpo",
            label="CRPO",
            about="several rewards, each normalised in the group before they are added",
            module="oarjax.credit.methods.crpo",
            evidence="released code",
            kind="sequence",
            lab={},
        ),
        MethodRecord(
            name="egca",
            label="EGCA",
            about="the whole advantage on marked tokens",
            module="oarjax.credit.experimental.egca",
            evidence="description",
            needs=("marks",),
            sections=("marks",),
            lab={},
        ),
        MethodRecord(
            name="critic_search",
            label="CriticSearch",
            about="a share of the advantage from labels of the turns",
            module="oarjax.credit.experimental.critic_search",
            evidence="description",
            kind="advantages",
            needs=("marks", "turns"),
            sections=("critic_search", "marks"),
            lab={},
        ),
        MethodRecord(
            name="turn_rewards",
            label="turn rewards",
            about="the turns of an episode by what each was worth",
            module="oarjax.credit.methods.turn_rewards",
            kind="advantages",
            needs=("marks", "turns"),
            sections=("turn_rewards", "marks"),
            lab={},
        ),
        MethodRecord(
            name="turn_oar",
            label="turn OAR",
            about="a turn's share of the advantage, then OAR inside the turn",
            module="oarjax.credit.methods.turn_oar",
            kind="advantages",
            needs=("importance", "marks", "turns"),
            sections=("turn_oar", "turn_rewards", "marks", "gate"),
            lab={},
        ),
        MethodRecord(
            name="shear",
            label="SHEAR",
            about="windows weigh by the distance of their states from opposing rows",
            module="oarjax.credit.experimental.shear",
            evidence="description",
            coupling="group",
            needs=("hidden", "groups"),
            sections=("shear",),
            lab={},
        ),
        MethodRecord(
            name="rlsd",
            label="RLSD",
            about="the log-prob ratio to a teacher that sees the answer sets the size of a token's credit",
            module="oarjax.credit.methods.rlsd",
            evidence="released code",
            needs=("teacher_logps", "logps", "iteration"),
            sections=("rlsd", "teacher"),
            lab={},
        ),
        MethodRecord(
            name="serl",
            label="SERL",
            about="RLSD on marked tokens alone",
            module="oarjax.credit.methods.serl",
            evidence="released code",
            needs=("teacher_logps", "logps", "iteration", "marks"),
            sections=("rlsd", "teacher", "marks"),
            lab={},
        ),
        MethodRecord(
            name="sdpg",
            label="SDPG",
            about="GRPO and a KL term towards the policy that sees the answer",
            module="oarjax.credit.methods.sdpg",
            evidence="released code",
            kind="auxiliary",
            needs=("teacher_prompt",),
            sections=("sdpg", "teacher"),
            lab={},
        ),
        MethodRecord(
            name="entropy_top",
            label="entropy, top share",
            about="the share of highest entropy alone",
            module="oarjax.credit.methods.entropy_top",
            evidence="released code",
            coupling="batch",
            needs=("entropies",),
            sections=("entropy",),
            lab={},
        ),
        MethodRecord(
            name="signed_values",
            label="signed values",
            about="what the answer's probability would be with other tokens at a few places, for and against each",
            module="oarjax.credit.methods.signed_values",
            kind="values",
            needs=("importance",),
            sections=("signed_values", *_EXACT, "local", "fisher", "estimator", "sigma", "draws", "grail"),
            lab={},
        ),
        MethodRecord(
            name="entropy",
            label="entropy, gated",
            about="entropies through OAR's gate",
            module="oarjax.credit.methods.entropy",
            needs=("entropies",),
            sections=("gate",),
            lab={"entropy": {}},
        ),
        MethodRecord(
            name="keywords",
            label="keywords",
            about="more for the words of a list",
            module="oarjax.credit.methods.keywords",
            needs=("tokens", "keyword_table"),
            sections=("keywords",),
            lab={},
        ),
        MethodRecord(
            name="random",
            label="random, gated",
            about="random scores through OAR's gate, a control",
            module="oarjax.credit.controls.random_scores",
            sections=("gate",),
            lab={"random": {}},
        ),
        MethodRecord(
            name="permuted",
            label="permuted",
            about="another method's weights on the wrong tokens, the control",
            module="oarjax.credit.controls.permuted",
            needs=("importance",),
            sections=("permuted_of", "gate"),
            lab={},
        ),
        MethodRecord(
            name="uniform",
            label="GRPO",
            about="plain GRPO",
            module="oarjax.credit.controls.uniform",
            lab={"uniform (GRPO)": {}},
        ),
    )
}
"""Name -> record."""


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
        for row_label, changes in ({m.label: {}} if m.lab is None else m.lab).items():
            rows[row_label] = {"method": name, **changes}
    return rows


def reads_reference(method: str) -> bool:
    """Return whether a built-in method compares the policy with the reference."""
    return method in METHODS and bool(OF_REFERENCE & set(METHODS[method].needs))


def unread_settings(method: str) -> list[str]:
    """List the sections of other methods, whose fields change nothing; a custom method may read any."""
    if method == CUSTOM:
        return []
    return [name for name in METHODS if name not in METHODS[method].sections]


def described() -> dict[str, str]:
    """Return what every method does, in a few words, by name."""
    return {name: m.about + " (experimental)" * m.experimental for name, m in METHODS.items()}


def shelf() -> str:
    """Name the experimental methods and say what that means, for the reference of the config."""
    return f"{EXPERIMENTAL}: {', '.join(name for name, m in METHODS.items() if m.experimental)}"
