"""One frozen config per run: what each field means, what it accepts, and all errors at once.

A run is a YAML file plus ``key.sub=value`` overrides. Only ``cli/`` and the builders in ``steps.py`` see a
config; equations take arrays and keyword scalars.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """A config that cannot run; the message lists every bad field with its path and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class PolicyConfig(Section):
    path: str = Field(description="HF folder, hub name, or builtin:arithmetic (a tiny Qwen2 made on the spot)")
    revision: str | None = Field(None, description="hub revision (commit, tag or branch)")
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on TPU and GPU")
    remat: Literal["none", "dots", "full"] = Field("full", description="what the backward pass recomputes per layer")
    head_chunk: Positive = Field(2048, description="token positions per chunk of the vocabulary head")


class MeshConfig(Section):
    """Devices per axis; -1 once: all that are left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


class ArithmeticConfig(Section):
    """Problems of builtin:arithmetic."""

    terms: Annotated[int, Field(ge=2)] = Field(5, description="numbers in a chain")
    highest: Positive = Field(99, description="running totals lie in 0..highest")
    written: Share = Field(0.5, description="of the sft split: share of completions that write the steps out")
    seed: Count = 0


class DatasetConfig(Section):
    source: str = Field(description="builtin:arithmetic, a .jsonl or .parquet file, or a hub dataset name")
    name: str | None = Field(None, description="hub dataset configuration, e.g. main")
    split: str = "train"
    revision: str | None = None
    prompt_field: str = "question"
    answer_field: str = "answer"
    limit: Count = Field(0, description="use only the first n rows; 0 = all (of builtin:arithmetic, its usual number)")
    arithmetic: ArithmeticConfig = Field(ArithmeticConfig(), description="for source builtin:arithmetic")


class DataConfig(Section):
    train: DatasetConfig
    eval: DatasetConfig | None = None
    template: Literal["chat", "plain"] = "chat"
    system_prompt: str | None = None
    prompt_format: str = Field("{prompt}", description="applied to each prompt before the template")
    max_prompt: Positive = Field(512, description="tokens; longer prompts are counted and left out, never cut")
    shuffle: bool = True


class RolloutConfig(Section):
    prompts: Positive = Field(32, description="prompts per iteration, over all hosts")
    group_size: Annotated[int, Field(ge=2)] = 8
    max_new: Positive = 1024
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Count = Field(0, description="0 = off")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    prompt_bucket: Positive = Field(64, description="prompt lengths are padded up to a multiple of this")
    completion_bucket: Positive = Field(256, description="completions are scored at a multiple of this")


class RewardConfig(Section):
    name: str = Field(description="a built-in reward or one registered by reward_plugins")
    weight: float = 1.0


class GradingConfig(Section):
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="math"),)
    plugins: tuple[str, ...] = Field((), description="Python files or modules that register rewards")
    workers: Positive = 2
    deadline: Annotated[float, Field(gt=0)] = Field(5.0, description="seconds per answer")
    memory_mb: Positive = Field(2048, description="resident memory of a worker; above it, it is killed")
    overlong_window: Count = Field(0, description="last tokens before max_new over which the penalty grows; 0 = off")
    overlong_penalty: Rate = Field(1.0, description="subtracted from the reward of a completion cut at max_new")


class AdvantageConfig(Section):
    scale: Literal["group", "batch", "none"] = "group"
    ddof: Literal[0, 1] = 1
    eps: Rate = 1e-4


class LossConfig(Section):
    surrogate: Literal["clip", "cispo"] = "clip"
    level: Literal["token", "sequence"] = "token"
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = "dapo"
    clip_low: Share = 0.2
    clip_high: Rate = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="cap on the ratio where A < 0")
    ratio_cap: Annotated[float, Field(gt=0)] = Field(5.0, description="CISPO's absolute upper bound on the ratio")
    kl_beta: Rate = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_bonus: float = 0.0
    sampler_correction_cap: Annotated[float, Field(gt=0)] | None = Field(
        None, description="truncated importance weight min(old / behaviour, cap)"
    )
    mask_truncated: bool = Field(False, description="leave completions cut at max_new out of the loss")


class ProbeConfig(Section):
    mode: Literal["last", "answer_mean", "answer_joint"] = "answer_mean"
    warmup_mode: Literal["last", "answer_mean", "answer_joint"] = "last"
    warmup_iterations: Count = 0


class GateConfig(Section):
    rule: Literal["quantile", "level"] = "quantile"
    tau: Share = 0.4
    boost: Rate = 2.0
    floor: Share = 0.1
    mass: Literal["kept", "free"] = Field("kept", description="kept: the weights of a row average 1")


class AnswerConfig(Section):
    style: Literal["boxed", "hash", "tag", "regex"] = "boxed"
    pattern: str | None = Field(None, description="for style regex; group 1, or the whole match, is the answer")


class CreditConfig(Section):
    method: Literal["uniform", "oar_g", "oar_p", "permuted"] = Field(
        "oar_g", description="permuted: OAR-G weights shuffled within each sequence, the control"
    )
    estimator: Literal["linearised", "noisy"] = Field("linearised", description="of OAR-G")
    sigma: Annotated[float, Field(gt=0)] = Field(1e-3, description="std of OAR-G's embedding noise")
    draws: Positive = 1
    mask_id: int | None = Field(None, description="token that OAR-P puts in; None = the pad id")
    chunk: Positive = Field(16, description="OAR-P counterfactuals per forward pass")
    probe: ProbeConfig = ProbeConfig()
    gate: GateConfig = GateConfig()
    answer: AnswerConfig = AnswerConfig()


class OptimConfig(Section):
    lr: Rate = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Count = Field(10, description="updates of linear warm-up")
    b1: Share = 0.9
    b2: Share = 0.95
    weight_decay: Rate = 0.01
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class UpdateConfig(Section):
    epochs: Positive = 1
    minibatches: Positive = Field(1, description="optimizer updates per epoch")
    microbatch: Positive = Field(32, description="rows per forward and backward pass, over all devices")
    skip_zero_variance: bool = Field(True, description="drop groups whose rewards are all equal before credit")
    refills: Count = Field(0, description="extra rollouts of fresh prompts to replace dropped groups")


class SFTConfig(Section):
    data: DatasetConfig
    steps: Positive
    batch: Positive = 64
    microbatch: Positive = Field(64, description="rows per forward and backward pass")
    optim: OptimConfig = OptimConfig(lr=1e-3)
    max_length: Positive = 512


class EvalConfig(Section):
    every: Count = Field(10, description="iterations; 0 = only before the first and after the last")
    samples: Positive = 1
    temperature: Rate = Field(1.0, description="0 = greedy")
    batch: Positive = 128


class ReportConfig(Section):
    to: tuple[Literal["jsonl", "tensorboard"], ...] = ("jsonl",)
    completions: Count = Field(4, description="completions saved and shown per iteration")
    html: bool = Field(True, description="write report.html and the curves")


class ExportConfig(Section):
    folder: str | None = Field("export", description="HF folder below the run folder; null = no export")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="null = as trained")


class Config(Section):
    run_dir: str
    seed: Count = 0
    iterations: Count = 100
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field("auto", description="an absent device is an error")
    compilation_cache: str | None = Field("~/.cache/oarjax/xla", description="null = off")
    profile: tuple[Count, Count] | None = Field(None, description="[first, last] iteration to trace")
    policy: PolicyConfig
    mesh: MeshConfig = MeshConfig()
    data: DataConfig
    sft: SFTConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    grading: GradingConfig = GradingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    credit: CreditConfig = CreditConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _contradictions(c: Config):
    """Fields that are each fine and cannot run together."""
    if c.update.epochs * c.update.minibatches == 1 and c.loss.dual_clip is not None:
        yield "loss.dual_clip: the ratio is exactly 1 with one epoch and one minibatch; set null or raise update.epochs"
    if c.rollout.prompts % c.update.minibatches:
        yield f"update.minibatches: {c.update.minibatches} does not divide rollout.prompts = {c.rollout.prompts}"
    if c.credit.answer.style == "regex" and not c.credit.answer.pattern:
        yield "credit.answer.pattern: needed when credit.answer.style is regex"
    if c.grading.overlong_window > c.rollout.max_new:
        yield f"grading.overlong_window: {c.grading.overlong_window} exceeds rollout.max_new = {c.rollout.max_new}"


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply ``key.sub=value`` overrides (values are YAML), validate.

    Raises:
        ConfigError: the file is missing or not YAML, an override has no ``=`` or no such parent, or fields
            are wrong; all wrong fields are in one message.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"config {path}: no such file; shipped ones are in configs/") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of fields, got {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree, source=str(path))


def parse_config(tree: dict[str, Any], *, source: str = "config") -> Config:
    """Validate a nested dict."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors()]
        raise ConfigError(f"{source}: {len(lines)} bad field(s)\n" + "\n".join(lines)) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from None
    *parents, leaf = key.split(".")
    for name in parents:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {name} is a value and has no field {leaf}")
    tree[leaf] = value


def _explain(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        section: Any = Config
        for part in error["loc"][:-1]:
            section = _section(section, str(part))
        known = sorted(section.model_fields) if section is not None else []
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"  {path}: no such field{hint} Accepted: {', '.join(known)}"
    if error["type"] == "missing":
        return f"  {path}: required and not given"
    if error["type"] == "value_error":
        return "\n".join(f"  {line}" for line in str(error["ctx"]["error"]).splitlines())
    return f"  {path}: {error['msg']}, got {error['input']!r}"


def _section(section: Any, name: str) -> Any:
    """The config class of a field, None where it is not a section."""
    field = getattr(section, "model_fields", {}).get(name)
    if field is None:
        return section if name.isdigit() else None
    for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
