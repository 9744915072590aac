"""Score and update a microbatch in one pass, if both use the same params.

With one update per rollout, OAR-G's clean pass is the update's own forward. It is linearised once, in the embeddings
and in the params: the probe's cotangent gives the importance, and with it weights and advantages; the loss's cotangent,
over the same residuals, gives the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from oarjax.config.learning import OffPolicyConfig, UpdateConfig
from oarjax.credit.clean_pass import shared_pass
from oarjax.credit.oar.oar_g import row_keys
from oarjax.credit.probe import ProbeMode
from oarjax.credit.resolved import ResolvedMethod, SharedScorer
from oarjax.models.lora import join_params
from oarjax.models.policy import Policy, grouped
from oarjax.rl.masked import widened
from oarjax.rollout.logps import hidden_logps
from oarjax.step.gradients import Sums, applied_entropy_bonus
from oarjax.step.loss import HeadSettings, Metrics, TokenLoss, sampler_logps
from oarjax.step.minibatches import Bucket, cut
from oarjax.types import Credit, GradedRows, Mean, Params, SampledRows, Scores, TrainBatch, TrainState


class FusedSums(NamedTuple):
    """Sums over microbatches before an update, and the credit of the rows so far."""

    sums: Sums
    importance: Float[Array, "M b T"]
    weights: Float[Array, "M b T"]  # 1 in rows without computed weights
    metrics: Metrics  # of credit


def fuses(update: UpdateConfig, credit: ResolvedMethod, *, kl_beta: float, experts: bool = False) -> bool:
    """Decide if a run scores and updates in one pass: by settings and policy, so that a resumed run does the same.

    Both must be at the same params (one update per rollout) and read the same rows (no reference policy, no reference
    answers), and the method must be able to share a pass: its weights of a row come from the row's importance and
    tokens alone, and it adds nothing to the loss. ``auto`` also requires that the grades are needed before scoring
    anyway, to skip groups or to refill them: otherwise workers grade while the device scores, and saving a pass may
    cost more than it gains. A policy with ``experts`` updates in a pass of its own, which reports their load.
    """
    method = credit.method
    shares = method.shared is not None and method.kind == "weights" and method.coupling == "row"
    row_local = method.loss is None and set(method.needs) <= {"importance", "tokens", "keyword_table"}
    return (
        update.fused == "auto"
        and not experts
        and update.epochs * update.minibatches == 1
        and kl_beta == 0
        and credit.settings.answer.source == "own"
        and shares
        and row_local
        and (update.skip_zero_variance or update.refills > 0)
    )


@runtime_checkable
class CreditRows(Protocol):
    """Compute weights and advantages of the tokens of microbatches [M, b, ...] from their scores."""

    def __call__(
        self, scores: Scores, rows: SampledRows, graded: GradedRows, key: Key[Array, ""], iteration: Any, /
    ) -> tuple[Credit, Metrics]: ...


@dataclass(frozen=True)
class FusedPass:
    """Score, credit and gradient of a microbatch in one pass, and their sums."""

    policy: Policy
    importance: SharedScorer
    credit: CreditRows
    loss: TokenLoss
    off_policy: OffPolicyConfig
    head: HeadSettings

    def microbatch(
        self,
        state: TrainState,
        rows: SampledRows,
        graded: GradedRows,
        noise_key: Key[Array, ""],
        order_key: Key[Array, ""],
        probe: ProbeMode,
        *,
        prompt_rows: int = 1,
    ) -> FusedSums:
        """Return the sums and the credit of one microbatch [b, ...]; see ``models.policy.grouped``."""
        r, length = rows.rollout, graded.completion.shape[-1]
        params_of = partial(join_params, state.frozen)
        policy, places = grouped(self.policy, prompt_rows), {"completion_length": length}
        shared = shared_pass(policy, params_of, state.params, r.tokens, r.valid, **places)
        keys = row_keys(noise_key, rows.numbers)
        scores = Scores(None, None, self.importance(params_of(state.params), shared.linear, r, rows.span, keys, probe))
        single = partial(jax.tree.map, lambda x: x[None])
        credit, metrics = self.credit(single(scores), single(rows), single(graded), order_key, 1)

        def total(params: Params, hidden: Float[Array, "b T D"]) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
            ids = r.tokens[:, -length:]
            logps, entropies = hidden_logps(self.policy, params_of(params), hidden, ids, **self.head)
            batch = TrainBatch(
                tokens=r.tokens,
                valid=r.valid,
                completion=graded.completion,
                advantages=credit.advantages[0],
                old_logps=None,
                ref_logps=None,
                behaviour_logps=sampler_logps(self.off_policy, r),
                entropy_bonus=applied_entropy_bonus(state),
            )
            mean, metrics = self.loss(logps, entropies, batch)
            return mean.total, (mean, metrics)

        by_both = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        (_, (mean, loss_metrics)), (by_head, by_hidden) = by_both(state.params, shared.linear.hidden)
        grads = jax.tree.map(jnp.add, by_head, shared.pull_params(by_hidden))
        sums = Sums(jax.tree.map(widened, grads), mean, loss_metrics)
        return FusedSums(sums, credit.importance[0], credit.weights[0], metrics)

    def zeros(self, state: TrainState, rows: SampledRows, graded: GradedRows) -> FusedSums:
        """Return the sums over no microbatch of [M, b, ...]."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        microbatch = jax.tree.map(lambda x: x[0], (rows, graded))
        shapes = jax.eval_shape(partial(self.microbatch, probe="last"), state, *microbatch, key, key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        broadcast = partial(jnp.broadcast_to, shape=(rows.numbers.shape[0], *zeros.weights.shape))
        return zeros._replace(importance=broadcast(zeros.importance), weights=broadcast(zeros.weights) + 1)

    def add(
        self,
        so_far: FusedSums,
        state: TrainState,
        rows: SampledRows,
        graded: GradedRows,
        noise_key: Key[Array, ""],
        order_key: Key[Array, ""],
        start: Int[Array, ""],
        stop: Int[Array, ""],
        *,
        probe: ProbeMode,
        bucket: Bucket | None = None,
    ) -> FusedSums:
        """Add microbatches start .. stop - 1, each cut to ``bucket``; bounds are traced, see ``add_microbatches``."""
        length = graded.completion.shape[-1]

        def step(i: Int[Array, ""], so_far: FusedSums) -> FusedSums:
            its_rows, its_grades = cut(jax.tree.map(lambda x: x[i], (rows, graded)), bucket, length=length)
            options = {"prompt_rows": 1 if bucket is None else bucket.prompt_rows}
            part = self.microbatch(state, its_rows, its_grades, noise_key, order_key, probe, **options)

            def write(array: Array, x: Array, fill: int) -> Array:
                return array.at[i].set(jnp.pad(x, ((0, 0), (0, length - x.shape[-1])), constant_values=fill))

            return FusedSums(
                jax.tree.map(jnp.add, so_far.sums, part.sums),
                write(so_far.importance, part.importance, 0),
                write(so_far.weights, part.weights, 1),
                jax.tree.map(jnp.add, so_far.metrics, part.metrics),
            )

        return jax.lax.fori_loop(start, stop, step, so_far)
