"""Compute losses of a microbatch, sum gradients over microbatches, and apply them in one optimizer update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from oarjax.config import Config, LossConfig
from oarjax.credit.method import CreditMethod
from oarjax.credit.update import auxiliary_loss, reweigher
from oarjax.models.lora import join_params
from oarjax.models.moe import balance_loss
from oarjax.models.policy import Policy, positions_of
from oarjax.rl.loss import aggregate, policy_loss
from oarjax.rl.masked import widened
from oarjax.rl.off_policy import Importance
from oarjax.rollout.filters import Filters
from oarjax.rollout.logps import hidden_logps, last_states, token_logps
from oarjax.step.metrics import NONFINITE, all_finite
from oarjax.step.minibatches import Bucket, cut
from oarjax.types import Mean, Params, Rollout, Routing, TrainBatch, TrainState

Metrics = dict[str, Mean]
Loss = Callable[[Params, TrainBatch], tuple[Mean, Metrics]]
"""Loss of one microbatch as a sum and a count, and its metrics."""

TokenLoss = Callable[[Float[Array, "B T"], Float[Array, "B T"], TrainBatch], tuple[Mean, Metrics]]
"""(log-probs, entropies, batch) -> the same: what ``loss.function`` names instead of ``policy_loss``.

Its sums are added over microbatches and divided by what ``loss.aggregation`` counts in the whole rollout.
"""


class Sums(NamedTuple):
    """Sums over microbatches before an update."""

    grads: Params  # of the summed losses, float32 or wider
    loss: Mean
    metrics: Metrics


Summed = Callable[[Params, Params | None, TrainBatch], Sums]
"""(params, frozen params, microbatch [b, ...]) -> loss, gradient and metrics of one microbatch."""


def gradient_sums(loss: Loss) -> Summed:
    """Return the gradient of a loss, traced once for its shapes and for the loop; frozen params have no gradient."""

    def sums_of(params: Params, frozen: Params | None, rows: TrainBatch) -> Sums:
        def total(params: Params) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
            mean, metrics = loss(join_params(frozen, params), rows)
            return mean.total, (mean, metrics)

        (_, (mean, metrics)), grads = jax.value_and_grad(total, has_aux=True)(params)
        return Sums(jax.tree.map(widened, grads), mean, metrics)

    return jax.jit(sums_of, inline=True)


def no_sums(sums_of: Summed, state: TrainState, batch: TrainBatch) -> Sums:
    """Return the sums over no microbatch of a batch [M, b, ...]: zeros."""
    shapes = jax.eval_shape(sums_of, state.params, state.frozen, jax.tree.map(lambda x: x[0], batch))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def add_microbatches(
    sums_of: Summed,
    sums: Sums,
    state: TrainState,
    batch: TrainBatch,
    start: int | Int[Array, ""],
    stop: Int[Array, ""],
    *,
    bucket: Bucket | None = None,
) -> Sums:
    """Add microbatches start .. stop - 1 of [M, b, ...] to the sums, each cut to ``bucket``; None: as wide as they are.

    The microbatches are looped over with traced bounds (``fori_loop``) and not scanned: rows are left out and sorted by
    length, so every iteration has other counts, and a scan of each would be compiled. The gradient is taken inside the
    loop, which needs no gradient of its own.
    """

    def add(i: Int[Array, ""], sums: Sums) -> Sums:
        rows = cut(jax.tree.map(lambda x: x[i], batch), bucket, length=batch.completion.shape[-1])
        return jax.tree.map(jnp.add, sums, sums_of(state.params, state.frozen, rows))

    return jax.lax.fori_loop(start, stop, add, sums)


def apply_sums(
    tx: optax.GradientTransformation, state: TrainState, sums: Sums, denominator: Float[Array, ""] | None
) -> tuple[TrainState, Metrics]:
    """Make one optimizer update from the summed gradients; the loss is sum(total) / denominator, or / sum(count).

    An update whose loss or gradient is not finite, or that would leave such params, is skipped: params, optimizer and
    step stay, and the metric ``skipped`` is 1; so is ``nonfinite/loss``, ``/gradient`` or, where these two are finite,
    ``/params``. What the state holds frozen comes back as it was.
    """
    mean = sums.loss
    count = jnp.maximum(mean.count if denominator is None else denominator, 1e-20)
    grads = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), sums.grads, state.params)
    norm = optax.tree.norm(grads)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    moved = replace(state, step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    sound = jnp.isfinite(norm) & jnp.isfinite(mean.total)
    finite = sound & all_finite(moved.params)
    kept = replace(
        state,
        **{
            name: jax.tree.map(partial(jnp.where, finite), getattr(moved, name), getattr(state, name))
            for name in ("step", "params", "opt_state")
        },
    )
    once = jnp.ones((), jnp.float32)
    wrong = {"loss": ~jnp.isfinite(mean.total), "gradient": ~jnp.isfinite(norm), "params": sound & ~finite}
    return kept, sums.metrics | {
        **{f"{NONFINITE}{name}": Mean(flag.astype(jnp.float32), once) for name, flag in wrong.items()},
        "loss": Mean(mean.total, count),
        "grad_norm": Mean(norm, once),
        "skipped": Mean(1 - finite.astype(jnp.float32), once),
    }


def descend(
    tx: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    batch: TrainBatch,
    used: Int[Array, ""],
    denominator: Float[Array, ""] | None,
) -> tuple[TrainState, Metrics]:
    """Make one optimizer update from the first ``used`` microbatches of [M, b, ...], all of one width."""
    sums_of = gradient_sums(loss)
    sums = add_microbatches(sums_of, no_sums(sums_of, state, batch), state, batch, 0, used)
    return apply_sums(tx, state, sums, denominator)


def policy_gradient(
    policy: Policy, cfg: Config, custom_loss: TokenLoss | None = None, custom_method: CreditMethod | None = None
) -> Loss:
    """Return the loss of training for one microbatch, with the credit method's part in every update."""
    length = cfg.rollout.max_new
    of_tokens = custom_loss or bound_loss(cfg.loss, max_length=length)
    head = {"temperature": cfg.rollout.temperature, "head_chunk": cfg.policy.head_chunk}
    reweighed = reweigher(cfg.credit, custom_method)
    auxiliary = auxiliary_loss(cfg.credit, policy, **head, custom=custom_method)

    def loss(params: Params, batch: TrainBatch) -> tuple[Mean, Metrics]:
        T = batch.completion.shape[-1]
        hidden, routing = _states(policy, params, batch)
        logps, entropies = hidden_logps(policy, params, hidden, batch.tokens[:, -T:], **head, filters=loss_filters(cfg))
        mean, metrics = of_tokens(logps, entropies, batch if reweighed is None else reweighed(logps, batch))
        terms = {} if auxiliary is None else {"auxiliary": auxiliary(params, hidden, batch)}
        if routing is not None:
            balance = balance_loss(routing)
            shown = Mean(jax.lax.stop_gradient(balance), jnp.ones((), jnp.float32))
            metrics = metrics | router_metrics(routing) | {"router/balance": shown}
            if cfg.loss.router_balance > 0:
                each = jnp.broadcast_to(balance, batch.completion.shape)
                terms["router_balance"] = cfg.loss.router_balance * jnp.where(batch.completion, each, 0)
        for name, term in terms.items():
            added = aggregate(term, batch.completion, mode=cfg.loss.aggregation, max_length=length)
            mean = replace(mean, total=mean.total + added.total)
            shown = aggregate(jax.lax.stop_gradient(term), batch.completion, mode="dapo", max_length=1)
            metrics = metrics | {name: shown}
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
    more = {"experts": batch.experts, "counted": counted}
    hidden, _, routing = policy.routed(params, embeddings, positions, batch.valid, **more)
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
    shown = {
        "load_max": jnp.max(share, axis=-1) * count,
        "idle": jnp.mean(load == 0, axis=-1),
        "entropy": -jnp.sum(share * logs, axis=-1) / jnp.log(count),
    }
    layers = jnp.float32(load.shape[0])
    return {f"router/{name}": Mean(jnp.sum(x).astype(jnp.float32), layers) for name, x in shown.items()}


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


