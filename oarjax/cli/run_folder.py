"""The folder of a run: claimed by one config, gone on with by the same one, refused to any other. Imports no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from oarjax.config import Config, ConfigError
from oarjax.host.progress import flatten

HARMLESS = (
    "run_dir",
    "compilation_cache",
    "profile",
    "checkpoint.",
    "report.",
    "export.",
    "grading.workers",
    "eval.batch",
)
"""Fields that may differ when a run goes on: they do not change what it learns. run_dir: folders may be moved."""

PROGRESS = ("start", "checkpoints/*", "seed*/start", "seed*/*/metrics.jsonl", "metrics.jsonl")
"""What is in a folder that has got anywhere."""


def changed(section: Any, **changes: Any) -> Any:
    """A config section with fields changed, validated again."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section)(**(fields | changes))


def refuse_another_run(folder: Path, cfg: Config) -> None:
    """The same command goes on with its run; any other must not touch one that has got anywhere.

    Raises:
        ConfigError: with the fields that differ.
    """
    known = folder / "config.yaml"
    if not known.exists() or not any(any(folder.glob(part)) for part in PROGRESS):
        return
    before, now = flatten(yaml.safe_load(known.read_text())), flatten(cfg.model_dump(mode="json"))
    differ = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(before | now)
        if before.get(name) != now.get(name) and not name.startswith(HARMLESS)
    ]
    if differ:
        raise ConfigError(
            f"run_dir: {folder} holds a run of another config ({'; '.join(differ)}); "
            "give another run_dir=..., or that config to go on with it"
        )


def claim(folder: Path, cfg: Config) -> Path:
    """Make the run's folder and write its whole config there.

    Raises:
        ConfigError: it holds another run, or cannot be written to.
    """
    refuse_another_run(folder, cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"run_dir: cannot write to {folder}: {error}; give another run_dir=...") from error
    return folder
