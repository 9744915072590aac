"""Build the device programs of training, once per run from a policy, an optimizer and a config.

Rows travel as [M, b, ...]: M microbatches of b rows, as wide as the longest row of a run may be. A program takes those
of one bucket of lengths, cuts them to it, and loops over them with traced bounds. So there is one compilation per
bucket, whatever the number of rows, and an update adds up the buckets' gradients before one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import exp, gcd
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.config.learning import OptimConfig, RolloutConfig, SFTConfig, UpdateConfig
from oarjax.config.schema import Config
from oarjax.credit.kinds import neutral, relative, token_advantages
from oarjax.credit.measures import measure
from oarjax.credit.methods.keywords import KeywordTable
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.probe import ProbeMode, outcome_probability
from oarjax.credit.record import CUSTOM
from oarjax.credit.resolved import ResolvedMethod, credit_metrics, resolve_method
from oarjax.credit.signals import CreditInputs, signals_of
from oarjax.errors import ConfigError
from oarjax.models.lora import without_adapters
from oarjax.models.policy import Policy, grouped, replaying
from oarjax.rl.advantages import AdvantageFunction
from oarjax.rl.carried import control_entropy, keep_reference
from oarjax.rl.loss import aggregate
from oarjax.rl.masked import masked_sum, widened
from oarjax.rl.optimizer import OptimizerFunction, adamw, custom_optimizer, learning_rate
from oarjax.rollout.logps import last_states, token_logps
from oarjax.step.advantages import (
    bound_advantages,
    bound_equal_groups,
    bound_kl_penalty,
    row_advantages,
    split_advantages,
    taught_advantages,
)
from oarjax.step.fused import FusedPass, FusedSums, fuses
from oarjax.step.gradients import Summed, Sums, add_microbatches, apply_sums, gradient_sums, no_sums
from oarjax.step.loss import Metrics, TokenLoss, imitation, loss_head, policy_gradient, token_loss
from oarjax.step.metrics import negative_rows, nonfinite_rows
from oarjax.step.minibatches import Bucket, bucket, completion_buckets, cut, padded
from oarjax.step.sampling import evaluation_sampler, group_sampler
from oarjax.step.steps import Steps, UpdatePrograms
from oarjax.types import (
    AnswerSpan,
    Credit,
    GradedRows,
    Params,
    Rollout,
    SampledRows,
    Scores,
    TrainBatch,
    TrainState,
)


class Shardings(NamedTuple):
    """Shardings of the training layout."""

    state: Any  # a tree like TrainState
    params: Any
    rows: Any  # axis 0 divided over the row axes
    replicated: Any
    microbatches: Any = None  # axis 1 divided over the row axes
    options: dict[str, Any] | None = None  # of the compiler, for what goes forward and backward through the policy


class RolloutLayout(NamedTuple):
    """The policy as it samples: other devices hold other parts of it than in training, in the compute dtype."""

    policy: Policy
    prepare: Callable[[Params], Params]  # from the training params; pure
    params: Any  # shardings of what ``prepare`` gives
    rows: Any  # of prompts and rollouts
    evaluated: Policy | None = None  # in evaluations; None: ``policy``


def make_optimizer(
    cfg: Config, *, function: OptimizerFunction | None = None
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Build the run's optimizer and its schedule (updates -> learning rate).

    Args:
        cfg: of the run; its ``optim`` section, and the number of updates.
        function: what ``optim.function`` names, in the place of AdamW; default None.
    """
    tx, schedule = _optimizer(cfg.optim, cfg.iterations * cfg.update.epochs * cfg.update.minibatches, function)
    loss, transforms = cfg.loss, []
    if loss.reference_every:
        transforms.append(keep_reference())
    if loss.entropy_target is not None:
        rates = {"step": loss.entropy_step, "highest": loss.entropy_highest}
        transforms.append(control_entropy(start=loss.entropy_bonus, target=loss.entropy_target, **rates))
    return (optax.chain(tx, *transforms) if transforms else tx), schedule


