"""Bind a credit config: the functions that score tokens with a policy, and that weigh them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from oarjax.config import Config, ConfigError, CreditConfig
from oarjax.credit.clean_pass import LinearPass
from oarjax.credit.diagnose import ess_ratio, top_mass
from oarjax.credit.gate import polarised
from oarjax.credit.method import KINDS, MEASURES, OF_REFERENCE, SIGNALS, CreditMethod, resolve
from oarjax.credit.probe import Probe, ProbeMode, outcome_probe
from oarjax.credit.registry import CUSTOM, METHODS
from oarjax.credit.signals import Context, KeywordTable, Scored, Signals, required
from oarjax.models.policy import Policy
from oarjax.types import AnswerSpan, Mean, Params, Rollout

Scorer = Callable[[Params, Rollout, AnswerSpan, Key[Array, "B"], ProbeMode], Scored]
"""(params, rollout, span, row keys, probe mode) -> scores."""

SharedScorer = Callable[[Params, LinearPass, Rollout, AnswerSpan, Key[Array, "B"], ProbeMode], Float[Array, "B T"]]
"""(params, clean pass, rollout, span, row keys, probe mode) -> importance."""

TokenCredit = Callable[
    [Signals, AnswerSpan, Float[Array, "B"], Bool[Array, "B T"], Key[Array, ""]], Float[Array, "B T"]
]
"""(signals, span, advantages, completion, key) -> what the method's kind says; outside the completion unused."""


def method_of(cfg: CreditConfig, custom: CreditMethod | None = None) -> CreditMethod:
    """Return the record of the configured method.

    Raises:
        ConfigError: it is custom, and there is no record.
    """
    if cfg.method != CUSTOM:
        return METHODS[cfg.method]
    if custom is None:
        raise ConfigError(
            "credit.method: custom needs a method; set credit.function, or give make_steps, scorer or weigher a "
            "custom_method (oarjax.CreditMethod)"
        )
    return custom


def signals(cfg: CreditConfig, custom: CreditMethod | None = None) -> frozenset[str]:
    """Return the signals that the method needs beside spans, advantages and masks."""
    return frozenset(method_of(cfg, custom).needs)


def measures(cfg: CreditConfig, custom: CreditMethod | None = None) -> frozenset[str]:
    """Return the signals that are read off the policy's states; see ``oarjax.credit.measures``."""
    return signals(cfg, custom) & set(MEASURES)


def needs_reference(cfg: Config, custom: CreditMethod | None = None) -> bool:
    """Return whether rollouts are scored under the reference policy too: for the KL term, or for a signal."""
    return cfg.loss.kl_beta > 0 or bool(signals(cfg.credit, custom) & OF_REFERENCE)


def taught(cfg: CreditConfig, custom: CreditMethod | None = None) -> dict[str, bool]:
    """Return the uses of a teacher's prompts, as fields of ``oarjax.costs.Work``."""
    wants = signals(cfg, custom)
    return {"teacher": "teacher_logps" in wants, "distilled": "teacher_prompt" in wants}


def check_updates(cfg: Config, custom: CreditMethod | None = None) -> None:
    """Reject numbers of updates that a method cannot work with.

    Raises:
        ConfigError: several minibatches where it reads whole groups, whose rows are dealt to all of them; one update
            per rollout where it weighs anew in every one.
    """
    method = method_of(cfg.credit, custom)
    if method.reweigh is not None and cfg.update.epochs * cfg.update.minibatches == 1:
        raise ConfigError(
            f"update.epochs: 1 with update.minibatches 1 and credit.method {method.name}, which weighs tokens by what "
            "has changed since the rollout; raise one of the two"
        )
    if method.coupling == "group" and cfg.update.minibatches > 1:
        raise ConfigError(
            f"update.minibatches: {cfg.update.minibatches} with credit.method {method.name}, which compares the rows "
            "of a group and needs them in one minibatch; set update.minibatches=1, and update.epochs for more updates"
        )


def attribution(cfg: CreditConfig, custom: CreditMethod | None = None) -> CreditMethod:
    """Return the method whose importance is computed: itself, or the one whose scores it reads."""
    method = method_of(cfg, custom)
    if "importance" not in method.needs or not isinstance(method.score, str) or ":" in method.score:
        return method
    return METHODS[getattr(cfg, method.score) if method.score in CreditConfig.model_fields else method.score]


