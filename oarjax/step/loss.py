"""Bind the losses of a microbatch: of the policy with its credit method, and of the warm start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from oarjax.config.learning import LossConfig, OffPolicyConfig, RolloutConfig
from oarjax.credit.resolved import ResolvedMethod
from oarjax.models.moe import balance_loss
from oarjax.models.policy import Policy, positions_of
from oarjax.rl.loss import aggregate, policy_loss
from oarjax.rl.off_policy import Importance, importance_weights
from oarjax.rollout.filters import Filters
from oarjax.rollout.logps import hidden_logps, last_states, token_logps
from oarjax.types import Mean, Params, Rollout, Routing, TrainBatch

Metrics = dict[str, Mean]
Loss = Callable[[Params, TrainBatch], tuple[Mean, Metrics]]
"""Loss of one microbatch as a sum and a count, and its metrics."""

TokenLoss = Callable[[Float[Array, "B T"], Float[Array, "B T"], TrainBatch], tuple[Mean, Metrics]]
"""(log-probs, entropies, batch) -> the same: what ``loss.function`` names instead of ``policy_loss``.

Its sums are added over microbatches and divided by what ``loss.aggregation`` counts in the whole rollout.
"""


GAP_BOUNDS = 2.0 ** np.arange(-20, 5.25, 0.25, dtype=np.float32)
"""Bounds between which gaps of log-probs are counted, in nats: each 19% above the one before."""

GAP_COUNTS = "sampler_gap/counts"
"""Metric of the tokens whose gap exceeds each bound; ``gap_metrics`` reads it."""


def policy_gradient(
    policy: Policy,
    rollout: RolloutConfig,
    settings: LossConfig,
    method: ResolvedMethod,
    custom_loss: TokenLoss | None = None,
    *,
    head_chunk: int,
) -> Loss:
    """Return the loss of training for one microbatch, with the credit method's part in every update."""
    length = rollout.max_new
    of_tokens = custom_loss or bound_loss(settings, max_length=length)
    head = loss_head(rollout, settings.off_policy, head_chunk=head_chunk)
    reweighed = method.reweigher()
    auxiliary = method.auxiliary_loss(policy, temperature=head["temperature"], head_chunk=head["head_chunk"])

    def loss(params: Params, batch: TrainBatch) -> tuple[Mean, Metrics]:
        T = batch.completion.shape[-1]
        hidden, routing = _states(policy, params, batch)
        logps, entropies = hidden_logps(policy, params, hidden, batch.tokens[:, -T:], **head)
        mean, metrics = of_tokens(logps, entropies, batch if reweighed is None else reweighed(logps, batch))
        terms = {} if auxiliary is None else {"auxiliary": auxiliary(params, hidden, batch)}
        if routing is not None:
            balance = balance_loss(routing)
            metric = Mean(jax.lax.stop_gradient(balance), jnp.ones((), jnp.float32))
            metrics = metrics | router_metrics(routing) | {"router/balance": metric}
            if settings.router_balance > 0:
                per_token = jnp.broadcast_to(balance, batch.completion.shape)
                terms["router_balance"] = settings.router_balance * jnp.where(batch.completion, per_token, 0)
        for name, term in terms.items():
            term_mean = aggregate(term, batch.completion, mode=settings.aggregation, max_length=length)
            mean = replace(mean, total=mean.total + term_mean.total)
            metric = aggregate(jax.lax.stop_gradient(term), batch.completion, mode="dapo", max_length=1)
            metrics = metrics | {name: metric}
        return mean, metrics

    return loss


def _states(policy: Policy, params: Params, batch: TrainBatch) -> tuple[Float[Array, "b T D"], Routing | None]:
    """Return the states that predict the completions and, of a mixture, the routing of all inputs that predict a token.

    The experts are those of the batch where it has them.
    """
    T = batch.completion.shape[-1]
    if policy.routed is None:
        return last_states(policy, params, batch.tokens, batch.valid, completion_length=T), None
    embeddings, positions = policy.embed(params, batch.tokens), positions_of(batch.valid)
    counted = batch.valid & jnp.pad(batch.valid[:, 1:], ((0, 0), (0, 1)))
    options = {"experts": batch.experts, "counted": counted}
    hidden, _, routing = policy.routed(params, embeddings, positions, batch.valid, **options)
    return hidden[:, -T - 1 : -1], routing


def router_metrics(routing: Routing) -> Metrics:
    """Return how evenly the tokens of a microbatch spread over experts: means over layers.

    router/load_max   the fullest expert's share of the choices, times the number of experts: 1 where all are equal
    router/idle       share of experts that no token chose
    router/entropy    of the shares, over the log of the number of experts: 1 where all are equal
    """
    load = jax.lax.stop_gradient(routing.load)
    share = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1)
    count = load.shape[-1]
    logs = jnp.log(jnp.where(share > 0, share, 1))
    per_layer = {
        "load_max": jnp.max(share, axis=-1) * count,
        "idle": jnp.mean(load == 0, axis=-1),
        "entropy": -jnp.sum(share * logs, axis=-1) / jnp.log(count),
    }
    layers = jnp.float32(load.shape[0])
    return {f"router/{name}": Mean(jnp.sum(x).astype(jnp.float32), layers) for name, x in per_layer.items()}