def make_sft_optimizer(
    cfg: SFTConfig, *, function: OptimizerFunction | None = None
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Build the warm start's optimizer and its schedule."""
    return _optimizer(cfg.optim, cfg.steps, function)


def _optimizer(
    o: OptimConfig, updates: int, function: OptimizerFunction | None
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    schedule = learning_rate(peak=o.lr, schedule=o.schedule, warmup=o.warmup, updates=updates)
    if function is not None:
        return custom_optimizer(function, schedule, o.settings, clip_norm=o.clip_norm), schedule
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
    method: ResolvedMethod | None = None,
    custom_loss: TokenLoss | None = None,
    custom_advantages: AdvantageFunction | None = None,
    reference_policy: Policy | None = None,
) -> Steps:
    """Bind policy, optimizer and config into jitted programs. Compiles nothing yet.

    Args:
        policy: the model's functions, as it trains.
        tx: optimizer, such as ``make_optimizer`` gives.
        shardings: of the training layout.
        cfg: of the run.
        stop_ids: ids that end a completion.
        pad_id: fills tokens after the end.
        token_bytes: bytes of every id, for stop strings; default ().
        rollout: layout of sampling; default None: the policy samples as it trains.
        keyword_table: for credit methods that read it; default None.
        method: that of ``cfg.credit``, resolved by a caller to add a custom method or probe; default None.
        custom_loss: in the place of ``loss.surrogate``; default None.
        custom_advantages: in the place of ``advantage.method``; default None.
        reference_policy: functions of the reference, where its architecture is another; default None.

    Raises:
        ConfigError: the method of credit needs what is not there, such as ``keyword_table`` for keywords.
    """
    method = method or resolve_method(cfg.credit)
    method.check_groups(cfg.rollout.group_size)
    method.check_updates(epochs=cfg.update.epochs, minibatches=cfg.update.minibatches)
    roll = cfg.rollout
    if rollout is None:
        rollout = RolloutLayout(policy, lambda params: params, None, shardings.rows)
    prompt_rows = prompt_rows_of(
        roll,
        cfg.update,
        width=bucket(cfg.data.max_prompt, roll.prompt_bucket),
        rows=device_rows(shardings.microbatches, cfg.update.microbatch),
        experts=policy.routed is not None,
        auto=cfg.loss.aggregation != "bnpo" and _on_cpu(shardings.replicated),
    )
    common = {"rows": rollout.rows, "stop_ids": stop_ids, "pad_id": pad_id, "token_bytes": token_bytes}
    sampler = partial(group_sampler, rollout.policy, roll, record_experts=cfg.policy.router == "replay", **common)
    evaluation = partial(evaluation_sampler, rollout.evaluated or rollout.policy, roll, cfg.eval, **common)
    groups, later_turns = sampler(), sampler(goes_on=True)
    head = loss_head(roll, cfg.loss.off_policy, head_chunk=cfg.policy.head_chunk)
    # With one update per rollout the ratio is 1: old = stop_gradient(new), no pass of its own.
    scores_ref = cfg.loss.scores_reference  # otherwise rollouts bring its log-probs, or nothing reads them
    wants_old = cfg.loss.kl_in == "token" or cfg.update.epochs * cfg.update.minibatches > 1
    own_measures, kind, soft = method.measures, method.kind, cfg.advantage.soft != "off"
    measures = {"logps", *own_measures} if wants_old else own_measures
    scorer_for = partial(method.scorer, temperature=roll.temperature, pad_id=pad_id)
    scorer_for(policy)  # fails on what cannot go together
    weights_of = method.weigher(keyword_table=keyword_table)

    def outcome_of(policy: Policy, params: Params, rows: Rollout, span: AnswerSpan, hidden: Any) -> Float[Array, "b"]:
        """Compute the probability of the reference answer, from the clean states of an attribution if it left any."""
        if span.outcome is None:
            raise ValueError("advantage.soft: needs rows with the reference answer")
        width = span.outcome.shape[-1]
        if hidden is None:
            hidden = last_states(policy, params, rows.tokens, rows.valid, completion_length=width)
        options = {"temperature": roll.temperature}
        return outcome_probability(policy, params, hidden, span.outcome, rows.tokens[:, -width:], **options)

    def score(
        params: Params,
        ref_params: Params | None,
        rows: SampledRows,
        key: Key[Array, ""],
        start: Int[Array, ""],
        stop: Int[Array, ""],
        *,
        probe: ProbeMode,
        bucket: Bucket | None = None,
    ) -> Scores:
        T = rows.rollout.completion.shape[-1]
        # Below adapters lies what training started from: a reference that is that and stays it is there already.
        separate_reference = cfg.loss.reference_every or reference_policy is not None
        reference = without_adapters(params) if cfg.lora.rank and not separate_reference else ref_params
        shared_policy = policy if bucket is None else grouped(policy, bucket.prompt_rows)
        ref_policy, score_of = reference_policy or shared_policy, scorer_for(shared_policy)

        def score_microbatch(xs: Any) -> Scores:
            (r, s), numbers, probed, teacher = cut(xs[:2], bucket, length=T), *xs[2:]
            if probed is not None:
                probed = cut(probed, bucket, length=T, room=probed[0].completion.shape[-1] - T)
            length = r.completion.shape[-1]
            batch = {"tokens": r.tokens, "valid": r.valid, "completion_length": length}
            probed_rows, probed_span = probed or (r, s)
            attribution = score_of(params, probed_rows, probed_span, row_keys(key, numbers), probe)
            outcome = outcome_of(shared_policy, params, probed_rows, probed_span, attribution.hidden) if soft else None
            if probed is not None:  # its reasoning stands where the rollout's does; its clean states do not
                row_signals = jax.tree.map(lambda x: x[:, :length], (attribution.importance, attribution.values))
                attribution = attribution._replace(importance=row_signals[0], values=row_signals[1], hidden=None)
            if r.experts is not None and measures:  # the attribution's router chose for itself
                attribution = attribution._replace(hidden=last_states(replaying(policy, r.experts), params, **batch))
            measurements = measure(
                shared_policy,
                params,
                **batch,
                signals=measures,
                hidden=attribution.hidden,  # of the attribution's clean pass, if there is one
                reference=reference,
                teacher=teacher,
                **head,
            )
            scores = Scores(
                old_logps=measurements["logps"] if wants_old else None,
                ref_logps=token_logps(ref_policy, reference, **batch, **head)[0] if scores_ref else r.teacher_logps,
                importance=attribution.importance,
                measured={name: measurements[name] for name in sorted(own_measures)} or None,
                values=attribution.values,
            )
            padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, T - length), *((0, 0),) * (x.ndim - 2))), scores)
            return replace(padded, outcome=outcome)

        teacher = rows.hints and rows.hints.teacher
        arrays = rows.rollout, rows.span, rows.numbers, rows.probed, teacher
        return map_between(score_microbatch, arrays, start, stop)

    def drift(start: Params, rows: Rollout) -> Float[Array, "b"]:
        options = {**head, "filters": None, "completion_length": rows.completion.shape[1]}
        logps, _ = token_logps(policy, start, rows.tokens, rows.valid, **options)
        return masked_sum(jnp.expm1(gap := widened(logps) - widened(rows.behaviour_logps)) - gap, rows.completion)

    def credit(
        scores: Scores, rows: SampledRows, graded: GradedRows, key: Key[Array, ""], iteration: int | Int[Array, ""]
    ) -> tuple[Credit, Metrics]:
        M, b = graded.advantages.shape
        flat = partial(jax.tree.map, lambda x: x.reshape(M * b, *x.shape[2:]))
        s, mask, a = flat(rows.span), flat(graded.completion), flat(graded.advantages)
        by_row = flat(scores)
        extra = {
            "length": mask.shape[1],
            "group_size": roll.group_size,
            "hints": flat(rows.hints),
            "iteration": iteration,
        }
        signals = signals_of(by_row, flat(rows.rollout.tokens), flat(rows.numbers), **extra)
        method_credit = weights_of(CreditInputs(signals, s, a, mask, key))
        per_token = {"old_logps": by_row.old_logps, "ref_logps": by_row.ref_logps, **(by_row.measured or {})}
        per_token["weights"] = method_credit
        faults = nonfinite_rows(
            {**per_token, "importance": signals.importance, "advantages": a},
            {**dict.fromkeys(per_token, mask), "importance": s.reasoning, "advantages": jnp.ones(a.shape, bool)},
            mask.any(-1),
        )
        sound = jnp.all(jnp.isfinite(method_credit) | ~mask, axis=-1)[:, None]
        method_credit = jnp.where(sound, method_credit, neutral(kind, a))
        advantages = token_advantages(kind, method_credit, a, mask)
        if graded.late is not None:
            advantages = split_advantages(advantages, flat(graded.late), s.answer, mask, flat(rows.rollout.ended))
        w = relative(kind, method_credit, advantages, a, mask)
        tokens = Credit(
            importance=jnp.zeros_like(w) if signals.importance is None else signals.importance,
            weights=w,
            advantages=taught_advantages(advantages, mask, by_row, cfg.loss),
            returned=method_credit,
        )
        by_microbatch = jax.tree.map(lambda x: x.reshape(M, b, *x.shape[1:]), tokens)
        if method.settings.method == CUSTOM and kind == "weights":  # built-in ones keep the contract
            faults["negative_weights"] = negative_rows(method_credit, mask)
        return by_microbatch, credit_metrics(jnp.abs(w), s, mask) | faults

    of_tokens = token_loss(cfg.loss, roll, lag=cfg.update.lag, custom_loss=custom_loss)

    def sums_for(prompt_rows: int) -> Summed:
        view, chunk = grouped(policy, prompt_rows), cfg.policy.head_chunk
        return gradient_sums(policy_gradient(view, roll, cfg.loss, method, of_tokens, head_chunk=chunk))

    sums_of = sums_for(1)

    def denominator(completion: Bool[Array, "B T"]) -> Float[Array, ""]:
        zeros = jnp.zeros(completion.shape, jnp.float32)
        mean = aggregate(zeros, completion, mode=cfg.loss.aggregation, max_length=roll.max_new)
        return mean.count / cfg.update.minibatches

    def accumulate(
        sums: Sums,
        state: TrainState,
        batch: TrainBatch,
        start: Int[Array, ""],
        stop: Int[Array, ""],
        *,
        bucket: Bucket | None = None,
    ) -> Sums:
        shared_sums = sums_of if bucket is None else sums_for(bucket.prompt_rows)
        return add_microbatches(shared_sums, sums, state, batch, start, stop, bucket=bucket)

    def apply(state: TrainState, sums: Sums, denominator: Float[Array, ""] | None) -> tuple[TrainState, Metrics]:
        # bnpo means over its pieces, here microbatches of rows of similar length; the others over the whole rollout.
        return apply_sums(tx, state, sums, None if cfg.loss.aggregation == "bnpo" else denominator)

    jit = partial(jax.jit, compiler_options=shardings.options)
    updates = _update_programs(partial(no_sums, sums_of), accumulate, apply, shardings)
    fused: dict[str, Any] = {}
    scorer = method.shared_scorer(policy, temperature=roll.temperature, pad_id=pad_id)
    if scorer is not None and fuses(cfg.update, method, kl_beta=cfg.loss.kl_beta, experts=policy.routed is not None):
        one_pass = FusedPass(policy, scorer, credit, of_tokens, cfg.loss.off_policy, head)
        at = FusedSums(_summed(shardings), shardings.microbatches, shardings.microbatches, shardings.replicated)
        fused["fused_zeros"] = jax.jit(one_pass.zeros, out_shardings=at)
        fused["fused_add"] = jit(one_pass.add, static_argnames=("probe", "bucket"), donate_argnums=0, out_shardings=at)
    return Steps(
        **updates._asdict(),
        **fused,
        rollout_params=jax.jit(rollout.prepare, out_shardings=rollout.params),
        sample=groups,
        evaluate=evaluation(),
        sample_on=later_turns,
        evaluate_on=evaluation(goes_on=True),
        equal_groups=jax.jit(bound_equal_groups(cfg.advantage, group_size=roll.group_size)),
        advantages=jax.jit(
            row_advantages(cfg.advantage, cfg.grading, method, group_size=roll.group_size)
            or bound_advantages(cfg.advantage, cfg.grading, group_size=roll.group_size, custom=custom_advantages)
        ),
        after_kl=jax.jit(bound_kl_penalty(cfg.loss.kl_beta)),
        score=jit(score, static_argnames=("probe", "bucket"), out_shardings=shardings.microbatches),
        credit=jax.jit(credit, out_shardings=(shardings.microbatches, shardings.replicated)),
        denominator=jax.jit(denominator),
        drift=jax.jit(drift),
        values=kind == "values",
        decoding=lambda: groups.spent().plus(later_turns.spent()),
        pad_id=pad_id,
        prompt_rows=prompt_rows,
    )


