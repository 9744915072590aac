"""Everything from a credit config to functions: how a method scores tokens, and how it weighs them.

A method has two halves. ``scorer`` needs the policy and runs where the rollout is scored; ``weigher`` needs what was
found there (``signals`` says what), the answer spans and the advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from oarjax.config import ConfigError, CreditConfig
from oarjax.credit.clean_pass import linear_pass, stored_pass
from oarjax.credit.controls import permuted_weights, random_scores, uniform_weights
from oarjax.credit.diagnose import ess_ratio, top_mass
from oarjax.credit.entropy import entropy_top_weights
from oarjax.credit.gate import oar_weights, polarised, reweighted_rows
from oarjax.credit.grail import grail_weights, saliency_scores
from oarjax.credit.keywords import KeywordTable, keyword_tokens, keyword_weights
from oarjax.credit.method import CreditMethod, Signal, Signals, TokenCredit, given
from oarjax.credit.oar_f import fisher_scores
from oarjax.credit.oar_g import gradient_scores
from oarjax.credit.oar_l import local_scores
from oarjax.credit.oar_p import masked_scores
from oarjax.credit.oar_screened import screened_scores, top_share
from oarjax.credit.probe import Probe, ProbeMode, outcome_probe, reading_of, scored_tokens
from oarjax.models.policy import Policy
from oarjax.types import AnswerSpan, Mean, Params, Rollout

ATTRIBUTIONS = ("oar_g", "oar_p", "oar_f", "oar_l", "oar_screened")
"""Methods whose importance goes through OAR's gate."""

NEEDS: dict[str, frozenset[Signal]] = {
    "uniform": frozenset(),
    "oar_g": frozenset({"importance"}),
    "oar_p": frozenset({"importance"}),
    "oar_f": frozenset({"importance"}),
    "oar_l": frozenset({"importance"}),
    "oar_screened": frozenset({"importance"}),
    "entropy_top": frozenset({"entropies"}),
    "entropy": frozenset({"entropies"}),
    "keywords": frozenset({"tokens"}),
    "grail": frozenset({"importance"}),
    "random": frozenset(),
    "permuted": frozenset({"importance"}),
}


class Scored(NamedTuple):
    """What a method's attribution found, and the clean states that it made on the way."""

    importance: Float[Array, "B T"] | None
    hidden: Float[Array, "B T D"] | None  # states that predict the completion's tokens


Scorer = Callable[[Params, Rollout, AnswerSpan, Key[Array, "B"], ProbeMode], Scored]
"""(params, rollout, span, row keys, probe mode) -> scores."""


def signals(cfg: CreditConfig, own: CreditMethod | None = None) -> frozenset[Signal]:
    """What the method's weights are made of, beside spans, advantages and masks."""
    return frozenset(_given(own).needs) if cfg.method == "custom" else NEEDS[cfg.method]


def attribution(cfg: CreditConfig, own: CreditMethod | None = None) -> str:
    """The method whose importance is computed: that of ``permuted_of`` for the permuted control.

    For a method of one's own the one that it names; "custom" where it computes its own, or needs none.
    """
    if cfg.method == "custom":
        named = _given(own).importance
        return named if isinstance(named, str) and "importance" in _given(own).needs else "custom"
    return cfg.permuted_of if cfg.method == "permuted" else cfg.method


def check_method(own: CreditMethod, *, place: str) -> None:
    """Refuse a method that asks for what there is not.

    Raises:
        ConfigError: naming ``place``.
    """
    if unknown := set(own.needs) - set(get_args(Signal)):
        raise ConfigError(
            f"{place}: needs {', '.join(map(repr, sorted(unknown)))}; expected some of {', '.join(get_args(Signal))}"
        )
    named = own.importance
    if isinstance(named, str) and named not in (*ATTRIBUTIONS, "grail"):
        raise ConfigError(f"{place}: importance {named!r}; expected {', '.join(ATTRIBUTIONS)}, grail or a function")


def _given(own: CreditMethod | None) -> CreditMethod:
    if own is None:
        raise ConfigError(
            "credit.method: custom needs a method; set credit.function, or give make_steps, scorer or weigher a "
            "custom_method (oarjax.CreditMethod)"
        )
    return own


# --- Scores ----------------------------------------------------------------------------------------------------------


