"""Bind a run's policy to its config and mesh: dtypes, remat, attention, experts, adapters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from oarjax.config.inputs import PolicyConfig
from oarjax.config.learning import LoraConfig
from oarjax.kernels.attention import attention_for
from oarjax.kernels.decode_attention import DecodeKind
from oarjax.models.moe import experts_for
from oarjax.models.policy import Policy
from oarjax.models.qwen import make_policy
from oarjax.models.qwen_config import QwenConfig


def bind_policy(
    cfg: PolicyConfig,
    model: QwenConfig,
    mesh: Mesh,
    *,
    adapter_scale: float,
    decode: DecodeKind = "plain",
    int8: bool = False,
) -> Policy:
    """Bind the policy of a run on this mesh. Reads only the kind of the devices."""
    return make_policy(
        model,
        compute_dtype=compute_dtype_of(cfg, mesh),
        remat=cfg.remat,
        attention=attention_for(cfg.attention, mesh),
        mesh=mesh,
        adapter_scale=adapter_scale,
        experts=experts_for(mesh),
        decode=decode,
        int8=int8,
        unroll=cfg.unroll,
    )


def compute_dtype_of(cfg: PolicyConfig, mesh: Mesh) -> Any:
    """Return the dtype of matmul operands on this mesh."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    name = {"auto": "float32" if on_cpu else "bfloat16"}.get(cfg.compute_dtype, cfg.compute_dtype)
    return jnp.dtype(name)


def turned_on(setting: str, mesh: Mesh) -> bool:
    """Return True for ``on``, and for ``auto`` on accelerators."""
    return setting == "on" or (setting == "auto" and mesh.devices.flat[0].platform != "cpu")


def stored_dtype_of(cfg: PolicyConfig, lora: LoraConfig, mesh: Mesh) -> Any:
    """Return the dtype to load a policy's weights in.

    Trained weights are float32: in bfloat16 a step of 1e-6 is lost in rounding. Weights frozen below adapters have the
    compute dtype, since they are only read in it.
    """
    return compute_dtype_of(cfg, mesh) if lora.rank else jnp.dtype(jnp.float32)
