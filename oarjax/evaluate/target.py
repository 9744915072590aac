"""Targets of ``oarjax evaluate`` and ``export``: a run's export or checkpoint, an HF folder, or a hub name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from oarjax.config.inputs import BUILTIN_POLICIES, PolicyConfig
from oarjax.config.schema import Config
from oarjax.config.section import changed
from oarjax.data.hf import load_params, stored_dtype
from oarjax.errors import ConfigError
from oarjax.evaluate.early import EXPECTED, check_exists
from oarjax.models.lora import all_params
from oarjax.models.qwen_config import QwenConfig
from oarjax.run.adapters import plain_params
from oarjax.run.run import Run
from oarjax.storage.checkpoint import finished
from oarjax.storage.durable import refuse_special
from oarjax.storage.folder import run_id, saved_config, start_folder
from oarjax.storage.manifest import MANIFEST, damage, misplaced, read_manifest
from oarjax.system.mesh import make_mesh
from oarjax.training.run_files import restored_state
from oarjax.types import Params


class Target(NamedTuple):
    """The policy to read, and the run that it is from, if any."""

    policy: str  # HF folder or hub name: architecture, tokenizer and, without a checkpoint, weights
    cfg: Config | None = None  # of the run that the text names
    checkpoint: Path | None = None
    revision: str | None = None  # of a hub name
    folder: Path | None = None  # of the run


def find_target(text: str) -> Target:
    """Find the policy that a folder or name stands for. A run is read, never changed: it may be in progress.

    Raises:
        ConfigError: a run without a policy yet, a checkpoint that cannot be trusted, or a folder that is none of these.
    """
    path = _readable(text)
    if (path / "config.yaml").is_file():
        refuse_special(path)
        cfg = saved_config(path)
        export = path / (cfg.export.folder or "export")
        if (export / "config.json").is_file():
            return Target(str(export), cfg, folder=path)
        newest = _newest(path)
        return Target(policy_of(path, cfg), cfg, newest, revision_of(cfg.policy, newest), path)
    if path.name.isdecimal() and (path / MANIFEST).is_file():
        folder = path.absolute().parent.parent
        refuse_special(folder)
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{path}: a checkpoint is read with its run's config.yaml, and {folder} has none")
        if (fault := misplaced(path, run_id(folder)) or damage(path)) is not None:
            raise ConfigError(f"{path}: this checkpoint is damaged: {fault}; use another")
        cfg = saved_config(folder)
        return Target(policy_of(folder, cfg), cfg, path.absolute(), revision_of(cfg.policy, path), folder)
    _check_policy(path, text)
    return Target(text)


def find_checkpoint(text: str) -> Target:
    """Find the newest checkpoint of a run, also where the run has an export, or the one that is named.

    Raises:
        ConfigError: see ``find_target``; ``checkpoint`` is None where there is none.
    """
    path = _readable(text)
    if not (path / "config.yaml").is_file():
        return find_target(text)
    refuse_special(path)
    cfg, newest = saved_config(path), _newest(path)
    return Target(policy_of(path, cfg), cfg, newest, revision_of(cfg.policy, newest), path)


def _readable(text: str) -> Path:
    """Return the path of a target; refuse a folder of another user, of which nothing can be told."""
    path = Path(text).expanduser()
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"{text}: you may not read this folder; make it readable")
    return path


def _check_policy(path: Path, text: str) -> None:
    """Refuse a target that is no HF folder and does not look like a hub name."""
    if (path / "config.json").is_file():
        return
    if path.is_dir():
        if numbers := sorted(finished(path)):
            raise ConfigError(f"{text}: a folder of checkpoints; name one of them, such as {path}/{numbers[-1]:06d}")
        if path.name.isdecimal() and (path.parent.parent / "config.yaml").is_file():
            raise ConfigError(f"{text}: this checkpoint was not finished: it has no {MANIFEST}; use another")
        raise ConfigError(f"{text}: has neither config.yaml nor config.json; expected {EXPECTED} or a hub name")
    if path.exists():
        raise ConfigError(f"{text}: a file; expected {EXPECTED} or a hub name")
    if path.name.isdecimal() and (numbers := sorted(finished(path.parent))):
        raise ConfigError(f"{text}: no such checkpoint; expected one of {', '.join(f'{n:06d}' for n in numbers)}")
    check_exists(text)


def policy_of(folder: Path, cfg: Config) -> str:
    """Return the HF folder that a run's checkpoints started from; built-in policies lie in the run's folder.

    Checkpoints of adapters hold only these, and belong to the warm start's policy if there was one.
    """
    if cfg.lora.rank and cfg.sft is not None:
        name = "start"
    elif cfg.policy.path in BUILTIN_POLICIES:
        name = "policy"
    else:
        return cfg.policy.path
    return str(start_folder(folder, name) or folder / name)


def revision_of(policy: PolicyConfig, checkpoint: Path) -> str | None:
    """Return the hub revision that a run started from: the commit in its checkpoint, or the config's."""
    noted = read_manifest(checkpoint)
    return (noted or {}).get("record", {}).get("commit") or policy.revision


