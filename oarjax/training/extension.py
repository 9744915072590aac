"""Check that a run can be trained for longer: it needs a checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path

from oarjax.errors import ConfigError
from oarjax.storage.checkpoint import finished
from oarjax.storage.durable import exists
from oarjax.storage.folder import counts_by_lines, has_progress, saved_config


def check_longer(folder: Path, iterations: int, *, extend: bool) -> None:
    """Check that a run that is to have more iterations, or is to be extended, has something to go on from.

    Raises:
        ConfigError: there is no run, or it has trained and kept no checkpoint.
    """
    if not (has_progress(folder) and exists(folder / "config.yaml")):
        if extend:
            raise ConfigError(
                f"--extend: expected a run in {folder}, found none to go on with; leave --extend out to start one, or "
                "set run_dir=... to the run that is meant"
            )
        return
    saved = saved_config(folder).iterations
    if iterations > saved and counts_by_lines(folder) and not finished(folder / "checkpoints"):
        raise ConfigError(
            f"iterations: expected {saved}, at which {folder} ended without a checkpoint, got {iterations}; set "
            f"another run_dir=..., or pass --restart to move it aside and train all {iterations}"
        )
