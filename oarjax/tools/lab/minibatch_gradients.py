"""``oarjax credit --gradients``: draw minibatches as in training, and compare their gradients under every method.

Rollouts are sampled, graded, scored and weighed by the programs of a run, and the gradient is that of the loss. Only
its surrogate counts: the KL term and the entropy bonus have no credit and are off. All methods see the same rollouts.
Only inner products of gradients are kept. Memory holds two sets of gradients (plain GRPO's and one method's, each
gradient at most ``lab.gradients.sketch`` numbers) and the sums of one update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from oarjax.config.changes import changed
from oarjax.config.inputs import DatasetConfig
from oarjax.config.learning import RolloutConfig
from oarjax.config.schema import Config
from oarjax.credit.diagnose import ess_ratio
from oarjax.credit.gate import oar_weights, polarised, reshape
from oarjax.credit.settings import CreditSettings
from oarjax.data.tasks.truth import token_truth
from oarjax.errors import ConfigError
from oarjax.grading.recorded import Grading
from oarjax.models.lora import all_params
from oarjax.rollout.sampler import rollout_key
from oarjax.run.run import Run
from oarjax.stats import Interval, jackknife_interval, mean_interval
from oarjax.step.gradients import Sums
from oarjax.step.host_callbacks import HostCallbacks
from oarjax.step.iteration import NOISE, ORDER, draw
from oarjax.step.loss import sampler_logps
from oarjax.step.minibatches import MinibatchPlan, Piece, sizes_of, widen, widest_prompt
from oarjax.step.steps import Steps
from oarjax.tools.lab.gradients import (
    Grams,
    WeightMoments,
    alignment,
    best_mixture,
    deciding_noise,
    flattened,
    noise_law,
    noise_shares,
    perfect_weights,
    score_noise,
    weight_moments,
)
from oarjax.tools.lab.results import GradientResult, MethodResult
from oarjax.types import AnswerSpan, GradedRows, Params, Rollout, SampledRows, TrainBatch, TrainState

PLAIN = "uniform (GRPO)"
TRUTH, GATED = "truth", "truth through the gate"


class DrawnMinibatch(NamedTuple):
    """Graded groups of rollouts on the host, and the plan that splits their rows into microbatches."""

    problems: np.ndarray  # [P]
    rollout: Rollout  # prompts padded to the widest allowed
    advantages: np.ndarray  # [B]
    trained: np.ndarray  # bool [B, T]
    rewards: np.ndarray  # [B], NaN where not graded
    plan: MinibatchPlan
    pivotal: np.ndarray | None  # bool [B, T]


@dataclass(frozen=True)
class Placed:
    """A minibatch on the device, in microbatches [M, b, ...]."""

    batch: TrainBatch  # with the rows' advantages repeated along their tokens
    span: Any
    rollout: Any
    rows: jax.Array  # [M, b], row numbers
    row_advantages: jax.Array  # [M, b]
    pivotal: jax.Array | None
    pieces: tuple[Piece, ...]
    denominator: jax.Array


def gradient_config(cfg: Config, credit: CreditSettings) -> Config:
    """Return a run's config with a credit method, one update per rollout, and no loss terms without credit."""
    prompts = cfg.lab.gradients.prompts or cfg.rollout.prompts
    microbatch = gcd(prompts * cfg.rollout.group_size, cfg.update.microbatch)
    one_update = {"epochs": 1, "minibatches": 1, "microbatch": microbatch, "refills": 0}
    bare = {"kl_beta": 0.0, "kl_in": "loss", "entropy_bonus": 0.0, "dual_clip": None, "reference": "device"}
    bare |= {"kl_corrected": False, "reference_every": 0, "entropy_target": None, "teacher": None}
    return cfg.model_copy(
        update={
            "credit": credit,
            "rollout": cfg.rollout.model_copy(update={"prompts": prompts}),
            "update": cfg.update.model_copy(update=one_update),
            "loss": cfg.loss.model_copy(update=bare),
        }
    )