def draws_noise(cfg: CreditConfig, custom: CreditMethod | None = None) -> bool:
    """Return whether another key gives other scores or weights."""
    method = method_of(cfg, custom)
    if method.noisy is True or cfg.method == CUSTOM:  # a custom method may draw
        return True
    noisy = attribution(cfg, custom).noisy
    return noisy if isinstance(noisy, bool) else resolve(noisy)(cfg)


def check_method(method: CreditMethod, *, place: str) -> None:
    """Reject a custom method with an unknown signal, kind or score.

    Raises:
        ConfigError: naming ``place``.
    """
    if unknown := set(method.needs) - set(SIGNALS):
        raise ConfigError(
            f"{place}: needs {', '.join(map(repr, sorted(unknown)))}; expected some of {', '.join(SIGNALS)}"
        )
    if method.kind not in KINDS:
        raise ConfigError(f"{place}: kind {method.kind!r}; expected one of {', '.join(KINDS)}")
    score, scored = method.score, [name for name, m in METHODS.items() if m.score is not None and ":" in str(m.score)]
    if isinstance(score, str) and ":" not in score and score not in scored:
        raise ConfigError(f"{place}: score {score!r}; expected {', '.join(scored)}, module:function or a function")
    if "importance" in method.needs and score is None:
        raise ConfigError(f"{place}: needs importance and has no score; expected {', '.join(scored)} or a function")


def reward_columns(
    cfg: Config, rewards: Float[Array, "B"], values: dict[str, Float[Array, "B"]]
) -> tuple[Float[Array, "B K"], list[float]]:
    """Return the value of each reward in a column, NaN in rows without a reward, and the weights of the columns."""
    weights = {reward.name: reward.weight for reward in cfg.grading.rewards} | {"overlong": 1.0}
    names = [name for name in weights if name in values]
    columns = jnp.stack([jnp.where(jnp.isfinite(rewards), values[name], jnp.nan) for name in names], axis=1)
    return columns, [weights[name] for name in names]


def row_advantages(cfg: Config, custom: CreditMethod | None = None) -> Callable[..., Float[Array, "B"]] | None:
    """Return (rewards, values of each reward by name) -> A [B] of a method of kind sequence; None for the others."""
    method = method_of(cfg.credit, custom)
    if method.advantage is None:
        return None
    function = resolve(method.advantage)

    def advantages(rewards: Float[Array, "B"], values: dict[str, Float[Array, "B"]]) -> Float[Array, "B"]:
        columns, weights = reward_columns(cfg, rewards, values)
        return function(columns, weights, group_size=cfg.rollout.group_size, advantage=cfg.advantage)

    return advantages


