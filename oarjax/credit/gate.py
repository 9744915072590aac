"""From raw importance to token weights: normalise -> bi-level gate -> preserve mass -> reshape the advantage.

Outcome-grounded Advantage Reshaping, arXiv 2601.07408; formulas and names as in the released code. Each sequence is
weighted on its own and only its reasoning tokens; every other token keeps weight 1.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oarjax.credit.kinds import neutral
from oarjax.credit.record import Kind
from oarjax.credit.signals import Context, CreditInputs, required
from oarjax.rl.checked import ScalarRate, ScalarShare, checked
from oarjax.rl.masked import masked_count, masked_minmax, masked_quantile, masked_sum, widened
from oarjax.types import AnswerSpan

EPS = 1e-8
"""Added to both divisors of the gate, as published."""

Levels = Literal["both", "boost", "suppress"]


@checked
def normalise(
    importance: Float[Array, "B T"],
    reasoning: Bool[Array, "B T"],
    *,
    signs: Literal["clamped", "signed"] = "clamped",
) -> Float[Array, "B T"]:
    """Compute h = minmax(log1p(importance)) over the reasoning tokens of each row, in [0, 1]; 0 elsewhere.

    A row of equal scores is 0 throughout.

    Args:
        importance: raw scores, as the attributions give them.
        reasoning: tokens to weigh, ``AnswerSpan.reasoning``.
        signs: ``clamped`` reads a negative score (a token whose removal makes the answer likelier; only joint probes
            give them) as 0. ``signed`` is the published form: scores in (-1, 0) become negative before min-max, and a
            score at or below -1 turns its whole row into NaN. Default clamped.
    """
    scores = widened(importance)
    scores = jnp.maximum(scores, 0) if signs == "clamped" else scores
    return masked_minmax(jnp.log1p(jnp.where(reasoning, scores, 0)), reasoning)


@checked
def gate(
    h: Float[Array, "B T"],
    reasoning: Bool[Array, "B T"],
    *,
    rule: Literal["quantile", "level"] = "quantile",
    levels: Levels = "both",
    tau: ScalarShare = 0.4,
    boost: ScalarRate = 2.0,
    floor: ScalarShare = 0.1,
) -> Float[Array, "B T"]:
    """Suppress what is below the threshold c, boost what is above it: the bi-level gate. 1 outside the reasoning.

    h < c: max(h / (c + 1e-8), floor), in [floor, 1].   h >= c: 1 + boost (h - c) / (1 - c + 1e-8), in [1, 1 + boost].

    Numbers may be traced, and so mapped: ``jax.vmap(lambda tau: gate(h, reasoning, tau=tau))(taus)``.

    Args:
        h: normalised importance, in [0, 1].
        reasoning: tokens to weigh.
        rule: ``quantile`` puts c at the tau-quantile of the row's own h (as released); ``level`` takes c = tau itself,
            which on skewed scores suppresses far more tokens; default quantile.
        levels: the paper's ablation: ``boost`` leaves what is below c at 1, ``suppress`` what is above; default both.
        tau: see rule, in [0, 1]; default 0.4, as released.
        boost: the largest weight less 1, >= 0; default 2.0, as released.
        floor: the smallest weight, in [0, 1]; default 0.1, as released.

    Raises:
        ArgumentError: an argument does not fit the signature.
    """
    if rule == "quantile":
        c = masked_quantile(h, reasoning, level=tau)[:, None]
    else:
        c = jnp.full((h.shape[0], 1), tau, h.dtype)
    suppressed = 1.0 if levels == "boost" else jnp.maximum(h / (c + EPS), floor)
    # At c = 1 a compiler may add EPS to the 1 first, where it is lost in rounding: the maximum keeps it from 0 / 0.
    boosted = 1.0 if levels == "suppress" else 1 + boost * (h - c) / jnp.maximum(1 - c + EPS, EPS)
    return jnp.where(reasoning, jnp.where(h < c, suppressed, boosted), 1).astype(h.dtype)


@checked
def preserve_mass(weights: Float[Array, "B T"], reasoning: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Scale the reasoning weights of each row to a mean of 1: w * n / sum(w), n = number of reasoning tokens.

    The released code adds 1e-8 to the sum; without it the mass is kept to rounding. Rows whose weights sum to 0 stay.

    Args:
        weights: >= 0, as ``gate`` gives them.
        reasoning: tokens whose weights are scaled; others keep theirs.
    """
    mass = masked_sum(weights, reasoning)
    scale = jnp.where(mass > 0, masked_count(reasoning) / jnp.where(mass > 0, mass, 1), 1)
    return jnp.where(reasoning, weights * scale[:, None], weights)


