"""Check a config against this machine, its packages and the checkpoint; nothing is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from oarjax.config.learning import GradingConfig
from oarjax.config.outputs import CheckpointConfig, ReportConfig
from oarjax.config.schema import Config
from oarjax.credit.answer_text import check_pattern
from oarjax.errors import ConfigError
from oarjax.grading.rewards import calls_of, find_rewards, load_plugins
from oarjax.grading.sandbox import IsolationError, prove_isolation
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import check_rows
from oarjax.report.trackers import PACKAGES

READ_ANSWERS = ("math", "exact", "format", "length", "cosine_length")
"""Built-in rewards that read an answer."""


def check_grading(cfg: Config) -> None:
    """Check plugins, reward names and the answer's pattern, before slow work begins."""
    try:
        load_plugins(cfg.grading.plugins)
        find_rewards([r.name for r in cfg.grading.rewards], {r.name: r.settings for r in cfg.grading.rewards})
        reading = [r.name for r in cfg.grading.rewards if r.name in READ_ANSWERS]
        if cfg.credit.answer.style == "none" and reading:
            raise ConfigError(
                f"credit.answer.style: none, but the rewards {', '.join(reading)} read an answer; set the style of "
                "your answers, or custom rewards (grading.plugins)"
            )
        if any(r.name == "code" for r in cfg.grading.rewards):
            try:
                prove_isolation()
            except IsolationError as error:
                raise ConfigError(f"grading.rewards: code: {error}") from error
        if cfg.credit.answer.style == "regex":
            check_pattern(cfg.credit.answer.pattern)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_report(report: ReportConfig) -> None:
    """Check early for the optional packages that reports need."""
    needs = {"pyarrow": ("report.groups", "0", "hub", report.groups > 0)}
    builtin = ", ".join(name for name in report.to if name not in PACKAGES)
    for name, (package, extra) in PACKAGES.items():
        needs[package] = ("report.to", f"[{builtin}]", extra, name in report.to)
    for package, (field, replacement, extra, requested) in needs.items():
        if requested and find_spec(package) is None:
            raise ConfigError(
                f'{field}: needs {package}, which is not installed; pip install "oarjax[{extra}]", or set '
                f"{field}={replacement}"
            )


def check_batches(cfg: Config, mesh: Mapping[str, int], rollout: Mapping[str, int]) -> None:
    """Check that microbatches and prompts divide over the row axes of their mesh."""
    check_rows(cfg.update.microbatch, mesh, what="update.microbatch")
    if cfg.sft is not None:
        check_rows(cfg.sft.microbatch, mesh, what="sft.microbatch")
    remedy = ", or a larger rollout.tensor"
    if cfg.rollout.devices is None:  # else they are drawn elsewhere
        check_rows(cfg.rollout.prompts, rollout, what="rollout.prompts", remedy=remedy)
    check_rows(cfg.eval.batch, rollout, what="eval.batch", remedy=remedy)
    if cfg.rollout.slots is not None:
        check_rows(cfg.rollout.slots, rollout, what="rollout.slots", remedy=remedy)


def check_lengths(cfg: Config, model: QwenConfig) -> None:
    lengths = {"data.max_prompt + rollout.max_new": cfg.data.max_prompt + cfg.rollout.max_new}
    if cfg.sft is not None:
        lengths["sft.max_length"] = cfg.sft.max_length
    for fields, longest in lengths.items():
        if longest > model.max_position_embeddings:
            raise ConfigError(
                f"{fields} = {longest} tokens, more than the checkpoint's "
                f"max_position_embeddings = {model.max_position_embeddings}; lower {fields.replace(' + ', ' or ')}"
            )


def check_processes(checkpoint: CheckpointConfig, grading: GradingConfig, *, processes: int) -> None:
    """Reject what several processes cannot do: go on where one lacks its file, and grade rows that another has."""
    if processes == 1:
        return
    if checkpoint.on_failure == "warn":
        raise ConfigError(f"checkpoint.on_failure: warn needs a single process, got {processes}; set stop")
    if names := [r.name for r in grading.rewards if calls_of(r.name) != "sample"]:
        raise ConfigError(
            f"grading.rewards: {', '.join(names)} sees whole groups or batches, but each of {processes} processes "
            "grades a share of the rows; use rewards per sample there"
        )
