"""``oarjax export``: read a policy, write it as an HF folder."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from oarjax.config import ConfigError
from oarjax.host.devices import choose_platform
from oarjax.host.hf import SHARD_BYTES, export, load_params, read_config, stored_dtype
from oarjax.host.report import make_console
from oarjax.host.tokenizer import load_tokenizer, stop_ids
from oarjax.models.weights import parameter_count


def run(source: str, target: Path, dtype: str, shard_gb: float = SHARD_BYTES / 1e9) -> None:
    if dtype not in ("keep", "float32", "bfloat16"):
        raise ConfigError(f"--dtype: expected keep, float32 or bfloat16, got {dtype}")
    if target.exists():
        raise ConfigError(f"TARGET: {target} exists; give a folder that does not")
    choose_platform("cpu")
    cfg, folder = read_config(source)
    params = load_params(folder, cfg, dtype=stored_dtype(folder) if dtype == "keep" else jnp.dtype(dtype))
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    stops = stop_ids(folder, load_tokenizer(folder)) if has_tokenizer else ()
    try:
        export(target, cfg, params, source=folder, shard_bytes=int(shard_gb * 1e9), stop_ids=stops)
    except OSError as error:
        raise ConfigError(f"TARGET: cannot write to {target}: {error}; give another folder") from error
    make_console().print(f"wrote {parameter_count(cfg):,} parameters to {target}", markup=False)
