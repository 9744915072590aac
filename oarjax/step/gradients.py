"""Sum gradients over microbatches, and apply them in one optimizer update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from oarjax.models.lora import join_params
from oarjax.rl.carried import EntropyControl, carried
from oarjax.rl.masked import widened
from oarjax.step.loss import Loss, Metrics
from oarjax.step.metrics import NONFINITE, all_finite
from oarjax.step.minibatches import Bucket, cut
from oarjax.types import Mean, Params, TrainBatch, TrainState


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
        rows = replace(rows, entropy_bonus=applied_entropy_bonus(state))
        return jax.tree.map(jnp.add, sums, sums_of(state.params, state.frozen, rows))

    return jax.lax.fori_loop(start, stop, add, sums)


def applied_entropy_bonus(state: TrainState) -> Float[Array, ""] | None:
    """Return the entropy coefficient that adapts, of the next update; None where it is the config's."""
    control = carried(state.opt_state, EntropyControl)
    return None if control is None else control.applied


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
    bonus, extra_args = applied_entropy_bonus(state), {}
    if bonus is not None:
        extra_args = {"entropy": sums.metrics["entropy"].total / jnp.maximum(sums.metrics["entropy"].count, 1)}
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, state.opt_state, state.params, **extra_args)
    candidate = replace(
        state, step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state
    )
    sound = jnp.isfinite(norm) & jnp.isfinite(mean.total)
    finite = sound & all_finite(candidate.params)
    new_state = replace(
        state,
        **{
            name: jax.tree.map(partial(jnp.where, finite), getattr(candidate, name), getattr(state, name))
            for name in ("step", "params", "opt_state")
        },
    )
    one = jnp.ones((), jnp.float32)
    faults = {"loss": ~jnp.isfinite(mean.total), "gradient": ~jnp.isfinite(norm), "params": sound & ~finite}
    bonus_metrics = {} if bonus is None else {"entropy_bonus": Mean(bonus, one)}
    return new_state, sums.metrics | {
        **bonus_metrics,
        **{f"{NONFINITE}{name}": Mean(flag.astype(jnp.float32), one) for name, flag in faults.items()},
        "loss": Mean(mean.total, count),
        "grad_norm": Mean(norm, one),
        "skipped": Mean(1 - finite.astype(jnp.float32), one),
    }


class RowCheck(NamedTuple):
    """The contribution of one row to an update."""

    loss: Mean
    metrics: Metrics
    grad_norm: Float[Array, ""]
    nonfinite: Params  # per array of the params: numbers of its gradient that are not finite, along its first axis


@runtime_checkable
class CheckRow(Protocol):
    """Add the gradient of one row [1, ...] to the sum so far, whose memory it takes, and describe the row's share.

    ``frozen`` are the params below adapters, or None.
    """

    def __call__(
        self, params: Params, frozen: Params | None, so_far: Params, row: TrainBatch, denominator: Float[Array, ""], /
    ) -> tuple[Params, RowCheck]: ...


def make_row_check(loss: Loss) -> CheckRow:
    """Return the jitted check of single rows."""

    def check(
        params: Params, frozen: Params | None, so_far: Params, row: TrainBatch, denominator: Float[Array, ""]
    ) -> tuple[Params, RowCheck]:
        def total(params: Params) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
            mean, metrics = loss(join_params(frozen, params), row)
            return mean.total, (mean, metrics)

        (_, (mean, metrics)), grads = jax.value_and_grad(total, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / denominator, grads)
        nonfinite = jax.tree.map(lambda g: jnp.sum(~jnp.isfinite(g), axis=tuple(range(1, g.ndim))), grads)
        return jax.tree.map(jnp.add, so_far, grads), RowCheck(mean, metrics, optax.tree.norm(grads), nonfinite)

    return jax.jit(check, donate_argnums=2)