@checked
def oar_weights(
    importance: Float[Array, "B T"],
    reasoning: Bool[Array, "B T"],
    *,
    rule: Literal["quantile", "level"] = "quantile",
    levels: Levels = "both",
    tau: ScalarShare = 0.4,
    boost: ScalarRate = 2.0,
    floor: ScalarShare = 0.1,
    mass: Literal["kept", "free"] = "kept",
    signs: Literal["clamped", "signed"] = "clamped",
) -> Float[Array, "B T"]:
    """Compute the token weights of OAR, >= 0: ``normalise``, ``gate`` and, with ``mass="kept"``, ``preserve_mass``.

    All ones for a row with no reasoning, with equal scores (nothing to tell apart), or with a NaN or infinite one
    (published: the whole row becomes NaN). Numbers may be traced, see ``gate``.

    Args:
        importance: raw scores, as the attributions give them.
        reasoning: tokens to weigh, ``AnswerSpan.reasoning``.
        rule: where the threshold lies, quantile or level, see ``gate``; default quantile.
        levels: both, boost or suppress, see ``gate``; default both.
        tau: quantile or level of the threshold, in [0, 1]; default 0.4.
        boost: the largest weight less 1, >= 0; default 2.0.
        floor: the smallest weight, in [0, 1]; default 0.1.
        mass: ``kept`` scales a row's weights to a mean of 1, ``free`` does not; default kept.
        signs: of scores, clamped or signed, see ``normalise``; default clamped.

    Raises:
        ArgumentError: an argument does not fit the signature.
    """
    h = normalise(importance, reasoning, signs=signs)
    weights = gate(h, reasoning, rule=rule, levels=levels, tau=tau, boost=boost, floor=floor)
    if mass == "kept":
        weights = preserve_mass(weights, reasoning)
    usable = jnp.all(jnp.isfinite(h), axis=-1) & jnp.any(h > 0, axis=-1)
    return jnp.where(reasoning & usable[:, None], weights, 1)


@checked
def reshape(
    advantages: Float[Array, "B"], weights: Float[Array, "B T"], completion: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Compute token advantages stop_gradient(w) * A, 0 outside the completion.

    With mass kept they sum to A * T_valid over each row, the same as GRPO's; weights of 1 are GRPO itself.

    Args:
        advantages: A of each row, as ``group_advantages`` gives them.
        weights: of each token; a negative one turns the sign of its token's advantage. A run refuses a
            custom method whose weights are negative in its trial, and later counts such rows and warns.
        completion: generated tokens, ``Rollout.completion``.
    """
    return jnp.where(completion, jax.lax.stop_gradient(weights) * advantages[:, None], 0)


Polarity = Literal["both", "correct", "wrong"]


def reweighted_rows(advantages: Float[Array, "B"], *, polarity: Polarity) -> Bool[Array, "B"]:
    """Mark the rows that a polarity lets a method reweight: all, those of A > 0 (correct), or those of A < 0 (wrong).

    Raises:
        ValueError: unknown polarity.
    """
    if polarity == "both":
        return jnp.ones(advantages.shape, bool)
    if polarity == "correct":
        return advantages > 0
    if polarity == "wrong":
        return advantages < 0
    raise ValueError(f"polarity must be both, correct or wrong, got {polarity!r}")


def polarised(
    weights: Float[Array, "B T"], advantages: Float[Array, "B"], *, polarity: Polarity, kind: Kind = "weights"
) -> Float[Array, "B T"]:
    """Keep the weights of the rows that the polarity lets through; 1, or what is neutral for the kind, in the others.

    The last step of every method, so that an exempt row is plain GRPO throughout. In GRAIL's released code the
    answer of an exempt row still gets the largest weight, because its overrides come after the polarity.
    """
    return jnp.where(reweighted_rows(advantages, polarity=polarity)[:, None], weights, neutral(kind, advantages))


def weigh(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by their importance through the configured gate."""
    return gated(required(inputs.signals, "importance", context), inputs.span, context)


def gated(scores: Float[Array, "B T"], span: AnswerSpan, context: Context) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by any scores through the configured gate."""
    return oar_weights(scores, span.reasoning, **vars(context.credit.gate))
