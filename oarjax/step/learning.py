"""Learn from the rows of an iteration: score, credit and update its minibatches, in two passes or in one.

learner = TwoPasses(steps, host, purpose, off_policy)        # score, then credit and gradients: workers grade meanwhile
learner = OnePass(steps, host, purpose, off_policy)          # all of it in one pass, where both are at the same params
learner = Watched(learner, watch)             # either, with every phase shown to the health watch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from oarjax.config.learning import OffPolicyConfig
from oarjax.credit.probe import ProbeMode
from oarjax.models.lora import all_params
from oarjax.step.gradients import Sums
from oarjax.step.host_callbacks import HostCallbacks, PhaseRecord
from oarjax.step.loss import Metrics, sampler_logps
from oarjax.step.metrics import NONFINITE, unsound_rows
from oarjax.step.minibatches import MinibatchPlan, Piece, widen
from oarjax.step.steps import Steps
from oarjax.types import Evidence, GradedRows, Mean, Params, SampledRows, Scores, TrainBatch, TrainState

Denominator = Float[Array, ""]
"""What the sum of the losses is divided by."""


class Purpose(NamedTuple):
    """An iteration's number, its probe, and the keys of OAR-G's noise and of the order of permuted weights."""

    iteration: int
    probe: ProbeMode
    noise_key: Key[Array, ""]
    order_key: Key[Array, ""]


class Minibatch(NamedTuple):
    """The rows of one update, on the devices: microbatches [M, b, ...]."""

    number: int
    rows: SampledRows
    pieces: tuple[Piece, ...]
    used: Int[Array, ""]  # microbatches that hold a row


class Credited(NamedTuple):
    """A minibatch that is ready for its updates."""

    scores: Scores
    graded: GradedRows
    weights: Float[Array, "M b T"]
    returned: Float[Array, "M b T"]  # by the credit method, of its kind
    metrics: Metrics
    denominator: Denominator
    trains: bool  # False without a token in the loss
    gradient: Callable[[TrainState], Sums]


class TwoPasses:
    """Score every minibatch first; the gradients are computed from its credit, in every update."""

    credit_phase: Literal["credit", "update"] = "credit"

    def __init__(self, steps: Steps, host: HostCallbacks, purpose: Purpose, off_policy: OffPolicyConfig) -> None:
        self.steps, self.host, self.purpose, self.off_policy = steps, host, purpose, off_policy

    def divide(self, state: TrainState, rows: SampledRows, plan: MinibatchPlan, *, width: int) -> list[Minibatch]:
        """Divide rows [B, ...] into minibatches, their prompts padded to ``width``, and send them to the devices."""
        probed = rows.probed and (widen(rows.probed[0], width), rows.probed[1])
        padded_rows = replace(rows, rollout=widen(rows.rollout, width), probed=probed)
        parts = zip(plan.split(padded_rows), plan.pieces, plan.used, strict=True)
        return [
            Minibatch(number, self.host.place(part, "microbatches"), pieces, jnp.asarray(used))
            for number, (part, pieces, used) in enumerate(parts)
        ]

    def score(self, state: TrainState, reference: Params | None, minibatches: list[Minibatch]) -> list[Scores]:
        """Score the minibatches under the policy that drew them, before their grades are known."""
        with self.host.phase("score"):
            params, purpose = all_params(state), self.purpose
            ref_params = None if reference is None else self.host.load_reference(reference)
            scores = [
                self.steps.scores(params, ref_params, m.rows, m.pieces, purpose.noise_key, probe=purpose.probe)
                for m in minibatches
            ]
            return jax.block_until_ready(scores)  # and the reference is freed: the update needs the memory

    def credit(
        self, state: TrainState, minibatch: Minibatch, scores: Scores, graded: GradedRows, denominator: Denominator
    ) -> Credited:
        """Send group advantages to the devices, and turn them and the scores into the credit of every token."""
        rows, purpose, trains = minibatch.rows, self.purpose, bool(graded.completion.any())
        graded = self.host.place(graded, "microbatches")
        credit, metrics = self.steps.credit(scores, rows, graded, purpose.order_key, np.int32(purpose.iteration))
        batch = TrainBatch(
            tokens=rows.rollout.tokens,
            valid=rows.rollout.valid,
            completion=graded.completion,
            advantages=credit.advantages,
            old_logps=scores.old_logps,
            ref_logps=scores.ref_logps,
            behaviour_logps=sampler_logps(self.off_policy, rows.rollout),
            teacher=rows.hints and rows.hints.teacher,
            experts=rows.rollout.experts,
            values=scores.values and replace(scores.values, scale=graded.scale),
        )
        method_credit = credit.weights if credit.returned is None else credit.returned

        def gradient(state: TrainState) -> Sums:
            return self.steps.updates.sums(state, batch, minibatch.pieces)

        return Credited(scores, graded, credit.weights, method_credit, metrics, denominator, trains, gradient)

    def update(self, state: TrainState, minibatch: Minibatch, credited: Credited) -> tuple[TrainState, Metrics]:
        """Make one optimizer update from a minibatch."""
        return self.steps.apply(state, credited.gradient(state), credited.denominator)


class OnePass(TwoPasses):
    """Compute scores, credit and gradient in one pass once the grades are known; there is one update, see ``fuses``."""

    credit_phase = "update"

    def score(self, state: TrainState, reference: Params | None, minibatches: list[Minibatch]) -> list[Scores]:
        """Return no scores: ``credit`` computes them."""
        return [Scores() for _ in minibatches]

    def credit(
        self, state: TrainState, minibatch: Minibatch, scores: Scores, graded: GradedRows, denominator: Denominator
    ) -> Credited:
        """Score and credit the minibatch, and add up its gradients."""
        keys, probe = (self.purpose.noise_key, self.purpose.order_key), self.purpose.probe
        trains, graded = bool(graded.completion.any()), self.host.place(graded, "microbatches")
        fused = self.steps.fused(state, minibatch.rows, graded, minibatch.pieces, keys, probe=probe)
        scores = Scores(importance=fused.importance)
        weights = fused.weights
        return Credited(scores, graded, weights, weights, fused.metrics, denominator, trains, lambda state: fused.sums)


class Watched(TwoPasses):
    """Show every phase of a learner, with all that it was computed from, to a watch for values that are not finite."""

    def __init__(self, learner: TwoPasses, watch: Callable[[PhaseRecord], None]) -> None:
        super().__init__(learner.steps, learner.host, learner.purpose, learner.off_policy)
        self.learner, self.watch, self.credit_phase = learner, watch, learner.credit_phase

    def divide(self, state: TrainState, rows: SampledRows, plan: MinibatchPlan, *, width: int) -> list[Minibatch]:
        """Show all rows, chosen or not, if the sampler's log-probs of some are not finite; then divide."""
        if (unsound := unsound_rows(rows.rollout)).any():
            full_plan = MinibatchPlan(np.arange(plan.capacity), 1, plan.microbatch, plan.capacity)
            minibatch = Minibatch(0, full_plan.split(rows)[0], full_plan.pieces[0], jnp.asarray(full_plan.used[0]))
            count = Mean(jnp.float32(unsound.sum()), jnp.float32(plan.capacity))
            self._show("sample", state, minibatch, {f"{NONFINITE}behaviour_logps": count})
        return self.learner.divide(state, rows, plan, width=width)

    def score(self, state: TrainState, reference: Params | None, minibatches: list[Minibatch]) -> list[Scores]:
        """Score the minibatches; their records are shown with their credit."""
        return self.learner.score(state, reference, minibatches)

    def credit(
        self, state: TrainState, minibatch: Minibatch, scores: Scores, graded: GradedRows, denominator: Denominator
    ) -> Credited:
        """Credit the minibatch, and show its scores and credit."""
        credited = self.learner.credit(state, minibatch, scores, graded, denominator)
        self._show("credit", state, minibatch, credited.metrics, credited)
        return credited

    def update(self, state: TrainState, minibatch: Minibatch, credited: Credited) -> tuple[TrainState, Metrics]:
        """Make the update, and show the state after it."""
        state, metrics = self.learner.update(state, minibatch, credited)
        self._show("update", state, minibatch, metrics, credited)
        return state, metrics

    def _show(
        self,
        phase: Literal["sample", "credit", "update"],
        state: TrainState,
        minibatch: Minibatch,
        metrics: Metrics,
        credited: Credited | None = None,
    ) -> None:
        rows, (iteration, probe, *_) = minibatch.rows, self.purpose
        evidence = Evidence(rows.rollout, rows.span, rows.numbers, minibatch.used, rows.probed, hints=rows.hints)
        if credited is not None:
            evidence = replace(
                evidence,
                scores=credited.scores,
                advantages=credited.graded.advantages,
                completion=credited.graded.completion,
                scale=credited.graded.scale,
                late=credited.graded.late,
                weights=credited.returned,
                denominator=credited.denominator,
            )
        self.watch(PhaseRecord(phase, iteration, minibatch.number, metrics, state, probe, evidence))
