"""The optimizer: AdamW with warm-up, a schedule, and clipping by the global norm."""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax


def learning_rate(
    *, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup: int, updates: int
) -> optax.Schedule:
    """Linear warm-up from peak/warmup, then constant, or down to 0 at ``updates``."""
    rest = max(updates - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[schedule]
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), after], [warmup])


def adamw(
    schedule: optax.Schedule, *, b1: float, b2: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW; matrices and embeddings decay, biases and norm scales do not."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decays),
    )


def decays(params: Any) -> Any:
    """Which leaves weight decay pulls on: those whose path names neither a bias nor a norm."""

    def named(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return "bias" not in name and "norm" not in name

    return jax.tree_util.tree_map_with_path(named, params)