def scorer(
    cfg: CreditConfig,
    policy: Policy,
    *,
    temperature: float,
    pad_id: int,
    custom_probe: Probe | None = None,
    custom_method: CreditMethod | None = None,
) -> Scorer:
    """(params, rollout, span, row keys, probe mode) -> importance and clean states; (None, None) where none is needed.

    ``custom_probe`` takes the place of the built-in modes, for every method but GRAIL, which has its own.

    Raises:
        ConfigError: the method reads an answer and the config looks for none, a counterfactual has no embedding, or
            the method cannot work with whole lines or with a probe of one's own.
    """
    kind = attribution(cfg, custom_method)
    if kind == "custom" and "importance" in signals(cfg, custom_method):
        return _by_function(cfg, policy, custom_method)
    if kind == "grail":
        _check_answer(cfg, kind, None)
        return _by_saliency(cfg, policy, temperature)
    build = {
        "oar_g": _by_gradient,
        "oar_p": _by_masking,
        "oar_f": _by_fisher,
        "oar_l": _locally,
        "oar_screened": _screened,
    }.get(kind)
    if build is None:
        return lambda params, rollout, span, keys, mode: Scored(None, None)
    _check_answer(cfg, kind, custom_probe)
    _check_masking(cfg, kind, custom_probe)
    mask_id = pad_id if cfg.masking.mask_id is None else cfg.masking.mask_id
    return build(cfg, policy, lambda mode: custom_probe or outcome_probe(mode, temperature=temperature), mask_id)


def _check_answer(cfg: CreditConfig, kind: str, custom_probe: Probe | None) -> None:
    if (
        cfg.answer.style == "none"
        and cfg.answer.source == "own"
        and (custom_probe is None or custom_probe.reads == "answer")
    ):
        probe = "" if kind == "grail" else "a credit.probe.function that reads the completion, "
        raise ConfigError(
            f"credit.method: {kind} needs an answer and credit.answer.style is none; set the style of your "
            f"completions' answers, {probe}or a method such as entropy"
        )


def _check_masking(cfg: CreditConfig, kind: str, custom_probe: Probe | None) -> None:
    masking, screened_by = cfg.masking, cfg.screen.by if kind == "oar_screened" else kind
    if masking.counterfactual == "deleted" and screened_by == "oar_f":
        raise ConfigError(
            f"credit.masking.counterfactual: deleted leaves no embedding for {kind} to expand around; set another, "
            "or credit.method to oar_p or oar_l"
        )
    if masking.unit != "token" and kind != "oar_p":
        raise ConfigError(f"credit.masking.unit: {masking.unit} is for oar_p; set token, or credit.method to oar_p")
    if custom_probe is not None and custom_probe.reads != "answer" and screened_by == "oar_l":
        raise ConfigError(
            f"credit.probe.function: {kind} recomputes only the answer's positions and this probe reads the whole "
            "completion; set credit.method to oar_p, oar_g or oar_f, or credit.screen.by to oar_f"
        )


ProbeOf = Callable[[ProbeMode], Probe]


def _by_gradient(cfg: CreditConfig, policy: Policy, probe_of: ProbeOf, mask_id: int) -> Scorer:
    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        params = policy.head(jax.lax.stop_gradient(params))
        clean = linear_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
        found = gradient_scores(
            policy,
            params,
            clean,
            r.tokens,
            r.valid,
            span,
            keys,
            probe=probe_of(mode),
            estimator=cfg.estimator,
            sigma=cfg.sigma,
            draws=cfg.draws,
        )
        return Scored(found, clean.hidden)

    return score


def _by_fisher(cfg: CreditConfig, policy: Policy, probe_of: ProbeOf, mask_id: int) -> Scorer:
    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        params = policy.head(jax.lax.stop_gradient(params))
        clean = linear_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
        found = fisher_scores(
            policy,
            params,
            clean,
            r.tokens,
            r.valid,
            span,
            keys,
            probe=probe_of(mode),
            mask_id=mask_id,
            outcomes=cfg.fisher.outcomes,
            sampled=cfg.fisher.sampled,
            counterfactual=cfg.masking.counterfactual,
        )
        return Scored(found, clean.hidden)

    return score


