"""Every ``jax.jit`` of the package, built once per run from a policy, an optimizer and a config.

Rows travel as [M, b, ...]: M microbatches of b rows, of which the first ``used`` hold rows. The loop over them
is a ``fori_loop`` with a traced bound around a whole gradient, so one compilation serves any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.config import Config, LossConfig, OptimConfig, SFTConfig
from oarjax.credit.bind import credit_metrics, scorer, signals, weigher
from oarjax.credit.gate import reshape
from oarjax.credit.keywords import KeywordTable
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar_g import row_keys
from oarjax.credit.probe import Probe, ProbeMode
from oarjax.credit.signals import Signals
from oarjax.models.lora import below, laid_over
from oarjax.models.policy import Policy
from oarjax.rl.grpo import aggregate, group_advantages, policy_loss, zero_variance_groups
from oarjax.rl.masked import widened
from oarjax.rl.optimizer import adamw, learning_rate
from oarjax.rollout.logps import hidden_logps, token_logps
from oarjax.training.metrics import NONFINITE, all_finite, nonfinite_rows
from oarjax.training.sampling import evaluation_sampler, group_sampler
from oarjax.types import AnswerSpan, Credit, Mean, Params, Rollout, Scores, TrainBatch, TrainState

Metrics = dict[str, Mean]
Loss = Callable[[Params, TrainBatch], tuple[Mean, Metrics]]
"""Loss of one microbatch as a sum and a count, and its metrics."""

TokenLoss = Callable[[Float[Array, "B T"], Float[Array, "B T"], TrainBatch], tuple[Mean, Metrics]]
"""(log-probs, entropies, batch) -> the same: what ``loss.function`` names instead of ``policy_loss``.

Its sums are added over microbatches and divided by what ``loss.aggregation`` counts in the whole rollout.
"""


class Steps(NamedTuple):
    """The device programs of a run. The params of ``sample`` and ``evaluate`` are those of ``rollout_params``."""

    rollout_params: Callable[[Params], Params]  # the policy's, as it samples
    sample: Callable[..., Rollout]  # (params, prompts, key)
    evaluate: Callable[..., Rollout]  # the same as cfg.eval says, every problem and sample with noise of its own
    equal_groups: Callable[..., Bool[Array, "P"]]  # (rewards): groups that teach nothing
    advantages: Callable[..., Float[Array, "B"]]  # (rewards, NaN where not graded)
    score: Callable[..., Scores]  # (params, ref_params, rollout, span, row numbers, used, key[, probed], probe=mode)
    credit: Callable[..., tuple[Credit, Metrics]]  # (scores, rollout, span, advantages, completion, key)
    denominator: Callable[..., Float[Array, ""]]  # (completion of the whole rollout)
    update: Callable[..., tuple[TrainState, Metrics]]  # (state, batch, used, denominator)
    decoding: Callable[[], dict[str, float]] = dict  # metrics of what ``sample`` did since this was last called


class Shardings(NamedTuple):
    """Where arrays live in the training layout."""

    state: Any  # a tree like TrainState
    params: Any
    rows: Any  # axis 0 divided over the row axes
    replicated: Any
    microbatches: Any = None  # axis 1 divided over the row axes


class RolloutLayout(NamedTuple):
    """The policy as it samples: other devices hold other parts of it than in training, in the compute dtype."""

    policy: Policy
    prepare: Callable[[Params], Params]  # from the training params; pure
    params: Any  # shardings of what ``prepare`` gives
    rows: Any  # of prompts and rollouts


def make_optimizer(cfg: Config) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The run's optimizer and its schedule (updates -> learning rate)."""
    return _optimizer(cfg.optim, cfg.iterations * cfg.update.epochs * cfg.update.minibatches)