def measure_gradients(run: Run, params: Params, grader: Grading) -> GradientResult:
    """Compare the minibatch gradients of every method of the lab with the expected gradient of plain GRPO.

    Raises:
        ConfigError: no minibatch has a group of unequal rewards, so there is no gradient.
    """
    cfg = run.cfg
    plain = run.with_config(gradient_config(cfg, changed(cfg.credit, {"method": "uniform"})))
    state, steps = plain.new_state(params), plain.steps
    with run.console.status("gradients: sampling"):
        minibatches = draw_minibatches(plain, steps, state, grader)
    if not any(m.advantages.any() for m in minibatches):
        raise ConfigError(
            "lab.gradients: the rewards within every group are equal, so there is no gradient; set another policy, "
            "easier problems, or more lab.gradients.minibatches"
        )
    by_piece = plain.cfg.loss.aggregation == "bnpo"
    gradient = gradient_program(steps, by_piece=by_piece, size=cfg.lab.gradients.sketch)
    has_truth = minibatches[0].pivotal is not None
    placed = [place(plain, m, steps) for m in minibatches]
    compute = partial(moments_of, gradient, state)
    baseline = compute([(p, p.batch.advantages, jnp.ones_like(p.batch.advantages)) for p in placed], None)
    methods = {name: changed(cfg.credit, changes) for name, changes in cfg.lab.methods.items()}
    results, count = [], len(placed)
    rho = _with_intervals(lambda kept: noise_shares(baseline.grams.of(kept)), count)["rho"] if has_truth else None

    def add(name: str, credit: Mapping[str, Any], moments: Moments) -> None:
        results.append(MethodResult(name, credit, _with_intervals(partial(figures_of, moments, baseline), count)))

    for number, (name, credit) in enumerate(methods.items(), start=1):
        with run.console.status(f"gradients: {name} ({number} of {len(methods)})"):
            if credit.method == "uniform":
                add(name, cfg.lab.methods[name], baseline)
                continue
            arm = run.with_config(gradient_config(cfg, credit))
            weighed = weigh_minibatches(arm, state, minibatches, placed)
            add(name, cfg.lab.methods[name], compute(weighed, baseline))
    if all(credit.method != "uniform" for credit in methods.values()):
        add(PLAIN, {"method": "uniform"}, baseline)
    if has_truth:
        for name in (TRUTH, GATED):
            add(name, {}, compute(list(weigh_by_truth(cfg.credit, placed, gated=name == GATED)), baseline))
    rewards = [float(np.nanmean(m.rewards)) for m in minibatches if np.isfinite(m.rewards).any()]
    outside = np.array([float(x) for x in (outside_share(p) for p in placed)])
    overall = {"reward": mean_interval(np.array(rewards)), "outside": mean_interval(outside)}
    return GradientResult(
        facts=_facts(plain.cfg.rollout, cfg.lab.gradients.sketch, minibatches, state, has_truth),
        interval=f"±: half of a 95% interval, delete-one jackknife over {count} minibatches",
        figures=overall | ({} if rho is None else {"rho": rho}),
        methods=results,
    )


# Minibatches -------------------------------------------------------------------------------------------------------