def _newest(folder: Path) -> Path:
    for number in sorted(finished(folder / "checkpoints"), reverse=True):
        at = (folder / "checkpoints" / f"{number:06d}").absolute()
        if misplaced(at, run_id(folder)) is None and damage(at) is None:
            return at
    raise ConfigError(
        f"{folder}: this run has neither an export nor a checkpoint that is intact; wait for its first checkpoint, or "
        "continue its training"
    )


def load_target(target: Target, run: Run) -> Params:
    """Read the weights into the run's training layout. A checkpoint's come with its optimizer state for a moment.

    Raises:
        ConfigError: the checkpoint is of another model.
    """
    if target.cfg is None or target.checkpoint is None:
        return run.load()
    policy = changed(target.cfg.policy, compute_dtype=run.cfg.policy.compute_dtype)
    trained = Run(changed(target.cfg, policy=policy), run.console, mesh=run.mesh, model=run.model, source=run.source)
    return checkpoint_params(trained, target.checkpoint)


def checkpoint_params(run: Run, checkpoint: Path) -> Params:
    """Read the policy in a run's checkpoint as plain float32 params, in the run's training layout.

    Args:
        run: the run that wrote it, on the devices that are here; adapters are merged into the weights of its source.

    Raises:
        ConfigError: the checkpoint is of another model.
    """
    return plain_params(run.cfg.lora, all_params(restored_state(run, checkpoint)), run.layout.params, dtype=jnp.float32)


def target_params(target: Target, model: QwenConfig, folder: Path) -> tuple[Params, DTypeLike]:
    """Load a target's policy on one device; return it with the dtype in which it is to be kept.

    That is the stored one; of a checkpoint ``export.dtype``, or float32 as trained, below adapters that of the policy's
    folder.
    """
    if target.cfg is None or target.checkpoint is None:
        return load_params(folder, model, dtype=stored_dtype(folder)), stored_dtype(folder)
    dtype = target.cfg.export.dtype or (stored_dtype(folder) if target.cfg.lora.rank else jnp.float32)
    return checkpoint_params(Run(target.cfg, mesh=one_device(), model=model, source=folder), target.checkpoint), dtype


def one_device() -> Mesh:
    """Return a mesh of the first device alone."""
    return make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def weights_digest(target: Target, folder: Path) -> str:
    """Hash the weights (SHA-256), so that an evaluation resumes with the same policy only."""
    digest = hashlib.sha256()
    if target.checkpoint is not None:
        try:
            digest.update((target.checkpoint / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                f"{target.checkpoint}: the run has since removed this checkpoint; run the command again, or "
                "evaluate an export"
            ) from None
        return digest.hexdigest()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
