"""The loss of a policy: surrogate, KL penalty, entropy bonus, and how tokens are averaged over a batch.

KL estimators: Schulman, "Approximating KL divergence" (2020); aggregations: GRPO (arXiv 2402.03300), DAPO (2503.14476)
and Dr. GRPO (2503.20783). Advantages are in ``rl/advantages.py``, surrogates in ``rl/surrogates.py``, corrections for
completions that another policy drew in ``rl/off_policy.py``. Log-probs and entropies are in nats.

To add a loss: a function in ``rl/surrogates.py``, its name in ``policy_loss`` here and in ``LossConfig`` of
``config/learning.py``, its settings through ``bound_loss`` of ``step/loss.py``. A custom loss needs none of these:
``loss.function`` names it.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from oarjax.rl.checked import Scalar, ScalarAboveOne, ScalarPositive, ScalarRate, checked, is_traced
from oarjax.rl.masked import masked_mean, masked_sum, widened
from oarjax.rl.off_policy import LOG_RATIO_BOUND, Importance, importance_weights, near_policy
from oarjax.rl.ranges import Positive
from oarjax.rl.surrogates import (
    cispo_surrogate,
    clipped_surrogate,
    dppo_surrogate,
    gmpo_surrogate,
    moved_probability,
    policy_ratio,
    sapo_surrogate,
    vespo_surrogate,
)
from oarjax.types import Mean, TrainBatch

Aggregation = Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo"]
Surrogate = Literal["clip", "cispo", "sapo", "gmpo", "vespo", "dppo"]


@checked
def policy_loss(
    logps: Float[Array, "B T"],
    entropies: Float[Array, "B T"],
    batch: TrainBatch,
    *,
    surrogate: Surrogate = "clip",
    level: Literal["token", "sequence"] = "token",
    aggregation: Aggregation = "dapo",
    clip_low: ScalarRate = 0.2,
    clip_high: ScalarRate = 0.28,
    dual_clip: ScalarAboveOne | None = None,
    ratio_cap: ScalarPositive = 5.0,
    sapo_positive: ScalarPositive = 1.0,
    sapo_negative: ScalarPositive = 1.05,
    vespo_k_positive: ScalarRate = 2.0,
    vespo_lambda_positive: ScalarPositive = 3.0,
    vespo_k_negative: ScalarRate = 3.0,
    vespo_lambda_negative: ScalarPositive = 2.0,
    kl_beta: ScalarRate = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    kl_corrected: bool = False,
    entropy_bonus: Scalar = 0.0,
    importance: Importance | None = None,
    max_drift: ScalarRate | None = None,
    max_length: Positive,
    rows: Literal["filled", "all"] = "filled",
) -> tuple[Mean, dict[str, Mean]]:
    """Compute the loss of a (micro)batch, to be minimised, as a sum and a count, with its metrics.

    Per token: -[importance weight] * surrogate + kl_beta * KL - entropy_bonus * entropy, then ``aggregate``. Without
    ``batch.old_logps`` the step is on-policy: old is the detached ``logps`` and the ratio exactly 1. Take gradients of
    ``.total`` and divide by the summed ``.count``.

    Metrics are token means over the completions, detached: ``ratio``, ``entropy``, ``clip_low`` (A < 0 and the ratio
    below the range) and ``clip_high`` (A > 0 and above it; for CISPO above the cap, for GMPO of the log-ratio, for DPPO
    of the change of the probability), ``kl``
    with a reference, ``sampler_gap`` = |old - behaviour| where the sampler's log-probs are given, ``sampler_weight``
    and ``sampler_masked`` (the share of weights 0) with ``importance``, ``drifted`` with ``max_drift``: the share of
    tokens that ``near_policy`` leaves out, by the sampler's log-probs, or old ones without.

    Args:
        logps: of the tokens under the current policy, nats.
        entropies: of its distributions, nats.
        batch: rows, masks, advantages and the other policies' log-probs.
        surrogate: clip (GRPO), cispo, sapo (arXiv 2511.20347), gmpo (2507.20673), vespo (2602.10693) or dppo
            (2602.04879); the last two compare with the sampler's log-probs where the batch has them; default clip.
        level: ratio of each token, or of the whole sequence (GSPO, 2507.18071); default token.
        aggregation: mean over tokens and rows, see ``aggregate``; default dapo.
        clip_low: for clip, gmpo and dppo, >= 0, see ``clipped_surrogate``; default 0.2. GMPO's is of the log-ratio,
            DPPO's of the probability.
        clip_high: the upper one, >= 0; default 0.28.
        dual_clip: for clip, > 1; default None.
        ratio_cap: for cispo, > 0; default 5.0.
        sapo_positive: for sapo, > 0, where A > 0; default 1.0.
        sapo_negative: for sapo, > 0, elsewhere; default 1.05.
        vespo_k_positive: for vespo, >= 0, where A >= 0; default 2.0.
        vespo_lambda_positive: for vespo, > 0, where A >= 0; default 3.0.
        vespo_k_negative: for vespo, >= 0, elsewhere; default 3.0.
        vespo_lambda_negative: for vespo, > 0, elsewhere; default 2.0.
        kl_beta: weight of the KL to the reference, >= 0; default 0.0.
        kl_estimator: see ``kl_estimate``; default k3.
        kl_corrected: multiply the KL by the ratio, with its gradient, which makes both unbiased where the old policy
            drew the tokens (DeepSeek-V3.2, arXiv 2512.02556, eq. 7); default False.
        entropy_bonus: weight of the entropy, below 0 a penalty, where the batch has none of its own; default 0.0.
        importance: weights for a sampler that is not the old policy, see ``oarjax.rl.off_policy``; default None.
        max_drift: nats per token beyond which a row's tokens of A < 0 are left out, >= 0; default None.
        max_length: T of the longest possible completion, >= 1; divides dr_grpo's sum.
        rows: rows that count, see ``aggregate``; default filled.

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: kl_beta or importance without the log-probs that they need.
    """
    mask = batch.completion

    def inside(values):  # zero before any arithmetic: NaN x 0 in a backward pass is NaN
        return jnp.where(mask, widened(values), 0)

    logps, entropies, advantages = inside(logps), inside(entropies), inside(batch.advantages)
    old = stop_gradient(logps) if batch.old_logps is None else inside(batch.old_logps)
    ref, behaviour = jax.tree.map(inside, (batch.ref_logps, batch.behaviour_logps))  # None stays None
    ratio = policy_ratio(logps, old, mask, level=level)

    if surrogate == "clip":
        objective = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        low, high = (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)
    elif surrogate == "cispo":
        objective = cispo_surrogate(logps, ratio, advantages, ratio_cap=ratio_cap)
        low, high = jnp.zeros_like(mask), ratio > ratio_cap
    elif surrogate == "sapo":
        objective = sapo_surrogate(ratio, advantages, positive=sapo_positive, negative=sapo_negative)
        low = high = jnp.zeros_like(mask)
    elif surrogate == "vespo":
        rates = {"k_positive": vespo_k_positive, "lambda_positive": vespo_lambda_positive}
        rates |= {"k_negative": vespo_k_negative, "lambda_negative": vespo_lambda_negative}
        objective = vespo_surrogate(logps, old if behaviour is None else behaviour, advantages, mask, **rates)
        low = high = jnp.zeros_like(mask)
    elif surrogate == "dppo":
        bounds = {"mask_low": clip_low, "mask_high": clip_high}
        sampler_logps = old if behaviour is None else behaviour
        objective = dppo_surrogate(logps, sampler_logps, advantages, mask, **bounds)
        low, high = moved_probability(logps, sampler_logps, advantages, **bounds)
    else:
        objective = gmpo_surrogate(logps, old, advantages, mask, clip_low=clip_low, clip_high=clip_high)
        low, high = (advantages < 0) & (logps - old < -clip_low), (advantages > 0) & (logps - old > clip_high)
    logged = {"ratio": ratio, "entropy": entropies, "clip_low": low, "clip_high": high}

    if behaviour is not None:
        logged["sampler_gap"] = jnp.abs(old - behaviour)
    if importance is not None:
        if behaviour is None:
            raise ValueError(
                "policy_loss: importance needs batch.behaviour_logps; pass the sampler's log-probs, or None"
            )
        weights = importance_weights(old, behaviour, mask, **importance._asdict())
        logged |= {"sampler_weight": weights, "sampler_masked": weights == 0}
        objective = weights * objective
    if max_drift is not None:
        near = near_policy(logps, old if behaviour is None else behaviour, advantages, mask, max_drift=max_drift)
        logged["drifted"] = ~near
        objective = jnp.where(near, objective, 0)
    loss = -objective

    if ref is not None:
        logged["kl"] = kl_estimate(logps, ref, estimator=kl_estimator) * (ratio if kl_corrected else 1)
        loss = loss + kl_beta * logged["kl"]
    elif is_traced(kl_beta) or kl_beta:
        raise ValueError(f"policy_loss: kl_beta = {kl_beta} needs batch.ref_logps; score a reference or set it to 0")
    entropy_bonus = entropy_bonus if batch.entropy_bonus is None else batch.entropy_bonus
    if is_traced(entropy_bonus) or entropy_bonus:
        loss = loss - entropy_bonus * entropies

    metrics = {name: _token_mean(values, mask) for name, values in logged.items()}
    return aggregate(loss, mask, mode=aggregation, max_length=max_length, rows=rows), metrics


def _token_mean(values: Float[Array, "B T"] | Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Mean:
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))  # shares are bool
    return aggregate(stop_gradient(wide), mask, mode="dapo", max_length=1)


@checked
def aggregate(
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    mode: Aggregation,
    max_length: Positive,
    rows: Literal["filled", "all"] = "filled",
) -> Mean:
    """Reduce token values to a sum and a count, which add exactly over microbatches, devices and hosts.

    mode      total                       count                what a sum of pieces gives
    dapo      sum over tokens             tokens               token mean of the WHOLE batch
    grpo      sum of the rows' means      rows                 mean of the rows' means
    dr_grpo   sum over tokens             rows * max_length    sum over a constant
    luspo     sum over tokens             rows                 mean of the rows' sums
    bnpo      token mean of this piece    1 (0 if it's empty)  mean of the pieces' token means

    The first four do not depend on how the batch is cut; bnpo equals dapo only where pieces have equally many tokens.

    Args:
        values: of each token.
        mask: tokens that count.
        mode: grpo (arXiv 2402.03300, eq. 3), dapo (2503.14476, section 3.3), dr_grpo (2503.20783), luspo (2602.05261:
            with ratios per sequence, GSPO times the length of each row) or bnpo (TRL).
        max_length: T of the longest possible completion, >= 1; read by dr_grpo alone.
        rows: ``filled`` counts rows with at least one token, so that empty rows (padding, ungraded, truncated and
            masked) change nothing; ``all`` counts every row, as TRL does; default filled.
    """
    total = jnp.sum(masked_sum(values, mask))
    tokens = jnp.sum(mask).astype(total.dtype)
    row_count = jnp.sum(jnp.any(mask, axis=-1) | (rows == "all")).astype(total.dtype)
    if mode == "dapo":
        return Mean(total, tokens)
    if mode == "grpo":
        return Mean(jnp.sum(masked_mean(values, mask)), row_count)
    if mode == "dr_grpo":
        return Mean(total, row_count * max_length)
    if mode == "luspo":
        return Mean(total, row_count)
    return Mean(total / jnp.maximum(tokens, 1), jnp.minimum(tokens, 1))


@checked
def kl_estimate(
    logps: Float[Array, "*rows"], ref_logps: Float[Array, "*rows"], *, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> Float[Array, "*rows"]:
    """Estimate KL(policy || reference) from sampled tokens: x = ref - logp, k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1.

    As values k1 and k3 are unbiased, k2 nearly so. As loss terms they differ, for tokens of the current policy: k1
    has no gradient on average, k2 has that of KL(policy || ref), k3 that of KL(ref || policy). k3 caps x at 20.

    Args:
        logps: of the tokens under the current policy, nats.
        ref_logps: under the reference, nats.
        estimator: k1, k2 or k3 (Schulman, 2020; k3 is GRPO's, arXiv 2402.03300, eq. 4); default k3.
    """
    x = widened(ref_logps) - widened(logps)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x * x / 2
    x = jnp.minimum(x, LOG_RATIO_BOUND)
    return jnp.expm1(x) - x


def entropy(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Compute the entropy of softmax(logits) in nats, in [0, log V]; a logit of -inf is an impossible outcome."""
    logps = jax.nn.log_softmax(widened(logits), axis=-1)
    return -masked_sum(jnp.exp(logps) * logps, jnp.isfinite(logps))


def without_truncated(completion: Bool[Array, "B T"], ended: Bool[Array, "B"]) -> Bool[Array, "B T"]:
    """Mask out the rows that were cut before a stop token (DAPO's overlong filtering)."""
    return completion & ended[:, None]