def scorer(
    cfg: CreditConfig,
    policy: Policy,
    *,
    temperature: float,
    pad_id: int,
    custom_probe: Probe | None = None,
    custom_method: CreditMethod | None = None,
) -> Scorer:
    """Return a function (params, rollout, span, row keys, probe mode) -> importance and clean states, or None for both.

    ``custom_probe`` replaces the built-in modes, except for GRAIL, which has its own. No gradient
    flows to ``params``, and scores outside the reasoning are 0.

    Raises:
        ConfigError: the method reads an answer and the config looks for none, its settings cannot go together, or the
            policy cannot compute what it needs.
    """
    method = attribution(cfg, custom_method)
    if "importance" not in method.needs or method.score is None:
        return lambda params, rollout, span, keys, mode: Scored(None)
    _check_answer(cfg, method, custom_probe)
    _check_policy(cfg, method, policy)
    if method.check is not None:
        resolve(method.check)(cfg, custom_probe)
    score = resolve(method.score)
    context_for = partial(_context, cfg, temperature, pad_id, custom_probe)

    def scores(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        context = context_for(mode)
        result = score(policy, jax.lax.stop_gradient(params), r, span, keys, context)
        scored = result if isinstance(result, Scored) else Scored(result)
        importance = required(scored, "importance", context)
        return scored._replace(importance=jnp.where(span.reasoning, importance, 0))

    return scores


def _context(
    cfg: CreditConfig, temperature: float, pad_id: int, custom_probe: Probe | None, mode: ProbeMode
) -> Context:
    """Return the settings of a score function; a masked token becomes the pad token unless credit.masking has an id."""
    mask_id = pad_id if cfg.masking.mask_id is None else cfg.masking.mask_id
    probe = custom_probe or outcome_probe(mode, temperature=temperature)
    return Context(cfg, temperature=temperature, mask_id=mask_id, probe=probe)


def _check_policy(cfg: CreditConfig, method: CreditMethod, policy: Policy) -> None:
    screened = method.name == "oar_screened"
    used = METHODS.get(cfg.screen.by, method) if screened else method
    if policy.first_slots is None and used.cuts:
        raise ConfigError(
            f"credit.{'screen.by' if screened else 'method'}: {used.name} computes places inside a row again, "
            "and this policy's gated delta nets depend on every token before; set credit.method to oar_p, oar_g or "
            "oar_f, or credit.screen.by to oar_f"
        )


def shared_scorer(
    cfg: CreditConfig,
    policy: Policy,
    *,
    temperature: float,
    pad_id: int,
    custom_probe: Probe | None = None,
    custom_method: CreditMethod | None = None,
) -> SharedScorer | None:
    """Return the ``scorer`` that starts from a clean pass shared with an update; None if the method has none."""
    method = method_of(cfg, custom_method)
    if method.shared is None:
        return None
    score = resolve(method.shared)
    context_for = partial(_context, cfg, temperature, pad_id, custom_probe)

    def scores(
        params: Params, clean: LinearPass, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode
    ) -> Float[Array, "B T"]:
        importance = score(policy, jax.lax.stop_gradient(params), clean, r, span, keys, context_for(mode))
        return jnp.where(span.reasoning, importance, 0)

    return scores


def _check_answer(cfg: CreditConfig, method: CreditMethod, custom_probe: Probe | None) -> None:
    probed = method.answer == "probed"
    read = method.answer == "read" or (probed and (custom_probe is None or custom_probe.reads == "answer"))
    if read and cfg.answer.style == "none" and cfg.answer.source == "own":
        probe = "a credit.probe.function that reads the completion, " if probed else ""
        raise ConfigError(
            f"credit.method: {method.name} needs an answer and credit.answer.style is none; set the style of your "
            f"completions' answers, {probe}or a method such as entropy"
        )


def weigher(
    cfg: CreditConfig, *, keyword_table: KeywordTable | None = None, custom_method: CreditMethod | None = None
) -> TokenCredit:
    """Return a function (signals, span, advantages, completion, key) -> the method's result [B, T], under the polarity.

    Rows without reasoning or answer get ones from the methods that reweight the reasoning. ``entropy_top`` over a
    batch leaves rows of advantage 0 out of its share: they teach nothing, and a run that skips them weighs the same.

    Raises:
        ConfigError: the method needs what is not there.
    """
    method = method_of(cfg, custom_method)
    if "keyword_table" in method.needs and keyword_table is None:
        raise ConfigError(
            f"credit.method: {method.name} needs the words as token ids; give make_steps or weigher a keyword_table "
            "(oarjax.credit.keywords.keyword_table)"
        )
    weigh, context = resolve(method.weigh), Context(cfg, keyword_table=keyword_table)

    def weights(
        signals: Signals,
        span: AnswerSpan,
        advantages: Float[Array, "B"],
        completion: Bool[Array, "B T"],
        key: Key[Array, ""],
    ) -> Float[Array, "B T"]:
        raw = weigh(signals, span, advantages, completion, key, context)
        return polarised(raw, advantages, polarity=cfg.polarity, kind=method.kind)

    return weights


def credit_metrics(w: Float[Array, "B T"], span: AnswerSpan, completion: Bool[Array, "B T"]) -> dict[str, Mean]:
    """Measure the concentration of the weights over rows that reason, and the share of rows without an answer."""
    rows = completion.any(-1)
    counted = rows & span.reasoning.any(-1)

    def row_mean(values: Float[Array, "B"], among: Bool[Array, "B"]) -> Mean:
        known = among & jnp.isfinite(values)  # weights of 0 throughout have no concentration
        return Mean(jnp.sum(jnp.where(known, values, 0)), jnp.sum(known).astype(jnp.float32))

    return {
        "ess": row_mean(ess_ratio(w, span.reasoning), counted),
        "top10": row_mean(top_mass(w, span.reasoning, share=0.1), counted),
        "no_answer": row_mean((~span.has_answer).astype(jnp.float32), rows),
    }
