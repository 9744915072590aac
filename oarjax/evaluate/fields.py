"""The config of an evaluation: of a benchmark, a family's sampling and the user's own fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oarjax.config.changes import explained
from oarjax.config.inputs import DatasetConfig
from oarjax.config.loading import apply_override, parse_config
from oarjax.config.outputs import SAMPLING_PRESETS
from oarjax.config.schema import Config
from oarjax.config.section import flatten
from oarjax.data.hf import read_config
from oarjax.data.tokenizer import load_tokenizer
from oarjax.errors import ConfigError
from oarjax.evaluate.benchmarks import FIRST_ANSWER, PROMPTS, Asked, Benchmark, family_prompt, find_fields
from oarjax.evaluate.early import ACCEPTED, check_accepted
from oarjax.evaluate.target import Target
from oarjax.system.devices import choose_platform
from oarjax.system.mesh import make_mesh
from oarjax.system.processes import join_processes

OWN = "held-out"
"""The name of a run's own held-out problems."""

ROWS = 64  # completions sampled at once per device, where eval.batch is not given


def own_problems(target: Target, text: str) -> Asked:
    """Ask a run's own held-out problems as the run asks them."""
    if target.cfg is None or target.cfg.data.eval is None:
        raise ConfigError(f"--data: {text} is not a run with held-out problems; give names of benchmarks or files")
    return _as_run(target, OWN, target.cfg.data.eval.model_dump(mode="json"))


def as_run_asks(target: Target, asked: Asked, prompt: str) -> Asked:
    """Ask a run's policy the problems of a file as the run asks its own, unless --prompt says how."""
    if target.cfg is None or asked.benchmark.named or prompt != "auto":
        return asked
    data = target.cfg.data.eval or target.cfg.data.train
    columns: set[str] = (
        set() if data.source.startswith("builtin:") else {"prompt_field", "answer_field"} & data.model_fields_set
    )
    source = {name: getattr(data, name) for name in ("system_prompt", *columns)}
    return _as_run(target, asked.name, source | asked.benchmark.data)


def _as_run(target: Target, name: str, source: dict[str, Any]) -> Asked:
    cfg = target.cfg
    assert cfg is not None
    fields = tuple(name for name in ACCEPTED if name.startswith(("data.", "rollout.", "grading.", "credit.")))
    tree = {path: value for path, value in flatten(cfg.model_dump(mode="json")).items() if path.startswith(fields)}
    of_eval = ("samples", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    tree |= {"seed": cfg.seed, **{f"eval.{setting}": getattr(cfg.eval, setting) for setting in of_eval}}
    settings = {path: value for path, value in tree.items() if not path.startswith("data.eval.")}
    return Asked(name, Benchmark(source, max_new=cfg.rollout.max_new, settings=settings, prompt="own"))


def config_tree(
    target: Target,
    benchmark: Benchmark,
    prompt: str,
    k: int | None,
    temperature: float | None,
    preset: dict[str, Any],
    overrides: Sequence[str],
    folder: Path,
) -> tuple[str, dict[str, Any]]:
    """Return the prompt's name and a config's fields: defaults, the prompt's, the benchmark's, then the user's."""
    _, source = read_config(target.policy, revision=target.revision)
    name = benchmark.prompt or (family_prompt(target.policy, load_tokenizer(source)) if prompt == "auto" else prompt)
    if name != "own" and name not in PROMPTS:
        raise ConfigError(f"--prompt: expected auto, {', '.join(PROMPTS)}, got {name}")
    tree: dict[str, Any] = {
        "run_dir": str(folder),
        "policy": {"path": target.policy, "revision": target.revision},
        "data": {"max_prompt": 1024, "eval": dict(benchmark.data)},
        "rollout": {"max_new": benchmark.max_new},
        "credit": {"method": "uniform"},
        "eval": {"samples": 1, "batch": 1},  # chosen later, unless it is given
        "report": {"html": False},
    }
    for path, value in (PROMPTS.get(name, {}) | benchmark.settings).items():
        _put(tree, path, value)
    tree["eval"] |= preset
    for override in overrides:
        check_accepted(override)
        apply_override(tree, override)
    answer = tree["credit"].get("answer")
    if isinstance(answer, dict) and answer.get("style") != "regex" and answer.get("pattern") == FIRST_ANSWER:
        del answer["pattern"]  # the prompt's, for the style that was replaced
    if k is not None:
        tree["eval"]["samples"] = k
    samples = tree["eval"]["samples"]
    if temperature is not None:
        tree["eval"]["temperature"] = temperature
    elif "temperature" not in tree["eval"] or (k is not None and not preset):
        tree["eval"]["temperature"] = 0.0 if samples == 1 else 1.0
    if samples > 1 and tree["eval"]["temperature"] == 0:
        raise ConfigError(f"--temperature: at 0 all {samples} samples of a problem are the same; raise it, or drop --k")
    return name, tree


def sampling_preset(family: str | None) -> dict[str, Any]:
    """Return the sampling settings that a family's model cards recommend.

    Raises:
        ConfigError: no such family.
    """
    if family is None:
        return {}
    if family not in SAMPLING_PRESETS:
        raise ConfigError(f"--as: expected one of {', '.join(SAMPLING_PRESETS)}, got {family}")
    return dict(SAMPLING_PRESETS[family])


def drawing(family: str | None, **asked: float | int | None) -> dict[str, Any]:
    """Return all settings of drawing: those asked for, else the family's, else the plain ones.

    Raises:
        ConfigError: no such family.
    """
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return plain | sampling_preset(family) | {name: value for name, value in asked.items() if value is not None}


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def batch_of(cfg: Config) -> int:
    """Choose how many problems are sampled at once: about ``ROWS`` completions per device that shares them."""
    join_processes(**cfg.distributed.model_dump())
    choose_platform(cfg.device)
    mesh = make_mesh(**cfg.mesh.model_dump())
    shares = mesh.size // (cfg.rollout.tensor or mesh.shape["tensor"])
    return max(shares, 1) * max(ROWS // cfg.eval.samples, 1)


def config_of(tree: dict[str, Any]) -> Config:
    """Build the config of an evaluation: its problems stand in the place of training problems."""
    data = dict(tree["data"])
    try:
        source = DatasetConfig.model_validate(data.pop("eval"))
    except ValidationError as error:
        raise explained(error, DatasetConfig, source="data.eval") from None
    names_fields = source.source.startswith("builtin:") or source.model_fields_set & {"prompt_field", "answer_field"}
    data["train"] = (source if names_fields else find_fields(source)).model_dump(mode="json")
    cfg = parse_config(tree | {"data": data}, source="oarjax evaluate")
    return with_batch(cfg, cfg.eval.batch)


def with_batch(cfg: Config, batch: int) -> Config:
    """Set the batch of an evaluation, and with it the training sizes that must divide."""
    tree = cfg.model_dump(mode="json")
    tree["eval"]["batch"] = tree["rollout"]["prompts"] = tree["update"]["microbatch"] = batch
    tree["rollout"]["group_size"], tree["advantage"] = tree["eval"]["samples"], {"method": "batch", "scale": "none"}
    return parse_config(tree, source="oarjax evaluate")
