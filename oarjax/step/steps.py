"""The device programs of a run, as whoever calls them sees them: typed signatures, and passes over whole minibatches.

Rows travel as [M, b, ...]: M microbatches of b rows. ``start`` and ``stop`` bound the microbatches of one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.credit.probe import ProbeMode
from oarjax.rl.advantages import PastRewards
from oarjax.rollout.segments import SegmentedSampler
from oarjax.rollout.source import Spent
from oarjax.step.fused import CreditRows, FusedSums
from oarjax.step.gradients import Sums
from oarjax.step.loss import Metrics
from oarjax.step.minibatches import Bucket, Piece
from oarjax.types import GradedRows, Params, Rollout, SampledRows, Scores, TrainBatch, TrainState

Count = int | np.integer[Any] | Int[Array, ""]
"""A number of microbatches or of an iteration, from the host."""


class Jitted(Protocol):
    """A jitted function, which can be lowered for shapes without being run."""

    def lower(self, *args: Any, **static: Any) -> Any: ...
    def eval_shape(self, *args: Any, **static: Any) -> Any: ...


class PrepareParams(Jitted, Protocol):
    """Lay out the policy's params for sampling."""

    def __call__(self, params: Params, /) -> Params: ...


class FindEqualGroups(Jitted, Protocol):
    """Mark groups whose advantages are 0: they have no gradient."""

    def __call__(self, rewards: Float[Array, "B"], past: PastRewards | None = None, /) -> Bool[Array, "P"]: ...


class ComputeAdvantages(Jitted, Protocol):
    """Turn rewards, NaN where not graded, the values of each reward and the problems' past into advantages of rows."""

    def __call__(
        self, rewards: Float[Array, "B"], values: Any, past: PastRewards | None = None, /
    ) -> Float[Array, "B"]: ...


class SubtractKL(Jitted, Protocol):
    """Subtract the KL term from rewards, given the reference log-probs [B, T]."""

    def __call__(self, rewards: Float[Array, "B"], rollout: Rollout, ref_logps: Any, /) -> Float[Array, "B"]: ...


class ScoreRows(Jitted, Protocol):
    """Compute log-probs, importance and signals of microbatches start .. stop - 1; the others stay 0."""

    def __call__(
        self,
        params: Params,
        reference: Params | None,
        rows: SampledRows,
        key: Key[Array, ""],
        start: Count,
        stop: Count,
        /,
        *,
        probe: ProbeMode,
        bucket: Bucket | None = None,
    ) -> Scores: ...


class CreditTokens(Jitted, CreditRows, Protocol):
    """Compute the credit of a minibatch's tokens."""


class CountTokens(Jitted, Protocol):
    """Count what the loss is divided by, from the tokens in the loss of the whole rollout."""

    def __call__(self, completion: Bool[Array, "B T"], /) -> Float[Array, ""]: ...


class StartSums(Jitted, Protocol):
    """Return the sums that an update begins with."""

    def __call__(self, state: TrainState, batch: TrainBatch, /) -> Sums: ...


class AddGradients(Jitted, Protocol):
    """Add the losses and gradients of microbatches start .. stop - 1; takes the sums' memory."""

    def __call__(
        self,
        sums: Sums,
        state: TrainState,
        batch: TrainBatch,
        start: Count,
        stop: Count,
        /,
        *,
        bucket: Bucket | None = None,
    ) -> Sums: ...


class ApplyUpdate(Jitted, Protocol):
    """Make one optimizer update from summed gradients; takes the state's memory. None divides by the sums' count."""

    def __call__(
        self, state: TrainState, sums: Sums, denominator: Float[Array, ""] | None, /
    ) -> tuple[TrainState, Metrics]: ...


class UpdatePrograms(NamedTuple):
    """The device programs of one optimizer update."""

    zeros: StartSums
    accumulate: AddGradients
    apply: ApplyUpdate

    def sums(self, state: TrainState, batch: TrainBatch, pieces: Sequence[Piece]) -> Sums:
        """Add up the losses and gradients of a minibatch [M, b, ...], each piece of it padded to its own bucket."""
        sums = self.zeros(state, batch)
        for piece in pieces:
            sums = self.accumulate(sums, state, batch, piece.start, piece.stop, bucket=piece.bucket)
        return sums

    def update(
        self, state: TrainState, batch: TrainBatch, pieces: Sequence[Piece], denominator: Float[Array, ""] | None
    ) -> tuple[TrainState, Metrics]:
        """Make one optimizer update from a minibatch [M, b, ...]."""
        return self.apply(state, self.sums(state, batch, pieces), denominator)


