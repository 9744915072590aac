"""Custom advantages: rewards of all groups in, one advantage per completion out.

oarjax train configs/demo.yaml advantage.function=docs/examples/custom_advantages.py:best_of_group
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def best_of_group(
    rewards: Float[Array, "B"], values: dict[str, Float[Array, "B"]], group_size: int, *, top: float = 1.0
) -> Float[Array, "B"]:
    """Return ``top`` for each group's best completion (shared among equals), minus what a random one would get."""
    grouped = rewards.reshape(-1, group_size)
    best = (grouped == jnp.nanmax(grouped, axis=1, keepdims=True)).astype(rewards.dtype)
    share = best / jnp.maximum(best.sum(1, keepdims=True), 1)
    return top * (share - 1 / group_size).reshape(-1)
