"""Carry what a loss needs from update to update in the optimizer's state, which is divided, saved and resumed with it.

Such a transformation leaves the updates as they are, and stands at the end of an ``optax.chain``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


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
