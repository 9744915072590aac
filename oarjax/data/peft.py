"""Adapters as PEFT folders: adapter_model.safetensors and adapter_config.json, as ``peft.PeftModel`` reads and writes.

PEFT stores A as [rank, in] and B as [out, rank], one pair per layer, or per expert of a layer; here they are stacked
over layers and experts, and the other way round. Its plain LoRA scales the product by alpha / rank, as ours does.
Experts have their names in the checkpoint (mlp.experts.0.gate_proj). PEFT 0.21 converts these where transformers 5
stacks the experts, if gate and up are both there or neither.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from oarjax.data.hf_files import CheckpointError
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import Weight, at, weight_table
from oarjax.storage.durable import cannot_write
from oarjax.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN = {
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "layer_replication": None,
    "lora_bias": False,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Fields of adapter_config.json whose other values mean something else than low-rank products of whole matrices."""


class Adapters(NamedTuple):
    """Adapters of a folder."""

    params: Params  # as ``models.lora.init_adapters`` builds them
    rank: int
    alpha: float  # as this package scales: alpha / rank
    targets: tuple[str, ...]


def write_adapters(folder: Path, cfg: QwenConfig, params: Params, *, alpha: float, base: str) -> Path:
    """Write a policy's adapters as a new PEFT folder in float32.

    Args:
        params: adapters, alone or over the weights that they change.
        base: the policy below them, as PEFT will look for it: a hub name or a folder.

    Raises:
        CheckpointError: the policy has no adapters.
        StorageError: the folder cannot be written.
    """
    tensors, targets, ranks = {}, set(), set()
    for weight in _matrices(cfg):
        node = _node(params, weight)
        if node is None:
            continue
        a, b = (np.asarray(node[name], np.float32) for name in ("lora_a", "lora_b"))
        targets.add(_module(weight))
        ranks.add(a.shape[-1])
        for place, name in zip(np.ndindex(weight.stack), weight.names, strict=True):
            stem = PREFIX + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a[place].T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b[place].T)
    if not tensors:
        raise CheckpointError(f"{folder}: this policy has no adapters; train with lora.rank, or export whole weights")
    fields = PLAIN | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error
    return folder


def read_adapters(folder: Path, cfg: QwenConfig) -> Adapters:
    """Read a PEFT folder of plain LoRA (rank-stabilised scaling too) for a policy of this architecture.

    Raises:
        CheckpointError: a file is missing or damaged, the adapters are of another kind, or do not fit the policy.
    """
    fields = _fields(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read: {error}") from error
    rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
    if fields.get("use_rslora"):
        alpha *= math.sqrt(rank)  # it scales by alpha / sqrt(rank)
    tree: dict[str, Any] = {}
    targets = set()
    for weight in _matrices(cfg):
        into, out = weight.shape[len(weight.stack) :]
        stems = [PREFIX + name.removesuffix(".weight") for name in weight.names]
        if not any(f"{stem}.lora_A.weight" in tensors for stem in stems):
            continue
        pair = {
            name: np.stack(
                [_tensor(tensors, f"{stem}.lora_{name[-1].upper()}.weight", shape, folder) for stem in stems]
            ).reshape(*weight.stack, *shape)
            for name, shape in (("lora_a", (rank, into)), ("lora_b", (out, rank)))
        }
        node = tree
        for part in weight.path[:-1]:
            node = node.setdefault(part, {})
        node |= {name: jnp.asarray(np.swapaxes(values, -1, -2)) for name, values in pair.items()}
        targets.add(weight.path[-2])
    if tensors:
        name = next(iter(tensors))
        raise CheckpointError(f"{folder / WEIGHTS}: {len(tensors)} tensors fit no matrix of this policy, first {name}")
    return Adapters(tree, rank, alpha, tuple(sorted(targets)))


def _fields(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / CONFIG}: cannot be read: {error}; expected a folder that PEFT wrote"
        ) from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else type(fields).__name__
        raise CheckpointError(f"{folder / CONFIG}: peft_type is {kind}; only LORA can be read")
    if fields.get("target_parameters"):
        raise CheckpointError(
            f"{folder / CONFIG}: target_parameters is {fields['target_parameters']!r}; adapters of whole stacks of "
            "experts cannot be read, train with target_modules gate_proj, up_proj and down_proj instead"
        )
    for name, plain in PLAIN.items():
        if fields.get(name, plain) not in (plain, None, [], {}, False):
            raise CheckpointError(f"{folder / CONFIG}: {name} is {fields[name]!r}; only {plain!r} can be read")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise CheckpointError(f"{folder / CONFIG}: r = {rank!r} and lora_alpha = {alpha!r}; expected positive numbers")
    return fields


def _matrices(cfg: QwenConfig) -> list[Weight]:
    """List the matrices of the layers, which adapters may change."""
    return [w for w in weight_table(cfg) if w.path[-1] == "kernel" and w.stack]


def _node(params: Params, weight: Weight) -> Any:
    """Return what lies at a matrix's place if it has an adapter, else None."""
    try:
        node = at(params, weight.path[:-1])
    except KeyError:
        return None
    return node if "lora_a" in node else None


def _module(weight: Weight) -> str:
    return weight.name.removesuffix(".weight").rpartition(".")[2]


def _tensor(tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...], folder: Path) -> np.ndarray:
    """Take a tensor out of those that are left, in float32."""
    if name not in tensors:
        raise CheckpointError(f"{folder / WEIGHTS}: no tensor {name}; every layer needs its own")
    values = tensors.pop(name)
    if values.shape != shape:
        raise CheckpointError(f"{folder / WEIGHTS}: {name} is {list(values.shape)}; expected {list(shape)}")
    return values.astype(np.float32)
