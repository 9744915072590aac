"""oarjax: GRPO and Outcome-grounded Advantage Reshaping for Qwen policies, as pure functions in JAX.

The public names, each imported when it is first used; importing oarjax itself opens no device, file or network.

    equations     group_advantages, clipped_surrogate, cispo_surrogate, kl_estimate, aggregate, policy_loss
    importance    find_answers, outcome_probe, Probe, Reading, masked_token_importance (OAR-P),
                  gradient_importance (OAR-G), fisher_importance (OAR-F), local_importance (OAR-L), top_share,
                  screened_scores
    weights       normalise, gate, preserve_mass, oar_weights, reshape
    custom method CreditMethod, Signals, Context, Scored
    diagnostics   ess_ratio, top_mass, spearman, recall_at_k
    policies      Policy, QwenConfig, make_policy, read_config, load_params, export
    sampling      sample, token_logps
    types         PromptBatch, Rollout, AnswerSpan, Credit, TrainBatch, Mean, TrainState, KVCache, Grades, Params
    training      Config, load_config, make_optimizer, make_steps, Shardings, iterate, HostCallbacks, GradedAtOnce
    rewards       Sample, reward
    commands      train, credit_lab; Run, open_run for a custom loop
    notebooks     show_curves, show_completions, show_tokens, show_credit, show_lab, show_lab_figure
"""

import os
from importlib import import_module
from typing import Any

# transformers only reads tokenizers here and needs no torch; its notice looks like a broken install.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"

_HOME = {
    "oarjax.rl.advantages": ("group_advantages",),
    "oarjax.rl.surrogates": ("clipped_surrogate", "cispo_surrogate"),
    "oarjax.rl.loss": ("kl_estimate", "aggregate", "policy_loss"),
    "oarjax.credit.answer_span": ("find_answers",),
    "oarjax.credit.probe": ("Probe", "Reading", "outcome_probe"),
    "oarjax.credit.oar.oar_p": ("masked_token_importance",),
    "oarjax.credit.oar.oar_f": ("fisher_importance",),
    "oarjax.credit.oar.oar_l": ("local_importance",),
    "oarjax.credit.oar.oar_screened": ("screened_scores", "top_share"),
    "oarjax.credit.oar.oar_g": ("gradient_importance", "row_keys"),
    "oarjax.credit.gate": ("normalise", "gate", "preserve_mass", "oar_weights", "reshape"),
    "oarjax.credit.diagnose": ("ess_ratio", "top_mass", "spearman", "recall_at_k"),
    "oarjax.credit.method": ("CreditMethod",),
    "oarjax.credit.signals": ("Context", "Scored", "Signals"),
    "oarjax.models.policy": ("Policy",),
    "oarjax.models.qwen": ("make_policy",),
    "oarjax.models.qwen_config": ("QwenConfig",),
    "oarjax.data.hf": ("read_config", "load_params", "export"),
    "oarjax.rollout.sampler": ("sample",),
    "oarjax.rollout.logps": ("token_logps",),
    "oarjax.types": (
        "PromptBatch",
        "Rollout",
        "AnswerSpan",
        "Credit",
        "TrainBatch",
        "Mean",
        "TrainState",
        "KVCache",
        "Grades",
        "Params",
    ),
    "oarjax.grading.rewards": ("Sample", "reward"),
    "oarjax.config": ("Config", "load_config"),
    "oarjax.step.programs": ("Shardings", "make_optimizer", "make_steps"),
    "oarjax.step.iteration": ("HostCallbacks", "iterate"),
    "oarjax.step.host_callbacks": ("GradedAtOnce",),
    "oarjax.run.run": ("Run",),
    "oarjax.notebook": (
        "train",
        "credit_lab",
        "open_run",
        "show_curves",
        "show_completions",
        "show_tokens",
        "show_credit",
        "show_lab",
        "show_lab_figure",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'oarjax' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
