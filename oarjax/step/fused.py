"""Score and update a microbatch in one pass, if both use the same params.

With one update per rollout, OAR-G's clean pass is the update's own forward. It is linearised once, in the embeddings
and in the params: the probe's cotangent gives the importance, and with it weights and advantages; the loss's cotangent,
over the same residuals, gives the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.config import Config
from oarjax.credit.bind import SharedScorer, method_of
from oarjax.credit.clean_pass import shared_pass
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.probe import ProbeMode
from oarjax.models.lora import join_params
from oarjax.models.policy import Policy
from oarjax.rl.masked import widened
from oarjax.rollout.logps import hidden_logps
from oarjax.step.loss import Metrics, Sums, TokenLoss, loss_filters, sampler_logps
from oarjax.step.minibatches import Bucket, cut
from oarjax.types import AnswerSpan, Credit, Mean, Params, Rollout, Scores, TrainBatch, TrainState


class FusedRows(NamedTuple):
    """Inputs of score, credit and update: of a minibatch [M, b, ...], or of a microbatch without the M."""

    rollout: Rollout
    span: AnswerSpan
    numbers: Int[Array, "*M b"]
    advantages: Float[Array, "*M b"]
    completion: Bool[Array, "*M b T"]


class FusedSums(NamedTuple):
    """Sums over microbatches before an update, and the credit of the rows so far."""

    sums: Sums
    importance: Float[Array, "M b T"]
    weights: Float[Array, "M b T"]  # 1 in rows without computed weights
    metrics: Metrics  # of credit


def fuses(cfg: Config, custom_method: CreditMethod | None = None, *, experts: bool = False) -> bool:
    """Decide if a run scores and updates in one pass: by config and policy, so that a resumed run does the same.

    Both must be at the same params (one update per rollout) and read the same rows (no reference policy, no reference
    answers), and the method must be able to share a pass: its weights of a row come from the row's importance and
    tokens alone, and it adds nothing to the loss. ``auto`` also requires that the grades are needed before scoring
    anyway, to skip groups or to refill them: otherwise workers grade while the device scores, and saving a pass may
    cost more than it gains. A policy with ``experts`` updates in a pass of its own, which reports their load.
    """
    method = method_of(cfg.credit, custom_method)
    shares = method.shared is not None and method.kind == "weights" and method.coupling == "row"
    alone = method.loss is None and set(method.needs) <= {"importance", "tokens", "keyword_table"}
    return (
        cfg.update.fused == "auto"
        and not experts
        and cfg.update.epochs * cfg.update.minibatches == 1
        and cfg.loss.kl_beta == 0
        and cfg.credit.answer.source == "own"
        and shares
        and alone
        and (cfg.update.skip_zero_variance or cfg.update.refills > 0)
    )


def make_fused(
    policy: Policy,
    cfg: Config,
    *,
    importance: SharedScorer,
    credit: Callable[..., tuple[Credit, Metrics]],
    loss: TokenLoss,
) -> tuple[Callable[..., FusedSums], Callable[..., FusedSums]]:
    """Return (the sums over no microbatch, the sums with those of one bucket added): see ``Steps.fused``."""
    head = {
        "temperature": cfg.rollout.temperature,
        "head_chunk": cfg.policy.head_chunk,
        "filters": loss_filters(cfg),
    }

    def microbatch(
        state: TrainState, rows: FusedRows, noise_key: Key[Array, ""], order_key: Key[Array, ""], probe: ProbeMode
    ) -> FusedSums:
        r, span, length = rows.rollout, rows.span, rows.completion.shape[-1]
        params_of = partial(join_params, state.frozen)
        shared = shared_pass(policy, params_of, state.params, r.tokens, r.valid, completion_length=length)
        keys = row_keys(noise_key, rows.numbers)
        scores = Scores(None, None, importance(params_of(state.params), shared.linear, r, span, keys, probe))
        single = jax.tree.map(lambda x: x[None], (scores, *rows))
        shaped, metrics = credit(*single[:3], *single[4:], order_key, single[3])

        def total(params: Params, hidden: Float[Array, "b T D"]) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
            logps, entropies = hidden_logps(policy, params_of(params), hidden, r.tokens[:, -length:], **head)
            batch = TrainBatch(
                tokens=r.tokens,
                valid=r.valid,
                completion=rows.completion,
                advantages=shaped.advantages[0],
                old_logps=None,
                ref_logps=None,
                behaviour_logps=sampler_logps(cfg.loss, r),
            )
            mean, metrics = loss(logps, entropies, batch)
            return mean.total, (mean, metrics)

        by_both = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        (_, (mean, measured)), (by_head, by_hidden) = by_both(state.params, shared.linear.hidden)
        grads = jax.tree.map(jnp.add, by_head, shared.pull_params(by_hidden))
        sums = Sums(jax.tree.map(widened, grads), mean, measured)
        return FusedSums(sums, shaped.importance[0], shaped.weights[0], metrics)

    def zeros(state: TrainState, rows: FusedRows) -> FusedSums:
        """Return the sums over no microbatch of [M, b, ...]."""
        M = rows.numbers.shape[0]
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = jax.eval_shape(partial(microbatch, probe="last"), state, jax.tree.map(lambda x: x[0], rows), key, key)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        every = partial(jnp.broadcast_to, shape=(M, *empty.weights.shape))
        return empty._replace(importance=every(empty.importance), weights=every(empty.weights) + 1)

    def add(
        so_far: FusedSums,
        state: TrainState,
        rows: FusedRows,
        noise_key: Key[Array, ""],
        order_key: Key[Array, ""],
        start: int | Int[Array, ""],
        stop: Int[Array, ""],
        *,
        probe: ProbeMode,
        bucket: Bucket | None = None,
    ) -> FusedSums:
        """Add microbatches start .. stop - 1, each cut to ``bucket``; bounds are traced, see ``add_microbatches``."""
        full = rows.completion.shape[-1]

        def step(i: Int[Array, ""], so_far: FusedSums) -> FusedSums:
            own = cut(jax.tree.map(lambda x: x[i], rows), bucket, length=full)
            more = microbatch(state, own, noise_key, order_key, probe)

            def placed(every: Array, x: Array, outside: int) -> Array:
                return every.at[i].set(jnp.pad(x, ((0, 0), (0, full - x.shape[-1])), constant_values=outside))

            return FusedSums(
                jax.tree.map(jnp.add, so_far.sums, more.sums),
                placed(so_far.importance, more.importance, 0),
                placed(so_far.weights, more.weights, 1),
                jax.tree.map(jnp.add, so_far.metrics, more.metrics),
            )

        return jax.lax.fori_loop(start, stop, step, so_far)

    return zeros, add
