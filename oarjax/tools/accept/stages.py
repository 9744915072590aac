"""List the stages in their order, each with the path of its function: importing this imports no jax."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from oarjax.errors import UserError


class Stage(NamedTuple):
    """A function (setting) -> checks, and its time limit."""

    name: str
    title: str
    function: str  # module:name
    timeout: int  # seconds
    own_process: bool = False  # runs in a fresh process

    def load(self) -> Callable[[Any], list[Any]]:
        """Import the function."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


STAGES = (
    Stage("facts", "Versions and devices", "oarjax.tools.accept.device:facts", 300),
    Stage(
        "peaks", "Products, copies and all-reduces against what they can reach", "oarjax.tools.accept.device:peaks", 300
    ),
    Stage("attention", "Kernels against plain attention", "oarjax.tools.accept.kernels:attention", 900),
    Stage("numerics", "Log-probs, draws and random bits against a CPU", "oarjax.tools.accept.numerics:numerics", 600),
    Stage("policies", "Experts and adapters", "oarjax.tools.accept.policies:policies", 900),
    Stage("compilation", "Compilation, cold and warm", "oarjax.tools.accept.programs:compilation", 1200),
    Stage("next_process", "Compilation in the next process", "oarjax.tools.accept.programs:next_process", 600, True),
    Stage("phases", "Sample, score and update against plan", "oarjax.tools.accept.programs:phases", 1800),
    Stage("iterations", "Twenty iterations", "oarjax.tools.accept.runs:iterations", 1200),
    Stage("resume", "SIGTERM and resume", "oarjax.tools.accept.runs:resume", 1200),
    Stage("storage", "Checkpoints on disk and bucket", "oarjax.tools.accept.runs:storage", 600),
)


class StageError(UserError, ValueError):
    """Raised for a stage that does not exist."""


def chosen(names: str) -> tuple[Stage, ...]:
    """Return the stages of these names, separated by commas, in their order; all stages for an empty text.

    Raises:
        StageError: an unknown name.
    """
    requested = [name.strip() for name in names.split(",") if name.strip()]
    stage_names = [stage.name for stage in STAGES]
    unknown = [name for name in requested if name not in stage_names]
    if unknown:
        raise StageError(f"--only: unknown stage {', '.join(unknown)}; accepted: {', '.join(stage_names)}")
    return tuple(stage for stage in STAGES if not requested or stage.name in requested)


def state_of(checks: Sequence[Any], error: str | None) -> str:
    """Return failed or slow if a check is, not applicable where every check is, else ok."""
    states = {check["state"] if isinstance(check, dict) else check.state for check in checks}
    if error is not None or not states or "failed" in states:
        return "failed"
    if "slow" in states:
        return "slow"
    return "not applicable" if states == {"not applicable"} else "ok"