def loss_filters(cfg: Config) -> Filters | None:
    """Return the filters of the distributions that the loss compares; None: they are whole."""
    if cfg.loss.off_policy.support == "whole":
        return None
    return Filters(cfg.rollout.top_k, cfg.rollout.top_p, cfg.rollout.min_p)


def sampler_logps(cfg: LossConfig, rollout: Rollout) -> Float[Array, "*rows T"]:
    """Return the sampler's log-probs of the distribution that the loss compares with."""
    return rollout.behaviour_logps if cfg.off_policy.support == "whole" else rollout.filtered_logps


def bound_loss(cfg: LossConfig, *, max_length: int) -> Callable[..., tuple[Mean, Metrics]]:
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
        kl_beta=cfg.kl_beta if cfg.kl_in == "loss" else 0.0,
        kl_estimator=cfg.kl_estimator,
        entropy_bonus=cfg.entropy_bonus,
        importance=None if off.weighting == "none" else Importance(off.weighting, off.low, off.high),
        max_drift=off.max_drift,
        max_length=max_length,
    )


class RowCheck(NamedTuple):
    """The contribution of one row to an update."""

    loss: Mean
    metrics: Metrics
    grad_norm: Float[Array, ""]
    nonfinite: Params  # per array of the params: numbers of its gradient that are not finite, along its first axis


def make_row_check(loss: Loss) -> Callable[..., tuple[Params, RowCheck]]:
    """Return a jitted (params, frozen, gradients so far, one row, denominator) -> (gradients with it, RowCheck).

    ``frozen`` are the params below adapters, or None.
    """

    def check(
        params: Params, frozen: Params | None, so_far: Params, row: TrainBatch, denominator: Float[Array, ""]
    ) -> tuple[Params, RowCheck]:
        def total(params: Params) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
            mean, metrics = loss(join_params(frozen, params), row)
            return mean.total, (mean, metrics)

        (_, (mean, metrics)), grads = jax.value_and_grad(total, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / denominator, grads)
        wrong = jax.tree.map(lambda g: jnp.sum(~jnp.isfinite(g), axis=tuple(range(1, g.ndim))), grads)
        return jax.tree.map(jnp.add, so_far, grads), RowCheck(mean, metrics, optax.tree.norm(grads), wrong)

    return jax.jit(check, donate_argnums=2)