def _by_masking(cfg: CreditConfig, policy: Policy, probe_of: ProbeOf, mask_id: int) -> Scorer:
    exact = partial(masked_scores, policy, **_exactly(cfg, mask_id))

    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        params, probe = policy.head(jax.lax.stop_gradient(params)), probe_of(mode)
        clean = stored_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
        reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
        return Scored(exact(params, clean, reading, scored, units=span.units, probe=probe), clean.hidden)

    return score


def _locally(cfg: CreditConfig, policy: Policy, probe_of: ProbeOf, mask_id: int) -> Scorer:
    local = partial(local_scores, policy, **_nearby(cfg, mask_id))

    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        params, probe = policy.head(jax.lax.stop_gradient(params)), probe_of(mode)
        clean = stored_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
        reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
        return Scored(local(params, clean, reading, scored, probe=probe), clean.hidden)

    return score


def _screened(cfg: CreditConfig, policy: Policy, probe_of: ProbeOf, mask_id: int) -> Scorer:
    settings = _exactly(cfg, mask_id)
    # A row has only a share of its tokens to score: as many rows at once, so that much fewer of each.
    few = max(1, round(settings["chunk"] * cfg.screen.share))
    exact = partial(masked_scores, policy, units=None, **settings | {"chunk": few})
    local = partial(local_scores, policy, **_nearby(cfg, mask_id))
    other = {"oar_f": _by_fisher, "oar_g": _by_gradient}.get(cfg.screen.by)
    estimates = other(cfg, policy, probe_of, mask_id) if other else None

    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        params, probe = policy.head(jax.lax.stop_gradient(params)), probe_of(mode)
        clean = stored_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
        reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, probe)
        if estimates is not None:
            estimate = given(estimates(params, r, span, keys, mode).importance, "importance", method=cfg.screen.by)
        elif cfg.screen.by == "random":
            estimate = jax.vmap(lambda key: jax.random.uniform(key, (scored.shape[1],)))(keys)
        else:
            estimate = local(params, clean, reading, scored, probe=probe)
        chosen = top_share(jnp.abs(estimate), scored, share=cfg.screen.share)
        found = exact(params, clean, reading, chosen, probe=probe)
        return Scored(screened_scores(found, estimate, chosen, scored), clean.hidden)

    return score


def _by_function(cfg: CreditConfig, policy: Policy, own: CreditMethod | None) -> Scorer:
    function = _given(own).importance

    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        if isinstance(function, str):
            raise ValueError(f"importance: {function} is a name and has a scorer of its own")
        found = function(policy, jax.lax.stop_gradient(params), r, span, keys)
        return Scored(jnp.where(span.reasoning, found, 0), None)

    return score


def _by_saliency(cfg: CreditConfig, policy: Policy, temperature: float) -> Scorer:
    def score(params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], mode: ProbeMode) -> Scored:
        params = policy.head(jax.lax.stop_gradient(params))
        clean = linear_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
        found = saliency_scores(policy, params, clean, r.tokens, r.valid, span, temperature=temperature)
        return Scored(found, clean.hidden)

    return score


def _exactly(cfg: CreditConfig, mask_id: int) -> dict[str, Any]:
    """Settings of OAR-P."""
    m = cfg.masking
    return {"mask_id": mask_id, "chunk": m.chunk, "buckets": m.buckets, "counterfactual": m.counterfactual}


def _nearby(cfg: CreditConfig, mask_id: int) -> dict[str, Any]:
    """Settings of OAR-L."""
    m = cfg.masking
    return {"mask_id": mask_id, "chunk": m.chunk, "counterfactual": m.counterfactual} | cfg.local.model_dump()


# --- Weights ---------------------------------------------------------------------------------------------------------


def weigher(
    cfg: CreditConfig, *, keyword_table: KeywordTable | None = None, custom_method: CreditMethod | None = None
) -> TokenCredit:
    """(signals, span, advantages, completion, key) -> token weights [B, T] by the configured method and polarity.

    Rows without reasoning or answer get ones from the methods that reweight the reasoning. ``entropy_top`` over a
    batch leaves rows of advantage 0 out of its share: they teach nothing, and a run that skips them weighs the same.

    Raises:
        ConfigError: the method needs what is not there.
    """
    weigh = _given(custom_method).weigh if cfg.method == "custom" else _bound(cfg, keyword_table)

    def weights(
        signals: Signals,
        span: AnswerSpan,
        advantages: Float[Array, "B"],
        completion: Bool[Array, "B T"],
        key: Key[Array, ""],
    ) -> Float[Array, "B T"]:
        raw = weigh(signals, span, advantages, completion, key)
        return polarised(raw, advantages, polarity=cfg.polarity)

    return weights