def imitation(policy: Policy, *, head_chunk: int) -> Loss:
    """Return the loss of the warm start for one microbatch."""

    def loss(params: Params, batch: TrainBatch) -> tuple[Mean, Metrics]:
        logps, entropies = token_logps(
            policy,
            params,
            batch.tokens,
            batch.valid,
            completion_length=batch.completion.shape[-1],
            temperature=1.0,
            head_chunk=head_chunk,
        )
        token_mean = partial(aggregate, mask=batch.completion, mode="dapo", max_length=1)
        return token_mean(-logps), {"entropy": token_mean(jax.lax.stop_gradient(entropies))}

    return loss


class HeadSettings(TypedDict):
    """Settings of the head whose log-probs the loss compares."""

    temperature: float
    head_chunk: int
    filters: Filters | None  # None: the distributions are whole


def loss_head(rollout: RolloutConfig, off_policy: OffPolicyConfig, *, head_chunk: int) -> HeadSettings:
    """Return the head of the distributions that the loss compares: those the sampler drew from, or whole ones."""
    unfiltered = off_policy.support == "whole"
    filters = None if unfiltered else Filters(rollout.top_k, rollout.top_p, rollout.min_p)
    return HeadSettings(temperature=rollout.temperature, head_chunk=head_chunk, filters=filters)


def sampler_logps(off_policy: OffPolicyConfig, rollout: Rollout) -> Float[Array, "*rows T"]:
    """Return the sampler's log-probs of the distribution that the loss compares with."""
    return rollout.behaviour_logps if off_policy.support == "whole" else rollout.filtered_logps


def sampler_spread(logps: Float[Array, "B T"], batch: TrainBatch, *, off_policy: OffPolicyConfig) -> Metrics:
    """Count the tokens whose log-probs differ from the sampler's by more than each bound, and those truncated for it.

    What no sum over microbatches gives, the 99th percentile and the maximum, is read from the counts.
    """
    if batch.behaviour_logps is None:
        return {}
    old_logps = jax.lax.stop_gradient(logps) if batch.old_logps is None else batch.old_logps
    mask, tokens = batch.completion, jnp.sum(batch.completion).astype(jnp.float32)
    gaps = jnp.where(mask, jnp.abs(old_logps - batch.behaviour_logps), 0).astype(jnp.float32)
    tokens_above = jnp.sum(gaps[..., None] > GAP_BOUNDS, axis=(0, 1)).astype(jnp.float32)
    metrics = {GAP_COUNTS: Mean(tokens_above, tokens)}
    if off_policy.weighting in ("token_truncate", "sequence_truncate"):
        bounds = {"low": off_policy.low, "high": off_policy.high}
        weights = importance_weights(old_logps, batch.behaviour_logps, mask, weighting=off_policy.weighting, **bounds)
        at_bound = ((weights >= off_policy.high) | (weights <= off_policy.low)) & mask
        metrics["sampler_truncated"] = Mean(jnp.sum(at_bound).astype(jnp.float32), tokens)
    return metrics


def token_loss(
    settings: LossConfig, rollout: RolloutConfig, *, lag: int, custom_loss: TokenLoss | None = None
) -> TokenLoss:
    """Return the loss of tokens, with the metrics of ``sampler_spread`` unless the policy itself has drawn them."""
    of_tokens = custom_loss or bound_loss(settings, max_length=rollout.max_new)
    if not (rollout.outside or rollout.cache == "int8" or lag):
        return of_tokens

    def with_spread(
        logps: Float[Array, "B T"], entropies: Float[Array, "B T"], batch: TrainBatch
    ) -> tuple[Mean, Metrics]:
        mean, metrics = of_tokens(logps, entropies, batch)
        return mean, metrics | sampler_spread(logps, batch, off_policy=settings.off_policy)

    return with_spread


def gap_metrics(counts: Mean | None) -> dict[str, float]:
    """Return the 99th percentile and the largest of the gaps that were counted, if any, rounded up to a bound."""
    if counts is None or counts.count == 0:
        return {}
    tokens_above, tokens = np.asarray(counts.total), float(counts.count)

    def smallest_bound(share: float) -> float:
        indices = np.flatnonzero(tokens_above <= share * tokens)
        return float(GAP_BOUNDS[indices[0]]) if len(indices) else float("inf")

    return {"sampler_gap/p99": smallest_bound(0.01), "sampler_gap/max": smallest_bound(0.0)}


def bound_loss(cfg: LossConfig, *, max_length: int) -> TokenLoss:
    """Bind ``policy_loss`` to a run's settings."""
    off = cfg.off_policy
    return partial(
        policy_loss,
        surrogate=cfg.surrogate,
        level=cfg.level,
        aggregation=cfg.aggregation,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
        ratio_cap=cfg.ratio_cap,
        sapo_positive=cfg.sapo_positive,
        sapo_negative=cfg.sapo_negative,
        vespo_k_positive=cfg.vespo_k_positive,
        vespo_lambda_positive=cfg.vespo_lambda_positive,
        vespo_k_negative=cfg.vespo_k_negative,
        vespo_lambda_negative=cfg.vespo_lambda_negative,
        kl_beta=cfg.kl_beta if cfg.kl_in == "loss" else 0.0,
        kl_estimator=cfg.kl_estimator,
        kl_corrected=cfg.kl_corrected,
        entropy_bonus=cfg.entropy_bonus,
        importance=None if off.weighting == "none" else Importance(off.weighting, off.low, off.high),
        max_drift=off.max_drift,
        max_length=max_length,
    )
