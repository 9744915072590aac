"""Decide, from config and mesh, if a run compiles its programs ahead, and the width of prompts that follows."""

from __future__ import annotations

from jax.sharding import Mesh

from oarjax.config import Config
from oarjax.training.minibatches import widest_prompt


def compiles_ahead(cfg: Config, mesh: Mesh) -> bool:
    """Return True if every program is compiled before the first iteration."""
    on_accelerators = mesh.devices.flat[0].platform != "cpu"
    return cfg.compile_ahead == "on" or (cfg.compile_ahead == "auto" and on_accelerators)


def prompt_step(cfg: Config, mesh: Mesh) -> int:
    """Return the step of prompt widths: the whole width if programs are compiled ahead."""
    return widest_prompt(cfg) if compiles_ahead(cfg, mesh) else cfg.rollout.prompt_bucket
