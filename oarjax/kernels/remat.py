"""Choose what the backward pass recomputes of a layer (remat).

``policy.remat`` of a config, an argument of ``make_policy`` in qwen.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

Remat = Literal["none", "dots", "projections", "attention", "full"]
"""Recompute nothing; all but the matmuls without batch axes; all but what ``kept`` marks, in attention and the MLP or
in attention alone; or everything."""

ATTENTION, FED = "attention", "fed"
"""Where an array is marked: q, k, v and attention's result; gate and up."""


def kept(x: Array, where: str) -> Array:
    """Mark an array that the backward pass reads again instead of computing it, if ``remat`` keeps its kind."""
    return checkpoint_name(x, where)


def rematerialised(body: Callable[..., Any], *, remat: Remat) -> Callable[..., Any]:
    """Return the body of a scan over layers, recomputed in the backward pass according to ``remat``."""
    save_only = jax.checkpoint_policies.save_only_these_names
    policies = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "projections": save_only(ATTENTION, FED),
        "attention": save_only(ATTENTION),
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    # Inside a scan the loop itself keeps XLA from undoing the recomputation.
    return body if remat == "none" else jax.checkpoint(body, policy=policies[remat], prevent_cse=False)
