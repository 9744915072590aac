"""Sums over the rows of a group, whatever the rows' order: a matrix of 0 and 1 says who is whose peer."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def peers_of(groups: Int[Array, "B"], counted: Bool[Array, "B"] | None = None) -> Float[Array, "B B"]:
    """Return 1 at (i, j) where row j is counted and of row i's group, itself included."""
    same_group = groups[:, None] == groups
    return (same_group if counted is None else same_group & counted[None]).astype(jnp.float32)


def peer_sum(peers: Float[Array, "B B"], values: Shaped[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Sum finite values over each row's peers, in their own precision, at least float32, on every device."""
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.tensordot(peers.astype(dtype), values.astype(dtype), axes=1, precision="highest")
