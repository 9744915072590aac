"""Choose what the backward pass recomputes of a layer (remat).

``policy.remat`` of a config, an argument of ``make_policy`` in qwen.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["none", "dots", "full"]
"""Recompute nothing, all but the matmuls without batch axes, or everything."""


def rematerialised(body: Callable[..., Any], *, remat: Remat) -> Callable[..., Any]:
    """Return the body of a scan over layers, recomputed in the backward pass according to ``remat``."""
    policies = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    # Inside a scan the loop itself keeps XLA from undoing the recomputation.
    return body if remat == "none" else jax.checkpoint(body, policy=policies[remat], prevent_cse=False)
