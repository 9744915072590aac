"""Causal spans (arXiv 2602.09331): a calculation or sentence is masked, and its tokens weigh by the answer's loss.

Evidence: released code read (its authors' trainer in aligntune). Departures: reasoning and answer are those that
``credit.answer`` finds, where the released code scores all that follows the first marker, padding included, and gives
``credit.causal_spans.answer`` to what follows "Final answer" or "####" alone; a row without an answer gets ones. Which
spans there are is in ``oarjax.credit.methods.calculation_spans``; ``credit.masking`` says how they are masked.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, masked_flops
from oarjax.credit.clean_pass import stored_pass
from oarjax.credit.gate import preserve_mass
from oarjax.credit.method import CreditMethod
from oarjax.credit.methods.calculation_spans import NO_TEXT
from oarjax.credit.oar.oar_p import masked_scores, places, settings_of
from oarjax.credit.probe import Probe, Reading, answer_logp, reading_of, scored_tokens
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Scored, required
from oarjax.errors import ConfigError
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.masked import widened
from oarjax.types import AnswerSpan, Params, Rollout

FORMATTING = 0.1
"""Factor of the importance of tokens that are formatting, as released."""


def _summed_logp(policy: Policy, params: Params, hidden: Float[Array, "B T D"], at: Reading) -> Float[Array, "B"]:
    mean = answer_logp(policy, params, hidden, at.answer, at.tokens, temperature=1.0)
    return at.answer.sum(axis=1) * mean


ANSWER_LOGP = Probe(_summed_logp, kind="scalar", reads="answer")
"""The log-probability of the whole answer at temperature 1, in nats."""


def span_weights(
    drops: Float[Array, "B T"],
    reasoning: Bool[Array, "B T"],
    completion: Bool[Array, "B T"],
    labels: Int[Array, "B T"] | None = None,
    *,
    boost: float = 2.0,
    floor: float = 0.5,
    answer: float = 1.5,
) -> Float[Array, "B T"]:
    """Compute w = floor + (boost - floor) v on the reasoning, v = .5 + .5 x, and ``answer`` behind it; then mean 1.

    x is the row's drops over its reasoning, scaled to 0 .. 1; 0 throughout where they are equal. v is cut to a tenth on
    formatting. Tokens without text (see ``calculation_spans.find_calculations`` for labels) keep 1. Rows without
    reasoning, or with a drop that is not finite, get ones.

    Args:
        drops: of the token's span, per token of it; 0 in no span.
    """
    half = jnp.where(reasoning, widened(drops), 0) / 2  # the difference of two numbers may overflow
    usable = reasoning.any(-1) & jnp.all(jnp.isfinite(half), axis=-1)
    half = jnp.where(usable[:, None], half, 0)
    low = jnp.min(jnp.where(reasoning, half, jnp.inf), axis=-1, keepdims=True)
    span = jnp.max(jnp.where(reasoning, half, -jnp.inf), axis=-1, keepdims=True) - low
    importance = 0.5 + 0.5 * jnp.where(reasoning & (span > 0), (half - low) / jnp.where(span > 0, span, 1), 0)
    text = completion
    if labels is not None:
        importance = jnp.where(labels % 2 == 1, FORMATTING * importance, importance)
        text = completion & (labels != NO_TEXT)
    weights = jnp.where(reasoning, floor + (boost - floor) * importance, answer)
    return jnp.where(text & usable[:, None], preserve_mass(weights, text), 1)


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score the tokens of a span by the drop in the answer's log-probability without it, over their number."""
    if span.units is None:
        raise ValueError("causal_spans: needs the spans, got None; give AnswerSpan(units=find_calculations(...))")
    params, settings, length = policy.head(params), settings_of(context), span.answer.shape[1]
    options = places(length, chunk=settings["chunk"], buckets=settings["buckets"])
    clean = stored_pass(policy, params, r.tokens, r.valid, **options)
    reading, scored = reading_of(r.tokens, r.valid, span), scored_tokens(span, ANSWER_LOGP) & (span.units >= 0)
    drops = masked_scores(policy, params, clean, reading, scored, units=span.units // 2, probe=ANSWER_LOGP, **settings)
    return Scored(drops, clean.hidden)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the tokens by the drops of their spans."""
    settings = context.credit.causal_spans
    return span_weights(
        required(inputs.signals, "importance", context),
        inputs.span.reasoning,
        inputs.completion,
        inputs.span.units,
        boost=settings.boost,
        floor=settings.floor,
        answer=settings.answer,
    )


def check(cfg: CreditSettings, probe: Probe | None) -> None:
    """Refuse other units than the method's own, and a probe of another outcome.

    Raises:
        ConfigError: masking.unit is not token, or there is a custom probe.
    """
    if cfg.masking.unit != "token":
        raise ConfigError(
            f"credit.masking.unit: causal_spans finds calculations and sentences by itself, got {cfg.masking.unit}; "
            "set token, or credit.method=oar_p"
        )
    if probe is not None:
        raise ConfigError(
            "credit.probe.function: causal_spans reads the answer's log-probability; set null, or credit.method=oar_p"
        )


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes, with as many spans as allowed, spread evenly."""
    share = min(1.0, settings.causal_spans.spans / max(row.reasoning, 1))
    return masked_flops(d, row, share=share) / clean_flops(d, row)


METHOD = CreditMethod(
    weigh,
    name="causal_spans",
    needs=("importance",),
    score=score,
    answer="read",
    check=check,
    forwards=forwards,
)