def draw_minibatches(run: Run, steps: Steps, state: TrainState, grader: Grading) -> list[DrawnMinibatch]:
    """Sample and grade minibatches of the training problems; the state is not updated."""
    cfg, stream = run.cfg, run.prompts()
    capacity = cfg.rollout.prompts * cfg.rollout.group_size
    host = HostCallbacks(
        next_prompts=lambda: next(stream)[0],
        submit=partial(run.grading, grader, run.train.by_index, group=cfg.rollout.group_size),
        find_answers=run.find_answers,
        fetch=run.fetch,
        place=run.place,
        phase=lambda name: nullcontext(),
    )
    width = widest_prompt(cfg.data, cfg.rollout)
    by_length = {"prompt_bucket": cfg.rollout.prompt_bucket, "completion_bucket": cfg.rollout.completion_bucket}
    options = {"steps": steps, "host": host, "rollout": cfg.rollout, "refills": cfg.update.refills}
    draws = [draw(state, n, **options) for n in range(1, cfg.lab.gradients.minibatches + 1)]
    out = []
    for problems, rollout, grading, *_ in draws:
        grades = grading()
        rewards = np.asarray(grades.rewards)
        graded = np.isfinite(rewards)
        advantages = np.asarray(steps.advantages(jnp.asarray(np.where(graded, rewards, np.nan)), grades.per_reward))
        rows = np.arange(capacity)
        if cfg.update.skip_zero_variance:
            constant = np.asarray(steps.equal_groups(jnp.asarray(rewards)))
            rows = np.flatnonzero(~np.repeat(constant, cfg.rollout.group_size))
        trained = np.asarray(rollout.completion) & graded[:, None]
        if cfg.loss.mask_truncated:
            trained = trained & np.asarray(rollout.ended)[:, None]
        plan = MinibatchPlan(rows, 1, cfg.update.microbatch, capacity, sizes_of(rollout, **by_length))
        questions = [run.train.by_index[int(p)].prompt for p in np.repeat(problems, cfg.rollout.group_size)]
        pivotal = pivotal_tokens(cfg.data.train, run.tokens(rollout), questions, shape=rollout.completion.shape)
        rollout = replace(widen(rollout, width), origin=None)
        out.append(DrawnMinibatch(problems, rollout, advantages, trained, rewards, plan, pivotal))
    return out


def pivotal_tokens(
    data: DatasetConfig, tokens: Sequence[Sequence[str]], questions: Sequence[str], *, shape: tuple[int, ...]
) -> np.ndarray | None:
    """Mark the tokens that decide the outcome, [B, T]; None where the task does not define them."""
    out = np.zeros(shape, bool)
    for row, (question, texts) in enumerate(zip(questions, tokens, strict=True)):
        truth = token_truth(data, question, texts)
        if truth is None:
            return None
        out[row, : len(texts)] = truth.pivotal
    return out


def read_spans(run: Run, m: DrawnMinibatch) -> tuple[AnswerSpan, tuple[Rollout, AnswerSpan] | None]:
    """Return the spans that a method reads, and the probed rollout with its spans; None if it is the rollout itself."""
    span = run.find_answers(m.rollout)
    if run.cfg.credit.answer.source != "reference":
        return span, None
    probed = run.probed(m.rollout, span, m.problems)
    reasoning = probed[1].reasoning[:, : m.trained.shape[1]]
    return replace(span, reasoning=reasoning, has_answer=probed[1].has_answer), probed


def place(run: Run, m: DrawnMinibatch, steps: Steps) -> Placed:
    """Split a minibatch's rows into microbatches and send them to the devices."""
    span, _ = read_spans(run, m)
    numbers = np.arange(len(m.advantages), dtype=np.int32)
    per_token = np.where(m.trained, m.advantages[:, None], 0).astype(np.float32)
    pivotal = m.trained & (False if m.pivotal is None else m.pivotal)
    (arrays,) = m.plan.split((m.rollout, span, numbers, m.advantages, m.trained, per_token, pivotal))
    rollout, span, rows, advantages, trained, per_token, pivotal = run.place(arrays, "microbatches")
    batch = TrainBatch(
        tokens=rollout.tokens,
        valid=rollout.valid,
        completion=trained,
        advantages=per_token,
        old_logps=None,
        ref_logps=None,
        behaviour_logps=sampler_logps(run.cfg.loss.off_policy, rollout),
        experts=rollout.experts,
    )
    return Placed(
        batch,
        span,
        rollout,
        rows,
        advantages,
        None if m.pivotal is None else pivotal,
        m.plan.pieces[0],
        steps.denominator(jnp.asarray(m.trained)),
    )


# Gradients and their moments ---------------------------------------------------------------------------------------

Weighed = tuple[Placed, jax.Array, jax.Array]
"""A minibatch, its token advantages and its weights, [M, b, T]."""


Gradient = Callable[[TrainState, TrainBatch, Sequence[Piece], jax.Array], jax.Array]
"""(state, batch, pieces, denominator) -> the flattened gradient that an update would apply, [K]."""