def make_sft_optimizer(cfg: SFTConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The warm start's optimizer and its schedule."""
    return _optimizer(cfg.optim, cfg.steps)


def _optimizer(o: OptimConfig, updates: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    schedule = learning_rate(peak=o.lr, schedule=o.schedule, warmup=o.warmup, updates=updates)
    tx = adamw(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, clip_norm=o.clip_norm, moments=o.moments)
    return tx, schedule


def make_steps(
    policy: Policy,
    tx: optax.GradientTransformation,
    shardings: Shardings,
    cfg: Config,
    *,
    stop_ids: tuple[int, ...],
    pad_id: int,
    rollout: RolloutLayout | None = None,
    keyword_table: KeywordTable | None = None,
    custom_probe: Probe | None = None,
    custom_method: CreditMethod | None = None,
    custom_loss: TokenLoss | None = None,
) -> Steps:
    """Bind policy, optimizer and config into jitted programs. Compiles nothing yet.

    Without ``rollout`` the policy samples as it trains.

    Raises:
        ConfigError: the method of credit needs what is not there, such as ``keyword_table`` for keywords.
    """
    roll = cfg.rollout
    if rollout is None:
        rollout = RolloutLayout(policy, lambda params: params, None, shardings.rows)
    where = {"rows": rollout.rows, "stop_ids": stop_ids, "pad_id": pad_id}
    groups, evaluation = group_sampler(rollout.policy, cfg, **where), evaluation_sampler(rollout.policy, cfg, **where)
    head = {"temperature": roll.temperature, "head_chunk": cfg.policy.head_chunk}
    logps_of = partial(token_logps, policy, **head)
    # With one update per rollout the ratio is 1: old = stop_gradient(new), no pass of its own.
    wants_old = cfg.update.epochs * cfg.update.minibatches > 1
    wants_entropies = "entropies" in signals(cfg.credit, custom_method)
    own = {"custom_probe": custom_probe, "custom_method": custom_method}
    score_of = scorer(cfg.credit, policy, temperature=roll.temperature, pad_id=pad_id, **own)
    weights_of = weigher(cfg.credit, keyword_table=keyword_table, custom_method=custom_method)

    def score(
        params: Params,
        ref_params: Params | None,
        rollout: Rollout,
        span: AnswerSpan,
        numbers: Int[Array, "M b"],
        used: Int[Array, ""],
        key: Key[Array, ""],
        probed: tuple[Rollout, AnswerSpan] | None = None,
        *,
        probe: ProbeMode,
    ) -> Scores:
        # Below adapters lies what training started from: the reference is there already.
        reference = below(params) if cfg.lora.rank else ref_params

        def one(xs: tuple[Rollout, AnswerSpan, Int[Array, "b"], tuple[Rollout, AnswerSpan] | None]) -> Scores:
            r, s, rows, instead = xs
            length = r.completion.shape[-1]
            logps = partial(logps_of, tokens=r.tokens, valid=r.valid, completion_length=length)
            found = score_of(params, *(instead or (r, s)), row_keys(key, rows), probe)
            if instead is not None:  # its reasoning stands where the rollout's does; its clean states do not
                importance = None if found.importance is None else found.importance[:, :length]
                found = found._replace(importance=importance, hidden=None)
            old = entropies = None
            if wants_old or wants_entropies:  # the attribution's clean pass will do, where there was one
                old, entropies = (
                    logps(params)
                    if found.hidden is None
                    else hidden_logps(policy, params, found.hidden, r.tokens[:, -length:], **head)
                )
            return Scores(
                old_logps=old if wants_old else None,
                ref_logps=logps(reference)[0] if cfg.loss.kl_beta > 0 else None,
                importance=found.importance,
                entropies=entropies if wants_entropies else None,
            )

        return map_used(one, (rollout, span, numbers, probed), used)

    def credit(
        scores: Scores,
        rollout: Rollout,
        span: AnswerSpan,
        advantages: Float[Array, "M b"],
        completion: Bool[Array, "M b T"],
        key: Key[Array, ""],
    ) -> tuple[Credit, Metrics]:
        M, b = advantages.shape
        flat = partial(jax.tree.map, lambda x: x.reshape(M * b, *x.shape[2:]))
        s, mask, a = flat(span), flat(completion), flat(advantages)
        found = Signals(
            importance=flat(scores.importance),
            entropies=flat(scores.entropies),
            tokens=flat(rollout.tokens)[:, -mask.shape[1] :],
        )
        w = weights_of(found, s, a, mask, key)
        wrong = nonfinite_rows(
            {
                "old_logps": flat(scores.old_logps),
                "ref_logps": flat(scores.ref_logps),
                "importance": found.importance,
                "entropies": found.entropies,
                "weights": w,
                "advantages": a,
            },
            {
                **dict.fromkeys(("old_logps", "ref_logps", "entropies", "weights"), mask),
                "importance": s.reasoning,
                "advantages": jnp.ones(a.shape, bool),
            },
            mask.any(-1),
        )
        w = jnp.where(jnp.all(jnp.isfinite(w) | ~mask, axis=-1)[:, None], w, 1)
        given = Credit(
            importance=jnp.zeros_like(w) if found.importance is None else found.importance,
            weights=w,
            advantages=reshape(a, w, mask),
        )
        shaped = jax.tree.map(lambda x: x.reshape(M, b, *x.shape[1:]), given)
        return shaped, credit_metrics(w, s, mask) | wrong

    loss = policy_gradient(policy, cfg, custom_loss)

    def denominator(completion: Bool[Array, "B T"]) -> Float[Array, ""]:
        zeros = jnp.zeros(completion.shape, jnp.float32)
        counted = aggregate(zeros, completion, mode=cfg.loss.aggregation, max_length=roll.max_new)
        return counted.count / cfg.update.minibatches

    def update(
        state: TrainState, batch: TrainBatch, used: Int[Array, ""], denominator: Float[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        # bnpo means over the pieces it is cut into, whatever they hold; the others over the whole rollout.
        return descend(tx, loss, state, batch, used, None if cfg.loss.aggregation == "bnpo" else denominator)

    return Steps(
        rollout_params=jax.jit(rollout.prepare, out_shardings=rollout.params),
        sample=groups,
        evaluate=evaluation,
        equal_groups=jax.jit(partial(zero_variance_groups, group_size=roll.group_size)),
        advantages=jax.jit(partial(group_advantages, group_size=roll.group_size, **cfg.advantage.model_dump())),
        score=jax.jit(score, static_argnames="probe", out_shardings=shardings.microbatches),
        credit=jax.jit(credit, out_shardings=(shardings.microbatches, shardings.replicated)),
        denominator=jax.jit(denominator),
        update=jax.jit(update, donate_argnums=0, out_shardings=(shardings.state, shardings.replicated)),
        decoding=groups.spent,
    )


def make_sft_step(
    policy: Policy, tx: optax.GradientTransformation, shardings: Shardings, *, head_chunk: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """(state, batch, used) -> (state, metrics): mean negative log-probability of the completions' tokens."""
    loss = imitation(policy, head_chunk=head_chunk)

    def step(state: TrainState, batch: TrainBatch, used: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        return descend(tx, loss, state, batch, used, None)

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings.state, shardings.replicated))


def policy_gradient(policy: Policy, cfg: Config, custom_loss: TokenLoss | None = None) -> Loss:
    """The loss of training, of one microbatch."""
    of_tokens = custom_loss or bound_loss(cfg.loss, max_length=cfg.rollout.max_new)

    def loss(params: Params, batch: TrainBatch) -> tuple[Mean, Metrics]:
        logps, entropies = token_logps(
            policy,
            params,
            batch.tokens,
            batch.valid,
            completion_length=batch.completion.shape[-1],
            temperature=cfg.rollout.temperature,
            head_chunk=cfg.policy.head_chunk,
        )
        return of_tokens(logps, entropies, batch)

    return loss


def imitation(policy: Policy, *, head_chunk: int) -> Loss:
    """The loss of the warm start, of one microbatch."""

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


def bound_loss(cfg: LossConfig, *, max_length: int) -> Callable[..., tuple[Mean, Metrics]]:
    """``policy_loss`` with a run's settings."""
    return partial(
        policy_loss,
        surrogate=cfg.surrogate,
        level=cfg.level,
        aggregation=cfg.aggregation,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
        ratio_cap=cfg.ratio_cap,
        kl_beta=cfg.kl_beta,
        kl_estimator=cfg.kl_estimator,
        entropy_bonus=cfg.entropy_bonus,
        sampler_cap=cfg.sampler_correction_cap,
        max_length=max_length,
    )


def map_used(fn: Callable[[Any], Any], xs: Any, used: Int[Array, ""]) -> Any:
    """fn over axis 0 of every array of ``xs``, for the first ``used`` entries; zeros after."""
    count = jax.tree.leaves(xs)[0].shape[0]
    shapes = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], xs))
    empty = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def body(i: Int[Array, ""], out: Any) -> Any:
        return jax.tree.map(lambda o, y: o.at[i].set(y), out, fn(jax.tree.map(lambda x: x[i], xs)))

    return jax.lax.fori_loop(0, used, body, empty)


def descend(
    tx: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    batch: TrainBatch,
    used: Int[Array, ""],
    denominator: Float[Array, ""] | None,
) -> tuple[TrainState, Metrics]:
    """One optimizer update from the used microbatches of [M, b, ...], their gradients summed in float32 or wider.

    The microbatches are looped over with a traced count (``fori_loop``) and not scanned: groups of equal rewards are
    left out, so every iteration keeps another number of rows, and a scan of that length would be compiled for each.
    The gradient is taken inside the loop, which needs no gradient of its own.

    The loss is sum(total) / denominator, by default sum(count). An update whose loss or gradient is not finite, or
    that would leave such params, is skipped: params, optimizer and step stay, and the metric ``skipped`` is 1; so is
    ``nonfinite/loss``, ``/gradient`` or, where these two are finite, ``/params``. What the state holds frozen has no
    gradient and comes back as it was.
    """

    def total(params: Params, rows: TrainBatch) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
        mean, metrics = loss(laid_over(state.frozen, params), rows)
        return mean.total, (mean, metrics)

    def one(i: Any) -> tuple[Any, Mean, Metrics]:
        (_, (mean, metrics)), grads = jax.value_and_grad(total, has_aux=True)(
            state.params, jax.tree.map(lambda x: x[i], batch)
        )
        return jax.tree.map(lambda g: widened(g), grads), mean, metrics

    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, 0))
    grads, mean, metrics = jax.lax.fori_loop(0, used, lambda i, so_far: jax.tree.map(jnp.add, so_far, one(i)), empty)
    count = jnp.maximum(mean.count if denominator is None else denominator, 1e-20)
    grads = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, state.params)
    norm = optax.tree.norm(grads)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    moved = replace(state, step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    given = jnp.isfinite(norm) & jnp.isfinite(mean.total)
    finite = given & all_finite(moved.params)
    kept = replace(
        state,
        **{
            name: jax.tree.map(partial(jnp.where, finite), getattr(moved, name), getattr(state, name))
            for name in ("step", "params", "opt_state")
        },
    )
    once = jnp.ones((), jnp.float32)
    wrong = {"loss": ~jnp.isfinite(mean.total), "gradient": ~jnp.isfinite(norm), "params": given & ~finite}
    return kept, metrics | {
        **{f"{NONFINITE}{name}": Mean(flag.astype(jnp.float32), once) for name, flag in wrong.items()},
        "loss": Mean(mean.total, count),
        "grad_norm": Mean(norm, once),
        "skipped": Mean(1 - finite.astype(jnp.float32), once),
    }


class RowCheck(NamedTuple):
    """What one row does to an update."""

    loss: Mean
    metrics: Metrics
    grad_norm: Float[Array, ""]
    nonfinite: Params  # per array of the params: numbers of its gradient that are not finite, along its first axis


def make_row_check(loss: Loss) -> Callable[..., tuple[Params, RowCheck]]:
    """(params, frozen, gradients so far, batch of one row, denominator) -> (gradients with this row's, RowCheck).

    Jitted; ``frozen`` is what the params are laid over, None where there is nothing.
    """

    def check(
        params: Params, frozen: Params | None, so_far: Params, row: TrainBatch, denominator: Float[Array, ""]
    ) -> tuple[Params, RowCheck]:
        def total(params: Params) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
            mean, metrics = loss(laid_over(frozen, params), row)
            return mean.total, (mean, metrics)

        (_, (mean, metrics)), grads = jax.value_and_grad(total, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / denominator, grads)
        wrong = jax.tree.map(lambda g: jnp.sum(~jnp.isfinite(g), axis=tuple(range(1, g.ndim))), grads)
        return jax.tree.map(jnp.add, so_far, grads), RowCheck(mean, metrics, optax.tree.norm(grads), wrong)

    return jax.jit(check, donate_argnums=2)
