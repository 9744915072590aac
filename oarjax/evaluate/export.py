"""``oarjax export``: read a policy, which may be a run's checkpoint, and write it as an HF folder."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from oarjax.data.hf import SHARD_BYTES, export, read_config
from oarjax.data.hf_files import CheckpointError
from oarjax.data.peft import write_adapters
from oarjax.data.tokenizer import load_tokenizer, stop_ids
from oarjax.errors import ConfigError
from oarjax.evaluate.target import find_checkpoint, find_target, one_device, target_params
from oarjax.models.weights import parameter_count
from oarjax.report.files import make_console
from oarjax.run.export_target import check_new_folder
from oarjax.run.run import Run
from oarjax.system.devices import choose_platform
from oarjax.training.run_files import restored_state


def run(source: str, target: Path, dtype: str, shard_gb: float = SHARD_BYTES / 1e9, untie: bool = False) -> None:
    if dtype not in ("keep", "float32", "bfloat16"):
        raise ConfigError(f"--dtype: expected keep, float32 or bfloat16, got {dtype}")
    if target.exists():
        raise ConfigError(f"TARGET: {target} exists; give a folder that does not")
    check_new_folder(target, field="TARGET", remedy="give another folder")
    choose_platform("cpu")
    origin = find_target(source)
    cfg, folder = read_config(origin.policy, revision=origin.revision)
    params, kept_dtype = target_params(origin, cfg, folder)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    stops = stop_ids(folder, load_tokenizer(folder)) if has_tokenizer else ()
    export_dtype = kept_dtype if dtype == "keep" else jnp.dtype(dtype)
    try:
        sizes = {"shard_bytes": int(shard_gb * 1e9), "untie": untie}
        export(target, cfg, params, source=folder, dtype=export_dtype, stop_ids=stops, **sizes)
    except OSError as error:
        raise ConfigError(f"TARGET: cannot write to {target}: {error}; give another folder") from error
    what = f" of {origin.checkpoint}" if origin.checkpoint is not None else ""
    make_console().print(f"wrote {parameter_count(cfg):,} parameters{what} to {target}", markup=False)


def run_adapters(source: str, target: Path) -> None:
    """Write the adapters of a run's newest checkpoint, or of one checkpoint, as a PEFT folder."""
    if target.exists():
        raise ConfigError(f"TARGET: {target} exists; give a folder that does not")
    choose_platform("cpu")
    origin = find_checkpoint(source)
    if origin.cfg is None or origin.checkpoint is None or origin.cfg.lora.rank == 0:
        raise ConfigError(f"SOURCE: {source} is not a checkpoint of a LoRA run; leave out --adapters")
    model, folder = read_config(origin.policy, revision=origin.revision)
    run = Run(origin.cfg, mesh=one_device(), model=model, source=folder)
    state = restored_state(run, origin.checkpoint)
    try:
        write_adapters(target, model, state.params, alpha=origin.cfg.lora.alpha, base=origin.policy)
    except CheckpointError as error:
        raise ConfigError(f"SOURCE: {error}") from error
    make_console().print(f"wrote the adapters of {origin.checkpoint} to {target}", markup=False)