def _bound(cfg: CreditConfig, keyword_table: KeywordTable | None) -> TokenCredit:
    """The method's own weights, before the polarity."""
    method = cfg.method
    gate = partial(oar_weights, **cfg.gate.model_dump())
    if method == "uniform":
        return lambda signals, span, advantages, completion, key: uniform_weights(completion)
    if method in ATTRIBUTIONS:
        return lambda signals, span, advantages, completion, key: gate(
            given(signals.importance, "importance", method=method), span.reasoning
        )
    if method == "permuted":
        return lambda signals, span, advantages, completion, key: permuted_weights(
            gate(given(signals.importance, "importance", method=method), span.reasoning), span.reasoning, key
        )
    if method == "random":
        return lambda signals, span, advantages, completion, key: gate(
            random_scores(key, rows=completion.shape[0], tokens=completion.shape[1]), span.reasoning
        )
    if method == "entropy":
        return lambda signals, span, advantages, completion, key: gate(
            given(signals.entropies, "entropies", method=method), span.reasoning
        )
    return {"entropy_top": _entropy_top, "keywords": _keywords, "grail": _grail}[method](cfg, keyword_table)


def _entropy_top(cfg: CreditConfig, keyword_table: KeywordTable | None) -> TokenCredit:
    def weigh(signals: Signals, span: AnswerSpan, advantages: Array, completion: Array, key: Array) -> Array:
        among = completion
        if cfg.entropy.scope == "batch":
            taught = reweighted_rows(advantages, polarity=cfg.polarity) & (advantages != 0)
            among = completion & taught[:, None]
        entropies = given(signals.entropies, "entropies", method="entropy_top")
        return entropy_top_weights(entropies, among, **cfg.entropy.model_dump())

    return weigh


def _keywords(cfg: CreditConfig, keyword_table: KeywordTable | None) -> TokenCredit:
    if keyword_table is None:
        raise ConfigError(
            "credit.method: keywords needs the words as token ids; give make_steps or weigher a keyword_table "
            "(oarjax.credit.keywords.keyword_table)"
        )

    def weigh(signals: Signals, span: AnswerSpan, advantages: Array, completion: Array, key: Array) -> Array:
        found = keyword_tokens(given(signals.tokens, "tokens", method="keywords"), completion, keyword_table)
        return keyword_weights(found, span.reasoning, boost=cfg.keywords.boost)

    return weigh


def _grail(cfg: CreditConfig, keyword_table: KeywordTable | None) -> TokenCredit:
    if cfg.grail.low > cfg.grail.high:
        raise ConfigError(f"credit.grail.low: {cfg.grail.low} exceeds credit.grail.high = {cfg.grail.high}")

    def weigh(signals: Signals, span: AnswerSpan, advantages: Array, completion: Array, key: Array) -> Array:
        saliency = given(signals.importance, "importance", method="grail")
        return grail_weights(saliency, span.reasoning, span.answer, completion, **cfg.grail.model_dump())

    return weigh


def credit_metrics(w: Float[Array, "B T"], span: AnswerSpan, completion: Bool[Array, "B T"]) -> dict[str, Mean]:
    """Concentration of the weights over rows that reason, and the share of rows without an answer."""
    rows = completion.any(-1)
    counted = rows & span.reasoning.any(-1)

    def row_mean(values: Float[Array, "B"], among: Bool[Array, "B"]) -> Mean:
        known = among & jnp.isfinite(values)  # weights of 0 throughout have no concentration
        return Mean(jnp.sum(jnp.where(known, values, 0)), jnp.sum(known).astype(jnp.float32))

    return {
        "ess": row_mean(ess_ratio(w, span.reasoning), counted),
        "top10": row_mean(top_mass(w, span.reasoning, share=0.1), counted),
        "no_answer": row_mean((~span.found).astype(jnp.float32), rows),
    }
