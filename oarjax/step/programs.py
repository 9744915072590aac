"""The device programs of training, built once per run from a policy, an optimizer and a config.

Rows travel as [M, b, ...]: M microbatches of b rows, as wide as the longest row of a run may be. A program takes those
of one bucket of lengths, cuts them to it, and loops over them with traced bounds. So there is one compilation per
bucket, whatever the number of rows, and an update adds up the buckets' gradients before one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.config import Config, OptimConfig, SFTConfig
from oarjax.credit.bind import (
    check_updates,
    credit_metrics,
    measures,
    method_of,
    row_advantages,
    scorer,
    shared_scorer,
    weigher,
)
from oarjax.credit.keywords import KeywordTable
from oarjax.credit.kinds import neutral, relative, token_advantages
from oarjax.credit.measures import measure
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.probe import Probe, ProbeMode
from oarjax.credit.signals import signals_of
from oarjax.models.lora import without_adapters
from oarjax.models.policy import Policy, replaying
from oarjax.rl.advantages import AdvantageFunction, zero_variance_groups
from oarjax.rl.loss import aggregate
from oarjax.rl.optimizer import adamw, learning_rate
from oarjax.rollout.logps import last_states, token_logps
from oarjax.step.advantages import bound_advantages, bound_kl_penalty
from oarjax.step.fused import FusedRows, FusedSums, fuses, make_fused
from oarjax.step.loss import (
    Metrics,
    Sums,
    TokenLoss,
    add_microbatches,
    apply_sums,
    bound_loss,
    descend,
    gradient_sums,
    imitation,
    loss_filters,
    no_sums,
    policy_gradient,
)
from oarjax.step.metrics import nonfinite_rows
from oarjax.step.minibatches import Bucket, Piece, cut
from oarjax.step.sampling import evaluation_sampler, group_sampler
from oarjax.types import AnswerSpan, Credit, Hints, Params, Rollout, Scores, TrainBatch, TrainState


class Steps(NamedTuple):
    """The device programs of a run. The params of ``sample`` and ``evaluate`` are those of ``rollout_params``."""

    rollout_params: Callable[[Params], Params]  # the policy's, as it samples
    sample: Callable[..., Rollout]  # (params, prompts, key)
    evaluate: Callable[..., Rollout]  # the same as cfg.eval says, every problem and sample with noise of its own
    equal_groups: Callable[..., Bool[Array, "P"]]  # (rewards): groups that teach nothing
    advantages: Callable[..., Float[Array, "B"]]  # (rewards, NaN where not graded; values of each reward by name)
    after_kl: Callable[..., Float[Array, "B"]]  # (rewards, rollout, ref log-probs): the rewards less the KL term
    score: Callable[..., Scores]
    # (params, ref_params, rollout, span, row numbers, stop, key[, probed, start, hints], probe=mode, bucket=)
    credit: Callable[..., tuple[Credit, Metrics]]
    # (scores, rollout, span, advantages, completion, key, row numbers[, hints, iteration])
    denominator: Callable[..., Float[Array, ""]]  # (completion of the whole rollout)
    zeros: Callable[..., Sums]  # (state, batch): the sums to begin an update with
    accumulate: Callable[..., Sums]  # (sums, state, batch, start, stop, bucket=): takes the sums' memory
    apply: Callable[..., tuple[TrainState, Metrics]]  # (state, sums, denominator): takes the state's memory
    fused_zeros: Callable[..., FusedSums] | None = None  # (state, rows): None where score and update are two passes
    fused_add: Callable[..., FusedSums] | None = None
    # (sums, state, rows, noise key, order key, start, stop, probe=, bucket=): takes the sums' memory
    decoding: Callable[[], dict[str, float]] = dict  # metrics of what ``sample`` did since this was last called
    decode_programs: Callable[[], int] = int  # decode programs that ``sample`` has run in this process

    def update(
        self, state: TrainState, batch: TrainBatch, pieces: Sequence[Piece], denominator: Float[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        """Make one optimizer update from a minibatch [M, b, ...], each piece of it padded to its own bucket."""
        return self.apply(state, self.sums(state, batch, pieces), denominator)

    def fused(
        self,
        state: TrainState,
        rows: FusedRows,
        pieces: Sequence[Piece],
        keys: tuple[Key[Array, ""], Key[Array, ""]],
        *,
        probe: ProbeMode,
    ) -> FusedSums | None:
        """Score a minibatch [M, b, ...] and add up its gradients in one pass; None where these are two."""
        if self.fused_zeros is None or self.fused_add is None:
            return None
        sums = self.fused_zeros(state, rows)
        for piece in pieces:
            sums = self.fused_add(sums, state, rows, *keys, piece.start, piece.stop, probe=probe, bucket=piece.bucket)
        return sums

    def sums(self, state: TrainState, batch: TrainBatch, pieces: Sequence[Piece]) -> Sums:
        """Add up the losses and gradients of a minibatch [M, b, ...], each piece of it padded to its own bucket."""
        sums = self.zeros(state, batch)
        for piece in pieces:
            sums = self.accumulate(sums, state, batch, piece.start, piece.stop, bucket=piece.bucket)
        return sums


class Shardings(NamedTuple):
    """Shardings of the training layout."""

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
    """Build the run's optimizer and its schedule (updates -> learning rate)."""
    return _optimizer(cfg.optim, cfg.iterations * cfg.update.epochs * cfg.update.minibatches)


