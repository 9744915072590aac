"""Describe the trained arrays of a run: every weight of its policy, or its adapters with ``lora.rank``."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.console import Console

from oarjax.config.learning import LoraConfig
from oarjax.data.hf_files import CheckpointError
from oarjax.data.peft import read_adapters
from oarjax.errors import ConfigError
from oarjax.models.lora import adapter_axes, adapter_shapes, merge_adapters
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import abstract_params, logical_axes
from oarjax.types import Params


def trained_shapes(lora: LoraConfig, model: QwenConfig) -> Params:
    """Return the shapes of the trained arrays, float32.

    Raises:
        ConfigError: this policy cannot have these adapters.
    """
    weights = abstract_params(model, dtype=jnp.float32)
    if lora.rank == 0:
        return weights
    try:
        return adapter_shapes(weights, rank=lora.rank, targets=lora.targets)
    except ValueError as error:
        raise ConfigError(f"lora.{error}") from error


def start_adapters(lora: LoraConfig, model: QwenConfig, console: Console | None = None) -> Params | None:
    """Read the adapters of lora.start; None: training starts from fresh ones.

    On the console, say that dropout of their training is not applied.

    Raises:
        ConfigError: they cannot be read, or are not of the config's rank, alpha and targets.
    """
    if lora.start is None:
        return None
    try:
        start = read_adapters(Path(lora.start).expanduser(), model)
    except CheckpointError as error:
        raise ConfigError(f"lora.start: {error}") from error
    ours = (lora.rank, lora.alpha, sorted(lora.targets))
    theirs = (start.rank, start.alpha, sorted(start.targets))
    if ours != theirs:
        raise ConfigError(
            f"lora.start: {lora.start} has rank {start.rank}, alpha {start.alpha:g} and targets "
            f"{', '.join(start.targets)}; set lora.rank, lora.alpha and lora.targets to these"
        )
    if start.dropout and console is not None:
        console.print(f"lora.start: lora_dropout = {start.dropout:g} is not applied: training here has no dropout")
    return start.params


def trained_axes(lora: LoraConfig, model: QwenConfig) -> Params:
    """Name the axes of the trained arrays."""
    axes = logical_axes(model)
    return axes if lora.rank == 0 else adapter_axes(axes, targets=lora.targets)


def trained_count(lora: LoraConfig, model: QwenConfig) -> int:
    """Count the trained parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(trained_shapes(lora, model)))


def plain_params(lora: LoraConfig, params: Params, shardings: Any, *, dtype: DTypeLike | None = None) -> Params:
    """Merge a policy's adapters into its weights; without adapters return the params unchanged.

    Args:
        shardings: training shardings of plain params, for the result.
        dtype: of the merged weights; None = the dtype of the weights below the adapters.
    """
    if lora.rank == 0:
        return params
    return jax.jit(partial(merge_adapters, scale=lora.scale, dtype=dtype), out_shardings=shardings)(params)
