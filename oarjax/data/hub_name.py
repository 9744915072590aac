"""Tell names on the Hugging Face hub from folders. Imports no jax."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(text: str) -> bool:
    """Return True for ORGANISATION/NAME, unless that is a path in ``runs`` or another folder of runs."""
    parent = Path(text).parent
    runs = parent == Path("runs") or any(parent.glob("*/config.yaml"))
    return HUB_NAME.fullmatch(text) is not None and not runs
