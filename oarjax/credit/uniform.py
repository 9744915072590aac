"""Plain GRPO as a credit: every token gets the whole advantage of its row."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


def uniform_weights(reasoning: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Token weights of 1."""
    return jnp.ones(reasoning.shape, jnp.float32)
