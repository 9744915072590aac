"""Carry what a loss needs from update to update in the optimizer's state, which is divided, saved and resumed with it.

Both are optax transformations that leave the updates as they are, for the end of an ``optax.chain``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


class EntropyControl(NamedTuple):
    """State of an entropy coefficient that follows the policy's entropy."""

    coefficient: Float[Array, ""]
    applied: Float[Array, ""]  # in the next update: the coefficient, or 0 while the entropy is above its target


def adapted(
    coefficient: Float[Array, ""], entropy: Float[Array, ""], *, target: float, step: float, highest: float
) -> EntropyControl:
    """Raise the coefficient by ``step`` after an update whose entropy is at most ``target``, else lower it.

    It stays within 0 .. ``highest`` and applies only in the former case (Skywork-OR1, arXiv 2505.22312, as TRL has it).
    The entropy is the mean per token, in nats.
    """
    low = entropy <= target
    new_coefficient = jnp.clip(jnp.where(low, coefficient + step, coefficient - step), 0, highest)
    return EntropyControl(new_coefficient, jnp.where(low, new_coefficient, 0))


def control_entropy(
    *, start: float, target: float, step: float, highest: float
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose updates take ``entropy`` and adapt the coefficient; it applies from the second."""

    def init(params: Any) -> Any:
        return EntropyControl(jnp.float32(start), jnp.float32(0))

    def update(updates: Any, state: Any, params: Any = None, *, entropy: Any = None, **_: Any) -> Any:
        return updates, adapted(state.coefficient, entropy, target=target, step=step, highest=highest)

    return optax.GradientTransformationExtraArgs(init, update)


class KeptReference(NamedTuple):
    """State that holds the params of a reference policy."""

    params: Any


def keep_reference() -> optax.GradientTransformation:
    """Return a transformation that keeps the params of the start, until ``move_reference``."""

    def init(params: Any) -> KeptReference:
        return KeptReference(jax.tree.map(jnp.copy, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def move_reference(opt_state: Any, params: Any) -> Any:
    """Replace the reference of an optimizer's state by a copy of the params (TR-DPO's hard update, 2404.09656)."""

    def moved(state: Any) -> Any:
        return KeptReference(jax.tree.map(jnp.copy, params)) if isinstance(state, KeptReference) else state

    return jax.tree.map(moved, opt_state, is_leaf=lambda node: isinstance(node, KeptReference))


def carried(opt_state: Any, kind: type) -> Any:
    """Return the state of a kind within an optimizer's state, or None."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return next((node for node in nodes if isinstance(node, kind)), None)
