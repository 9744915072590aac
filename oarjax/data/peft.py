"""Adapters as PEFT folders: adapter_model.safetensors and adapter_config.json, as ``peft.PeftModel`` reads and writes.

PEFT stores A as [rank, in] and B as [out, rank], one pair per layer, or per expert of a layer; here they are stacked
over layers and experts, and the other way round. Its plain LoRA scales the product by alpha / rank, as ours does.
Experts have their names in the checkpoint (mlp.experts.0.gate_proj). PEFT 0.21 converts these where transformers 5
stacks the experts, if gate and up are both there or neither.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from oarjax.data.hf_files import DTYPES, CheckpointError, open_tensors
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import Weight, at, weight_table
from oarjax.storage.durable import cannot_write
from oarjax.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "qalora_group_size": 16,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}
"""PEFT's defaults. Other values mean something else than low-rank products of whole matrices."""
READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "lora_dropout")
READ += ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode")
"""Fields that are read, or that say nothing about the product."""
INITIAL = (True, False, "gaussian")
"""Values of init_lora_weights that leave the weights below the adapters as they are."""


class Adapters(NamedTuple):
    """Adapters of a folder."""

    params: Params  # as ``models.lora.init_adapters`` builds them
    rank: int
    alpha: float  # as this package scales: alpha / rank
    targets: tuple[str, ...]
    dropout: float  # lora_dropout, which acted while they were trained and means nothing here


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
        for index, name in zip(np.ndindex(weight.stack), weight.names, strict=True):
            stem = PREFIX + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a[index].T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b[index].T)
    if not tensors:
        raise CheckpointError(f"{folder}: this policy has no adapters; train with lora.rank, or export whole weights")
    shared = ("bias", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
    fields = {name: PLAIN[name] for name in shared} | {
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
    tensors = _tensors(folder / WEIGHTS)
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
    if not targets:
        raise CheckpointError(
            f"{folder / WEIGHTS}: no tensor is an adapter of this policy's matrices; target_modules is "
            f"{fields.get('target_modules')!r:.60}"
        )
    if tensors:
        name = next(iter(tensors))
        raise CheckpointError(
            f"{folder / WEIGHTS}: {len(tensors)} tensors match no matrix of this policy, first {name}"
        )
    return Adapters(tree, rank, alpha, tuple(sorted(targets)), float(fields.get("lora_dropout") or 0.0))


def _tensors(file: Path) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise CheckpointError(f"{file}: cannot be read: no such file; expected a folder that PEFT wrote")
    content = open_tensors(file)
    for name in content.keys():  # noqa: SIM118
        if (dtype := content.get_slice(name).get_dtype()) not in DTYPES:
            raise CheckpointError(f"{file}: {name}: expected a dtype of {', '.join(DTYPES)}, got {dtype}")
    return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118


def _fields(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        if not file.is_file():
            raise FileNotFoundError("no such file")
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; expected a folder that PEFT wrote") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else type(fields).__name__
        raise CheckpointError(f"{file}: peft_type is {kind!r:.60}; only 'LORA' can be read")
    if fields.get("target_parameters"):
        raise CheckpointError(
            f"{file}: target_parameters is {fields['target_parameters']!r:.100}; adapters of whole stacks of "
            "experts cannot be read, train with target_modules gate_proj, up_proj and down_proj instead"
        )
    for name, value in fields.items():
        if name not in PLAIN and name not in READ:
            raise CheckpointError(f"{file}: {name:.60} is {value!r:.60}, an unknown field; convert to plain LoRA")
        if name in PLAIN and value not in (PLAIN[name], None, [], {}, False):
            raise CheckpointError(
                f"{file}: {name} is {value!r:.60}; only {PLAIN[name]!r} can be read: convert to plain LoRA"
            )
    initial, rs, dropout = fields.get("init_lora_weights", True), fields.get("use_rslora"), fields.get("lora_dropout")
    if not isinstance(initial, bool | str) or initial not in INITIAL:
        raise CheckpointError(
            f"{file}: init_lora_weights is {initial!r:.60}, which changes the weights below the adapters; convert to "
            "plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if rs is not None and not isinstance(rs, bool):
        raise CheckpointError(f"{file}: use_rslora is {rs!r:.60}; expected true or false")
    if dropout is not None and (
        isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1
    ):
        raise CheckpointError(f"{file}: lora_dropout is {dropout!r:.60}; expected a share of 0 to 1")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not _is_positive(rank) or not isinstance(rank, int) or not _is_positive(alpha):
        values = f"r = {_shown(rank)} and lora_alpha = {_shown(alpha)}"
        raise CheckpointError(f"{file}: {values}; expected positive numbers up to {LARGEST:g}")
    return fields


LARGEST = 1e9  # of rank and alpha


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST


def _shown(value: Any) -> str:
    """Format a value, which may be an integer of more digits than Python prints."""
    return "a huge integer" if isinstance(value, int) and abs(value) > LARGEST else f"{value!r:.60}"


def _matrices(cfg: QwenConfig) -> list[Weight]:
    """List the matrices of the layers, which adapters may change, each expert's by its own name."""
    if cfg.experts is not None:
        cfg = replace(cfg, experts=replace(cfg.experts, packed=False))
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
    if not np.isfinite(values.astype(np.float32)).all():
        raise CheckpointError(f"{folder / WEIGHTS}: {name} holds values that are not finite in float32; train it again")
    return values.astype(np.float32)