def make_sft_steps(
    policy: Policy, tx: optax.GradientTransformation, shardings: Shardings, *, head_chunk: int
) -> UpdatePrograms:
    """Return the jitted programs of an update on the mean negative log-prob of completions."""
    sums_of = gradient_sums(imitation(policy, head_chunk=head_chunk))
    return _update_programs(
        partial(no_sums, sums_of), partial(add_microbatches, sums_of), partial(apply_sums, tx), shardings
    )


def _summed(shardings: Shardings) -> Sums:
    """Return the shardings of summed gradients."""
    params = shardings.state.params if isinstance(shardings.state, TrainState) else shardings.state
    return Sums(params, shardings.replicated, shardings.replicated)


def _update_programs(zeros: Any, accumulate: Any, apply: Any, shardings: Shardings) -> UpdatePrograms:
    jit = partial(jax.jit, compiler_options=shardings.options, out_shardings=_summed(shardings))
    return UpdatePrograms(
        zeros=jax.jit(zeros, out_shardings=_summed(shardings)),
        accumulate=jit(accumulate, static_argnames="bucket", donate_argnums=0),
        apply=jax.jit(apply, donate_argnums=0, out_shardings=(shardings.state, shardings.replicated)),
    )


def prompt_rows_of(
    rollout: RolloutConfig, update: UpdateConfig, *, width: int, rows: int, experts: bool, auto: bool
) -> int:
    """Return the rows of a group that share a pass over their prompt: ``update.prompt_rows``.

    ``auto`` takes the number that computes the fewest positions, and 1 unless it saves a tenth of them. It assumes
    prompts half as wide as they may be and completions that are independent of their group and lognormal, of median
    .4 * max_new and sigma .6: half of all are between .27 and .6 of max_new.

    Args:
        width: positions of the widest prompt.
        rows: rows of a microbatch on one device.
        experts: the policy has experts, whose load is counted over whole rows.
        auto: False where ``auto`` is 1.

    Raises:
        ConfigError: the number does not divide the rows of a group in a minibatch, or those of a device.
    """
    group_rows, remainder = divmod(rollout.group_size, update.minibatches)
    limit = 1 if experts or remainder else gcd(rows, group_rows)
    if update.prompt_rows != "auto":
        if limit % update.prompt_rows:
            raise ConfigError(
                f"update.prompt_rows: expected a divisor of {limit}, of the rows of a group in a minibatch and of the "
                f"{rows} rows of a microbatch on a device (1 for a policy with experts), got {update.prompt_rows}; set "
                "auto, or change update.microbatch"
            )
        return update.prompt_rows
    if not auto or limit == 1:
        return 1
    spread = NormalDist(0, 0.6)
    lengths = [exp(spread.inv_cdf((k + 1) / (group_rows + 1))) * 0.4 * rollout.max_new for k in range(group_rows)]
    sizes = completion_buckets(rollout.completion_bucket, rollout.max_new)
    padded_lengths = padded([min(int(n), rollout.max_new) for n in lengths], sizes).tolist()

    def positions(share: int) -> float:
        return width / 2 / share + sum(padded_lengths[share - 1 :: share]) * share / len(padded_lengths)

    best = min((n for n in range(1, limit + 1) if limit % n == 0), key=positions)
    return best if positions(best) < 0.9 * positions(1) else 1


def device_rows(microbatches: Any, rows: int) -> int:
    """Return the rows of a microbatch that one device holds, with the sharding of microbatches; None: all of them."""
    return rows if microbatches is None else microbatches.shard_shape((1, rows))[1]


def _on_cpu(sharding: Any) -> bool:
    """Return True if the sharding's devices are CPUs."""
    return all(device.platform == "cpu" for device in sharding.device_set)


def map_between(fn: Callable[[Any], Any], xs: Any, start: Int[Array, ""], stop: Int[Array, ""]) -> Any:
    """Apply fn to the entries start .. stop - 1 of axis 0 of every array of ``xs``; zeros elsewhere."""
    fn = jax.jit(fn, inline=True)  # traced once, for its shapes and for the loop
    count = jax.tree.leaves(xs)[0].shape[0]
    shapes = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], xs))
    zeros = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def body(i: Int[Array, ""], out: Any) -> Any:
        return jax.tree.map(lambda o, y: o.at[i].set(y), out, fn(jax.tree.map(lambda x: x[i], xs)))

    return jax.lax.fori_loop(start, stop, body, zeros)
