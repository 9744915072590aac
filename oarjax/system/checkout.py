"""Name the commit that this package's code is of."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import oarjax


@cache
def commit() -> str | None:
    """Return the commit of this checkout, with a + where files differ from it; None outside one."""
    git = ["git", "-C", str(Path(oarjax.__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=60)
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", "."],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + "+" * bool(status.stdout.strip()) if head.returncode == 0 else None
