"""GRAIL (arXiv 2606.04889): token weights from the saliency of the answer's likelihood, gradient times activation.

Formulas as in its released trainer. Departures: token t is scored by its own embedding, not by that of the token
before it; the answer is the last one and without its marker; log saliency is standardised over the reasoning alone,
since tokens at and after the answer's end have a saliency of 0 by causality and would set the scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, saliency_flops
from oarjax.credit.clean_pass import LinearPass, linear_pass
from oarjax.credit.method import CreditMethod
from oarjax.credit.probe import answer_logp, from_inputs, reading_of
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Scored, required
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.masked import masked_mean, masked_min, widened
from oarjax.types import AnswerSpan, Params, Rollout

EPS = 1e-8
"""Added to the saliency inside the logarithm and to the variance, as released."""


def log_zscores(saliency: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Compute z = (log(s + 1e-8) - mean) / sqrt(var + 1e-8) over the valid tokens of each row, 0 elsewhere."""
    logs = jnp.log(jnp.where(mask, widened(saliency), 1) + EPS)
    logs = logs - masked_min(logs, mask)[:, None]  # equal scores give 0 exactly, not rounding over 1e-4
    centred = jnp.where(mask, logs - masked_mean(logs, mask)[:, None], 0)
    return centred / jnp.sqrt(masked_mean(centred**2, mask) + EPS)[:, None]


def grail_weights(
    saliency: Float[Array, "B T"],
    reasoning: Bool[Array, "B T"],
    answer: Bool[Array, "B T"],
    completion: Bool[Array, "B T"],
    *,
    mean: float = 1.0,
    spread: float = 0.5,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[Array, "B T"]:
    """Compute clip(mean + spread * z, low, high) on the reasoning; ``high`` on the answer, ``mean`` on the rest.

    The rest are the answer's marker and what follows it. Rows with no answer, or with a saliency that is NaN,
    infinite or negative, get ones, and so does everything outside the completion. Equal saliencies give ``mean``.
    The mass of a row is not kept.

    Raises:
        ValueError: not 0 <= low <= high, or negative mean or spread.
    """
    if not 0 <= low <= high or mean < 0 or spread < 0:
        raise ValueError(
            "grail_weights: expected 0 <= low <= high, mean >= 0 and spread >= 0, "
            f"got low={low}, high={high}, mean={mean}, spread={spread}"
        )
    z = log_zscores(saliency, reasoning)
    weights = jnp.where(reasoning, jnp.clip(mean + spread * z, low, high), jnp.where(answer, high, mean))
    sound = jnp.where(reasoning, jnp.isfinite(saliency) & (saliency >= 0), True)
    usable = jnp.any(answer, axis=-1) & jnp.all(sound, axis=-1)
    return jnp.where(completion & usable[:, None], weights, 1)


def answer_saliency(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    temperature: float,
) -> Float[Array, "B T"]:
    """Compute s_t = || (dL/de_t) * e_t ||_2, L = -sum_k log pi(answer token k), where rows with an answer reason.

    The product is elementwise, over the D entries of the token's own embedding. 0 elsewhere. One backward pass; no
    gradient flows to ``params``.

    Raises:
        ValueError: no prompt position before the completion.
    """
    params = policy.head(jax.lax.stop_gradient(params))
    clean = linear_pass(policy, params, tokens, valid, completion_length=span.answer.shape[1])
    return saliency_scores(policy, params, clean, tokens, valid, span, temperature=temperature)


def saliency_scores(
    policy: Policy,
    params: Params,
    clean: LinearPass,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    *,
    temperature: float,
) -> Float[Array, "B T"]:
    """Compute ``answer_saliency`` after a clean pass."""
    at, count = reading_of(tokens, valid, span), span.answer.sum(axis=1)

    def loss(hidden: Float[Array, "B T D"]) -> Float[Array, ""]:
        return -jnp.sum(count * answer_logp(policy, params, hidden, at.answer, at.tokens, temperature=temperature))

    product = clean.pull(jax.grad(loss)(clean.hidden)) * clean.embeddings
    wide = product.astype(jnp.promote_types(product.dtype, jnp.float32))
    scored = span.reasoning & (count > 0)[:, None]
    return jnp.where(scored, from_inputs(jnp.linalg.norm(wide, axis=-1)), 0)


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout by the saliency of its answer."""
    params = policy.head(params)
    clean = linear_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
    saliency = saliency_scores(policy, params, clean, r.tokens, r.valid, span, temperature=context.temperature)
    return Scored(saliency, clean.hidden)


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh tokens by their standardised log saliency."""
    saliency = required(inputs.signals, "importance", context)
    settings = vars(context.credit.grail)
    return grail_weights(saliency, inputs.span.reasoning, inputs.span.answer, inputs.completion, **settings)


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes."""
    return saliency_flops(d, row) / clean_flops(d, row)


METHOD = CreditMethod(
    weigh, name="grail", needs=("importance",), score=score, answer="read", forwards=forwards, grouped=True
)
