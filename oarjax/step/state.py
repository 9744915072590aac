"""Create the state that training starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax

from oarjax.config.learning import LoraConfig
from oarjax.models.lora import init_adapters, join_params
from oarjax.rl.carried import KeptReference, carried, move_reference
from oarjax.step.programs import Shardings
from oarjax.types import Params, TrainState

ADAPTERS = 2**31 - 2
"""Folded into a run's key to draw its first adapters; no iteration has this number."""


def new_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    layout: Shardings,
    *,
    seed: int,
    lora: LoraConfig,
    adapters: Params | None = None,
    copy: bool = True,
) -> TrainState:
    """Create a state at step 0 that owns its arrays, since updates reuse their memory.

    With ``lora.rank`` the params are frozen below fresh adapters, or those given.

    Args:
        adapters: to start from, of the config's rank and targets.
        copy: keep ``params`` valid for further use; otherwise the state reuses their memory.
    """

    def fresh(params: Params, adapters: Params | None) -> TrainState:
        copies = jax.tree.map(jnp.copy, params)
        key = jax.random.key(seed)
        if lora.rank == 0:
            trained, frozen = copies, None
        elif adapters is not None:
            trained, frozen = adapters, copies
        else:
            start = jax.random.fold_in(key, ADAPTERS)
            trained, frozen = init_adapters(start, params, rank=lora.rank, targets=lora.targets), copies
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=trained, opt_state=optimizer.init(trained), key=key, frozen=frozen
        )

    return jax.jit(fresh, out_shardings=layout.state, donate_argnums=() if copy else 0)(params, adapters)


def moving_reference(state: TrainState) -> Params | None:
    """Return all params of the reference policy that a state keeps, or None; no array is copied."""
    reference = carried(state.opt_state, KeptReference)
    return None if reference is None else join_params(state.frozen, reference.params)


def reference_mover(layout: Shardings) -> Callable[[TrainState], TrainState]:
    """Return the program that makes the state's params the reference that it keeps; it takes the state's memory."""

    def move(state: TrainState) -> TrainState:
        return replace(state, opt_state=move_reference(state.opt_state, state.params))

    return jax.jit(move, out_shardings=layout.state, donate_argnums=0)
