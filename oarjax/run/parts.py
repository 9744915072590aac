"""Name the parts of a run that a caller may supply."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from jax.sharding import Mesh

from oarjax.models.policy import Policy
from oarjax.models.qwen_config import QwenConfig


class Parts(TypedDict, total=False):
    """Parts of a run that may be supplied instead of built from its config."""

    folder: Path
    mesh: Mesh
    model: QwenConfig
    source: Path
    policy: Policy
    stop_ids: tuple[int, ...]
    pad_id: int