class CompareWithStart(Jitted, Protocol):
    """Sum r - 1 - log r, r = start / sampler, over each row's completion, at the sampling temperature (k3)."""

    def __call__(self, start: Params, rows: Rollout, /) -> Float[Array, "b"]: ...


class StartFused(Jitted, Protocol):
    """Return the sums and the credit that a pass over a minibatch begins with."""

    def __call__(self, state: TrainState, rows: SampledRows, graded: GradedRows, /) -> FusedSums: ...


class AddFused(Jitted, Protocol):
    """Score, credit and add up microbatches start .. stop - 1 in one pass; takes the sums' memory."""

    def __call__(
        self,
        sums: FusedSums,
        state: TrainState,
        rows: SampledRows,
        graded: GradedRows,
        noise_key: Key[Array, ""],
        order_key: Key[Array, ""],
        start: Count,
        stop: Count,
        /,
        *,
        probe: ProbeMode,
        bucket: Bucket | None = None,
    ) -> FusedSums: ...


class Steps(NamedTuple):
    """The device programs of a run. The params of ``sample`` and ``evaluate`` are those of ``rollout_params``."""

    rollout_params: PrepareParams
    sample: SegmentedSampler
    evaluate: SegmentedSampler  # as cfg.eval says, every problem and sample with noise of its own
    equal_groups: FindEqualGroups
    advantages: ComputeAdvantages
    after_kl: SubtractKL
    score: ScoreRows
    credit: CreditTokens
    denominator: CountTokens
    zeros: StartSums
    accumulate: AddGradients
    apply: ApplyUpdate
    drift: CompareWithStart
    sample_on: SegmentedSampler | None = None  # further turns of rows, see ``SamplerSource.go_on``
    evaluate_on: SegmentedSampler | None = None
    fused_zeros: StartFused | None = None  # None where score and update are two passes
    fused_add: AddFused | None = None
    values: bool = False  # the credit method values tokens, in units of the rewards' standard deviation
    decoding: Callable[[], Spent] = Spent  # counts of what ``sample`` did since this was last called
    pad_id: int = 0  # fills completions after their ends
    prompt_rows: int = 1  # rows of a group that a minibatch may keep together to compute their prompt once

    def scores(
        self,
        params: Params,
        reference: Params | None,
        rows: SampledRows,
        pieces: Sequence[Piece],
        key: Key[Array, ""],
        *,
        probe: ProbeMode,
    ) -> Scores:
        """Score a minibatch [M, b, ...], each piece of it padded to its own bucket."""
        score = partial(self.score, params, reference, rows, key)
        parts = [score(piece.start, piece.stop, probe=probe, bucket=piece.bucket) for piece in pieces]
        return reduce(partial(jax.tree.map, jnp.add), parts)  # each is zero where the others are not

    @property
    def updates(self) -> UpdatePrograms:
        """The programs of an update whose rows are scored already."""
        return UpdatePrograms(self.zeros, self.accumulate, self.apply)

    def fused(
        self,
        state: TrainState,
        rows: SampledRows,
        graded: GradedRows,
        pieces: Sequence[Piece],
        keys: tuple[Key[Array, ""], Key[Array, ""]],
        *,
        probe: ProbeMode,
    ) -> FusedSums:
        """Score a minibatch [M, b, ...] and add up its gradients in one pass.

        Raises:
            ValueError: the run scores and updates in two passes.
        """
        if self.fused_zeros is None or self.fused_add is None:
            raise ValueError("fused: update.fused, credit or grades of this run need two passes, score and update")
        sums = self.fused_zeros(state, rows, graded)
        for piece in pieces:
            bounds = piece.start, piece.stop
            sums = self.fused_add(sums, state, rows, graded, *keys, *bounds, probe=probe, bucket=piece.bucket)
        return sums