def gradient_program(steps: Steps, *, by_piece: bool, size: int) -> Gradient:
    """Return the program of a minibatch's gradient.

    ``by_piece``: the loss is a mean over microbatches (aggregation bnpo), divided by their count instead.
    """

    @jax.jit
    def mean(sums: Sums, denominator: jax.Array) -> jax.Array:
        count = sums.loss.count if by_piece else denominator
        return flattened(sums.grads, size=size) / jnp.maximum(count, 1e-20)

    def gradient(state: TrainState, batch: TrainBatch, pieces: Sequence[Piece], denominator: jax.Array) -> jax.Array:
        return mean(steps.updates.sums(state, batch, pieces), denominator)

    return gradient


def weigh_minibatches(
    run: Run, state: TrainState, minibatches: Sequence[DrawnMinibatch], placed: Sequence[Placed]
) -> Iterator[Weighed]:
    """Yield every minibatch with a method's token advantages, computed as in training."""
    cfg, params, hints_for = run.cfg, all_params(state), run.hints
    for number, (m, p) in enumerate(zip(minibatches, placed), start=1):
        noise_key, order_key = (rollout_key(state.key, step=number, batch=b) for b in (NOISE, ORDER))
        (arrays,) = m.plan.split((*read_spans(run, m), hints_for and hints_for(m.rollout, m.problems)))
        span, probed, hints = run.place(arrays, "microbatches")
        rows = SampledRows(p.rollout, span, p.rows, probed, hints)  # type: ignore[arg-type]
        compares = run.credit.needs_reference(kl=cfg.loss.scores_reference)
        reference = params if compares else None  # where training starts
        scores = run.steps.scores(params, reference, rows, p.pieces, noise_key, probe=cfg.credit.probe.mode)
        graded = GradedRows(p.row_advantages, p.batch.completion)
        credit, _ = run.steps.credit(scores, rows, graded, order_key, np.int32(1))
        yield p, credit.advantages, credit.weights


def weigh_by_truth(credit: CreditSettings, placed: Sequence[Placed], *, gated: bool) -> Iterator[Weighed]:
    """Yield every minibatch with weights that know the pivotal tokens."""
    for p in placed:
        if p.pivotal is None:
            raise ValueError("weigh_by_truth: expected minibatches whose pivotal tokens are known")
        flat = partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))
        pivotal, reasoning, advantages, mask = map(
            flat, (p.pivotal, p.span.reasoning, p.row_advantages, p.batch.completion)
        )
        if gated:
            weights = oar_weights((pivotal & reasoning).astype(jnp.float32), reasoning, **vars(credit.gate))
        else:
            weights = perfect_weights(pivotal, reasoning)
        weights = polarised(weights, advantages, polarity=credit.polarity)
        shape = p.batch.advantages.shape
        yield p, reshape(advantages, weights, mask).reshape(shape), weights.reshape(shape)


@dataclass(frozen=True)
class Moments:
    """Sums over a method's minibatch gradients."""

    vectors: Float[np.ndarray, "M K"] | None  # plain GRPO's gradients, the reference of the others
    grams: Grams
    weights: WeightMoments | None  # arrays [M]; None if the pivotal tokens are unknown
    inverse_ess: Float[np.ndarray, "M"]


def moments_of(gradient: Gradient, state: TrainState, weighed: Iterable[Weighed], baseline: Moments | None) -> Moments:
    """Compute the gradients of a method's minibatches and keep their inner products."""
    vectors, pivotal, sums, inverse_ess = [], [], [], []
    for p, advantages, weights in weighed:

        def fetch_gradient(advantages: jax.Array, p: Placed = p) -> np.ndarray:
            batch = replace(p.batch, advantages=advantages)
            return np.asarray(jax.device_get(gradient(state, batch, p.pieces, p.denominator)))

        vectors.append(fetch_gradient(advantages))
        inverse_ess.append(float(jax.device_get(inverse_ess_of(p, weights))))
        if p.pivotal is not None:
            pivotal.append(fetch_gradient(jnp.where(p.pivotal, advantages, 0)))
            sums.append(jax.device_get(law_moments(p, weights)))
    g = np.stack(vectors)
    u = g if baseline is None or baseline.vectors is None else baseline.vectors
    parts = (None, None)
    if pivotal:
        part = np.stack(pivotal)
        parts = _gram(part, part), _gram(g - part, g - part)
    grams = Grams(_gram(g, g), _gram(g, u), _gram(u, u), *parts)
    law = WeightMoments(*(np.array(x) for x in zip(*sums))) if sums else None
    return Moments(g if baseline is None else None, grams, law, np.array(inverse_ess))


