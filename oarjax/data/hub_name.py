"""Tell names on the Hugging Face hub from folders. Imports no jax."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(text: str) -> bool:
    """Return True for ORGANISATION/NAME, unless that is a path in ``runs`` or another folder of runs."""
    parent = Path(text).parent
    runs = parent == Path("runs") or any(parent.glob("*/config.yaml"))
    return HUB_NAME.fullmatch(text) is not None and not runs


def near_folder(path: str | Path) -> str:
    """Name the folder beside a missing one whose name is nearest to it, for an error; empty without one."""
    target = Path(path).expanduser()
    names = [folder.name for folder in target.parent.glob("*/")]  # none of a parent that is missing or closed to us
    near = difflib.get_close_matches(target.name, names, n=1)
    return f" (did you mean {Path(path).parent / near[0]}?)" if near else ""
