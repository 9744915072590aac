"""The parts of a credit method that run in every update, inside the loss: weights taken anew, and auxiliary terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from oarjax.config import CreditConfig
from oarjax.credit.bind import method_of
from oarjax.credit.method import CreditMethod, resolve
from oarjax.credit.signals import Context
from oarjax.models.policy import Policy
from oarjax.types import Params, TrainBatch

Reweigher = Callable[[Float[Array, "B T"], TrainBatch], TrainBatch]
"""(current log-probs, microbatch) -> the microbatch with token advantages of this update."""

Auxiliary = Callable[[Params, Float[Array, "B T D"], TrainBatch], Float[Array, "B T"]]
"""(params, final states that predict the tokens, microbatch) -> a term for every token's loss, 0 outside."""


def reweigher(cfg: CreditConfig, custom: CreditMethod | None = None) -> Reweigher | None:
    """Return the method's weights per update; None where it has none."""
    method = method_of(cfg, custom)
    if method.reweigh is None:
        return None
    function, context = resolve(method.reweigh), Context(cfg)

    def reweighed(logps: Float[Array, "B T"], batch: TrainBatch) -> TrainBatch:
        weights = jax.lax.stop_gradient(function(jax.lax.stop_gradient(logps), batch, context))
        return replace(batch, advantages=jnp.where(batch.completion, weights * batch.advantages, 0))

    return reweighed


def auxiliary_loss(
    cfg: CreditConfig, policy: Policy, *, temperature: float, head_chunk: int, custom: CreditMethod | None = None
) -> Auxiliary | None:
    """Return the method's term of the loss; None where it has none."""
    method = method_of(cfg, custom)
    if method.loss is None:
        return None
    function, context = resolve(method.loss), Context(cfg, temperature=temperature, head_chunk=head_chunk)

    def term(params: Params, hidden: Float[Array, "B T D"], batch: TrainBatch) -> Float[Array, "B T"]:
        return jnp.where(batch.completion, function(policy, params, hidden, batch, context), 0)

    return term