def make_sft_optimizer(cfg: SFTConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Build the warm start's optimizer and its schedule."""
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
    token_bytes: Sequence[bytes] = (),
    rollout: RolloutLayout | None = None,
    keyword_table: KeywordTable | None = None,
    custom_probe: Probe | None = None,
    custom_method: CreditMethod | None = None,
    custom_loss: TokenLoss | None = None,
    custom_advantages: AdvantageFunction | None = None,
) -> Steps:
    """Bind policy, optimizer and config into jitted programs. Compiles nothing yet.

    Without ``rollout`` the policy samples as it trains.

    Raises:
        ConfigError: the method of credit needs what is not there, such as ``keyword_table`` for keywords.
    """
    check_updates(cfg, custom_method)
    roll = cfg.rollout
    if rollout is None:
        rollout = RolloutLayout(policy, lambda params: params, None, shardings.rows)
    where = {"rows": rollout.rows, "stop_ids": stop_ids, "pad_id": pad_id, "token_bytes": token_bytes}
    groups, evaluation = group_sampler(rollout.policy, cfg, **where), evaluation_sampler(rollout.policy, cfg, **where)
    head = {"temperature": roll.temperature, "head_chunk": cfg.policy.head_chunk, "filters": loss_filters(cfg)}
    logps_of = partial(token_logps, policy, **head)
    # With one update per rollout the ratio is 1: old = stop_gradient(new), no pass of its own.
    wants_old = cfg.update.epochs * cfg.update.minibatches > 1
    read, kind = measures(cfg.credit, custom_method), method_of(cfg.credit, custom_method).kind
    wanted = {"logps", *read} if wants_old else read
    own = {"custom_probe": custom_probe, "custom_method": custom_method}
    score_of = scorer(cfg.credit, policy, temperature=roll.temperature, pad_id=pad_id, **own)
    weights_of = weigher(cfg.credit, keyword_table=keyword_table, custom_method=custom_method)

    def score(
        params: Params,
        ref_params: Params | None,
        rollout: Rollout,
        span: AnswerSpan,
        numbers: Int[Array, "M b"],
        stop: Int[Array, ""],
        key: Key[Array, ""],
        probed: tuple[Rollout, AnswerSpan] | None = None,
        start: int | Int[Array, ""] = 0,
        hints: Hints | None = None,
        *,
        probe: ProbeMode,
        bucket: Bucket | None = None,
    ) -> Scores:
        full = rollout.completion.shape[-1]
        # Below adapters lies what training started from: the reference is there already.
        reference = without_adapters(params) if cfg.lora.rank else ref_params

        def score_microbatch(xs: Any) -> Scores:
            (r, s), rows, instead, teacher = cut(xs[:2], bucket, length=full), *xs[2:]
            if instead is not None:
                instead = cut(instead, bucket, length=full, room=instead[0].completion.shape[-1] - full)
            length = r.completion.shape[-1]
            logps = partial(logps_of, tokens=r.tokens, valid=r.valid, completion_length=length)
            probed_rows, marked = (r, s) if instead is None else instead
            attributed = score_of(params, probed_rows, marked, row_keys(key, rows), probe)
            if instead is not None:  # its reasoning stands where the rollout's does; its clean states do not
                importance = None if attributed.importance is None else attributed.importance[:, :length]
                attributed = attributed._replace(importance=importance, hidden=None)
            if r.experts is not None and wanted:  # the attribution's router chose for itself
                own = {"tokens": r.tokens, "valid": r.valid, "completion_length": length}
                attributed = attributed._replace(hidden=last_states(replaying(policy, r.experts), params, **own))
            measured = measure(
                policy,
                params,
                r.tokens,
                r.valid,
                wanted=wanted,
                completion_length=length,
                hidden=attributed.hidden,  # of the attribution's clean pass, if there is one
                reference=reference,
                teacher=teacher,
                **head,
            )
            scores = Scores(
                old_logps=measured["logps"] if wants_old else None,
                ref_logps=logps(reference)[0] if cfg.loss.kl_beta > 0 else None,
                importance=attributed.importance,
                measured={name: measured[name] for name in sorted(read)} or None,
            )
            return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, full - length), *((0, 0),) * (x.ndim - 2))), scores)

        return map_between(score_microbatch, (rollout, span, numbers, probed, hints and hints.teacher), start, stop)

    def credit(
        scores: Scores,
        rollout: Rollout,
        span: AnswerSpan,
        advantages: Float[Array, "M b"],
        completion: Bool[Array, "M b T"],
        key: Key[Array, ""],
        numbers: Int[Array, "M b"],
        hints: Hints | None = None,
        iteration: int | Int[Array, ""] = 1,
    ) -> tuple[Credit, Metrics]:
        M, b = advantages.shape
        flat = partial(jax.tree.map, lambda x: x.reshape(M * b, *x.shape[2:]))
        s, mask, a = flat(span), flat(completion), flat(advantages)
        scored = flat(scores)
        rest = {"length": mask.shape[1], "group_size": roll.group_size, "hints": flat(hints), "iteration": iteration}
        inputs = signals_of(scored, flat(rollout.tokens), flat(numbers), **rest)
        returned = weights_of(inputs, s, a, mask, key)
        per_token = {"old_logps": scored.old_logps, "ref_logps": scored.ref_logps, **(scored.measured or {})}
        per_token["weights"] = returned
        wrong = nonfinite_rows(
            {**per_token, "importance": inputs.importance, "advantages": a},
            {**dict.fromkeys(per_token, mask), "importance": s.reasoning, "advantages": jnp.ones(a.shape, bool)},
            mask.any(-1),
        )
        sound = jnp.all(jnp.isfinite(returned) | ~mask, axis=-1)[:, None]
        returned = jnp.where(sound, returned, neutral(kind, a))
        advantages = token_advantages(kind, returned, a, mask)
        w = relative(kind, returned, advantages, a, mask)
        rows = Credit(
            importance=jnp.zeros_like(w) if inputs.importance is None else inputs.importance,
            weights=w,
            advantages=advantages,
            returned=returned,
        )
        shaped = jax.tree.map(lambda x: x.reshape(M, b, *x.shape[1:]), rows)
        return shaped, credit_metrics(jnp.abs(w), s, mask) | wrong

    sums_of = gradient_sums(policy_gradient(policy, cfg, custom_loss, custom_method))

    def denominator(completion: Bool[Array, "B T"]) -> Float[Array, ""]:
        zeros = jnp.zeros(completion.shape, jnp.float32)
        counted = aggregate(zeros, completion, mode=cfg.loss.aggregation, max_length=roll.max_new)
        return counted.count / cfg.update.minibatches

    def accumulate(
        sums: Sums,
        state: TrainState,
        batch: TrainBatch,
        start: Int[Array, ""],
        stop: Int[Array, ""],
        *,
        bucket: Bucket | None = None,
    ) -> Sums:
        return add_microbatches(sums_of, sums, state, batch, start, stop, bucket=bucket)

    def apply(state: TrainState, sums: Sums, denominator: Float[Array, ""]) -> tuple[TrainState, Metrics]:
        # bnpo means over its pieces, here microbatches of rows of similar length; the others over the whole rollout.
        return apply_sums(tx, state, sums, None if cfg.loss.aggregation == "bnpo" else denominator)

    trained = shardings.state.params if isinstance(shardings.state, TrainState) else shardings.state
    summed = Sums(trained, shardings.replicated, shardings.replicated)
    fused: dict[str, Any] = {}
    shared = shared_scorer(cfg.credit, policy, temperature=roll.temperature, pad_id=pad_id, **own)
    if shared is not None and fuses(cfg, custom_method, experts=policy.routed is not None):
        of_tokens = custom_loss or bound_loss(cfg.loss, max_length=roll.max_new)
        empty, add = make_fused(policy, cfg, importance=shared, credit=credit, loss=of_tokens)
        where = FusedSums(summed, shardings.microbatches, shardings.microbatches, shardings.replicated)
        fused["fused_zeros"] = jax.jit(empty, out_shardings=where)
        fused["fused_add"] = jax.jit(add, static_argnames=("probe", "bucket"), donate_argnums=0, out_shardings=where)
    return Steps(
        **fused,
        rollout_params=jax.jit(rollout.prepare, out_shardings=rollout.params),
        sample=groups,
        evaluate=evaluation,
        equal_groups=jax.jit(partial(zero_variance_groups, group_size=roll.group_size)),
        advantages=jax.jit(row_advantages(cfg, custom_method) or bound_advantages(cfg, custom_advantages)),
        after_kl=jax.jit(bound_kl_penalty(cfg)),
        score=jax.jit(score, static_argnames=("probe", "bucket"), out_shardings=shardings.microbatches),
        credit=jax.jit(credit, out_shardings=(shardings.microbatches, shardings.replicated)),
        denominator=jax.jit(denominator),
        zeros=jax.jit(partial(no_sums, sums_of), out_shardings=summed),
        accumulate=jax.jit(accumulate, static_argnames="bucket", donate_argnums=0, out_shardings=summed),
        apply=jax.jit(apply, donate_argnums=0, out_shardings=(shardings.state, shardings.replicated)),
        decoding=groups.spent,
        decode_programs=lambda: groups.decode_programs,
    )


def make_sft_step(
    policy: Policy, tx: optax.GradientTransformation, shardings: Shardings, *, head_chunk: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return a step (state, batch, used) -> (state, metrics) on the mean negative log-prob of completions."""
    loss = imitation(policy, head_chunk=head_chunk)

    def step(state: TrainState, batch: TrainBatch, used: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        return descend(tx, loss, state, batch, used, None)

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings.state, shardings.replicated))


def map_between(fn: Callable[[Any], Any], xs: Any, start: int | Int[Array, ""], stop: Int[Array, ""]) -> Any:
    """Apply fn to the entries start .. stop - 1 of axis 0 of every array of ``xs``; zeros elsewhere."""
    fn = jax.jit(fn, inline=True)  # traced once, for its shapes and for the loop
    count = jax.tree.leaves(xs)[0].shape[0]
    shapes = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], xs))
    empty = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def body(i: Int[Array, ""], out: Any) -> Any:
        return jax.tree.map(lambda o, y: o.at[i].set(y), out, fn(jax.tree.map(lambda x: x[i], xs)))

    return jax.lax.fori_loop(start, stop, body, empty)
