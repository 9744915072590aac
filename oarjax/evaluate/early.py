"""Check what a command line names before jax is imported, so that a typo is reported at once. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oarjax.config.changes import explained
from oarjax.config.loading import apply_override
from oarjax.config.schema import Config
from oarjax.data.hub_name import is_hub_name
from oarjax.errors import ConfigError

EXPECTED = "a run folder (runs/demo), one of its checkpoints (runs/demo/checkpoints/000020), a Hugging Face folder"

ACCEPTED = (
    "seed",
    "device",
    "compilation_cache",
    "policy.compute_dtype",
    "policy.revision",
    "mesh.",
    "distributed.",
    "data.eval.",
    "data.template",
    "data.system_prompt",
    "data.thinking",
    "data.prompt_format",
    "data.max_prompt",
    "rollout.max_new",
    "rollout.prompt_bucket",
    "rollout.environment",
    "grading.",
    "credit.answer.style",
    "credit.answer.pattern",
    "rollout.stop",
    "eval.batch",
    "eval.top_k",
    "eval.top_p",
    "eval.min_p",
    "eval.repetition_penalty",
)
"""Fields of a config that an evaluation reads."""


def check_exists(text: str) -> None:
    """Refuse a target that is neither on this machine nor the name of a policy on the hub.

    Raises:
        ConfigError: it is not.
    """
    if not (Path(text).expanduser().exists() or is_hub_name(text)):
        raise ConfigError(f"{text}: no such folder; expected {EXPECTED} or a hub name such as Qwen/Qwen2.5-0.5B")


def check_accepted(override: str) -> None:
    """Refuse an override of a field that an evaluation does not read.

    Raises:
        ConfigError: it is one.
    """
    if not override.partition("=")[0].startswith(ACCEPTED):
        raise ConfigError(f"{override}: an evaluation reads {', '.join(ACCEPTED)}; leave this one out")


def check_fields(overrides: Sequence[str]) -> None:
    """Refuse overrides whose field does not exist; their values are checked with the whole config, later.

    Raises:
        ConfigError: an evaluation does not read a field, or there is none of its name.
    """
    tree: dict[str, Any] = {}
    for override in overrides:
        check_accepted(override)
        apply_override(tree, override)
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        unknown = [e for e in error.errors() if e["type"] == "extra_forbidden"]
        if unknown:
            unknown_fields = ValidationError.from_exception_data(error.title, unknown)  # type: ignore[arg-type]
            raise explained(unknown_fields, Config, source="oarjax evaluate") from None