def _gram(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a @ b.T).astype(np.float64)


def _noise_of(p: Placed) -> jax.Array:
    """Compute ``score_noise`` of every trained token, [rows, T]."""
    flat = p.batch.behaviour_logps
    assert flat is not None
    return score_noise(
        flat.reshape(-1, flat.shape[-1]), p.row_advantages.reshape(-1), p.batch.completion.reshape(-1, flat.shape[-1])
    )


def law_moments(p: Placed, weights: jax.Array) -> WeightMoments:
    """Compute a minibatch's sums for ``noise_law``."""
    length = weights.shape[-1]
    return weight_moments(weights.reshape(-1, length), _noise_of(p), jnp.asarray(p.pivotal).reshape(-1, length))


def outside_share(p: Placed) -> jax.Array:
    """Return the share of a minibatch's score noise outside the reasoning, mostly in its answers."""
    noise = _noise_of(p)
    inside = jnp.sum(jnp.where(p.span.reasoning.reshape(noise.shape), noise, 0))
    total = jnp.sum(noise)
    return jnp.where(total > 0, 1 - inside / jnp.where(total > 0, total, 1), jnp.nan)


def inverse_ess_of(p: Placed, weights: jax.Array) -> jax.Array:
    """Return the mean of 1 / ESS over the trained rows."""
    length = weights.shape[-1]
    reasoning = p.span.reasoning.reshape(-1, length) & p.batch.completion.reshape(-1, length)
    ratio = ess_ratio(weights.reshape(-1, length), reasoning)
    rows = jnp.isfinite(ratio) & (p.row_advantages.reshape(-1) != 0)
    return jnp.sum(jnp.where(rows, 1 / jnp.where(rows, ratio, 1), 0)) / jnp.maximum(jnp.sum(rows), 1)


# Figures -----------------------------------------------------------------------------------------------------------


def figures_of(moments: Moments, baseline: Moments, kept: np.ndarray) -> dict[str, float]:
    """Compute a method's figures from some of the minibatches."""
    grams = moments.grams.of(kept)
    out = alignment(grams) | best_mixture(grams) | {"inverse_ess": float(np.mean(moments.inverse_ess[kept]))}
    if moments.weights is not None:
        shares = noise_shares(grams)
        rho = noise_shares(baseline.grams.of(kept))["rho"]
        weights = WeightMoments(*(x[kept] for x in moments.weights))
        out |= {"pivotal": shares["pivotal"], "other": shares["other"], "law": noise_law(rho, weights)}
        plain = deciding_noise(baseline.grams.of(kept))
        out["deciding"] = deciding_noise(grams) / plain if plain > 0 else np.nan
    return out


def _with_intervals(statistic: Callable[[np.ndarray], Mapping[str, float]], count: int) -> dict[str, Interval]:
    numbers = np.arange(count)
    values = statistic(numbers)
    left_out = [statistic(np.delete(numbers, i)) for i in range(count)]
    return {name: jackknife_interval(v, np.array([x[name] for x in left_out])) for name, v in values.items()}


def _facts(
    rollout: RolloutConfig, size: int, minibatches: Sequence[DrawnMinibatch], state: TrainState, has_truth: bool
) -> dict[str, str]:
    numbers = sum(x.size for x in jax.tree.leaves(state.params))
    exact = numbers <= size
    rows = [np.count_nonzero(m.advantages) for m in minibatches]
    return {
        "minibatches": f"{len(minibatches)} of {rollout.prompts} prompts x {rollout.group_size} rollouts, "
        f"{np.mean(rows):.1f} rows with a gradient",
        "gradients": f"{numbers:,} numbers, inner products "
        + ("exact" if exact else f"estimated from count sketches of {size:,}: ±{size**-0.5:.1e} of the norms' product"),
        "pivotal tokens": "known" if has_truth else "unknown for this task",
    }
