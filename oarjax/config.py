"""One frozen config per run: every field's meaning and accepted values, with all errors reported at once.

A run is a YAML file plus ``key.sub=value`` overrides. Equations (``rl``, ``credit``, ``rollout``) see no config: they
take arrays and keyword scalars.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from oarjax.credit.record import CUSTOM
from oarjax.credit.registry import lab_methods, reads_reference
from oarjax.credit.settings import CreditSettings
from oarjax.errors import ConfigError
from oarjax.rl.ranges import a_number
from oarjax.system.paths import path_problem
from oarjax.system.yaml_tree import LONGEST, YamlError, read_yaml

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(min_length=1)]


def _axis_size(size: int) -> int:
    if size < 1 and size != -1:
        raise ValueError(f"expected a positive number of devices, or -1 for all remaining ones, got {size}")
    return size


AxisSize = Annotated[int, AfterValidator(_axis_size)]


def _word_of_switch(value: Any) -> Any:
    """Turn true and false back into the words on and off, which YAML reads as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_a_number(cls, value: Any, info: Any) -> Any:
        """Refuse true and false for a number, which Python takes for 1 and 0; YAML reads yes, no, on and off so."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        return a_number(value) if kinds & {int, float} and bool not in kinds and str not in kinds else value


def _kinds(annotation: Any) -> set[Any]:
    """Collect the plain types of an annotation; those of Literal values count as str."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {str}
    return set().union(*map(_kinds, inner)) if inner else {annotation}


BUILTIN_POLICIES = ("builtin:arithmetic", "builtin:forks", "builtin:stories", "builtin:random")
"""Policies of the built-in tasks, and a policy for any tokenizer; see ``oarjax.data.tasks.arithmetic``."""


class PolicyConfig(Section):
    path: str = Field(description="HF folder, hub name, or a tiny Qwen2 that is built at the start (builtin:...)")
    tokenizer: str | None = Field(
        default=None, description="for builtin:random: HF folder or hub name; other policies have one"
    )
    revision: str | None = Field(
        default=None, description="hub revision (commit, tag or branch) of the policy or tokenizer"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on TPU and GPU"
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="full", description="activations that the backward pass recomputes per layer"
    )
    attention: Literal["auto", "xla", "splash"] = Field(
        default="auto", description="splash: Pallas' TPU kernels (slow elsewhere: interpreted); auto: splash on TPUs"
    )
    head_chunk: Positive = Field(default=2048, description="token positions per chunk of the vocabulary head")
    router: Literal["recompute", "replay"] = Field(
        default="recompute",
        description="experts of a mixture in score and update; replay: those that the sampler chose, kept per token",
    )


class MeshConfig(Section):
    """Devices per axis; one axis may be -1 and takes all remaining devices."""

    slice: AxisSize = Field(default=1, description="TPU slices, which the slow network connects")
    data: AxisSize = Field(
        default=-1, description="devices that hold a copy of the policy each; rows are divided over them"
    )
    expert: AxisSize = Field(
        default=1, description="devices that share out the experts of a mixture; rows are divided over them as well"
    )
    fsdp: AxisSize = Field(
        default=1, description="devices that share parameters and optimizer state; rows are divided over them as well"
    )
    tensor: AxisSize = Field(default=1, description="devices that share every layer's matrices")


class DistributedConfig(Section):
    """Processes that share the mesh. On a TPU pod they find each other; elsewhere start each with these settings."""

    coordinator: str | None = Field(default=None, description="host:port of process 0; null = detected on a TPU pod")
    processes: Positive | None = Field(default=None, description="number of processes in all")
    process: Count | None = Field(
        default=None, description="number of this process; the only field that differs between processes"
    )
    timeout: Positive = Field(default=300, description="seconds to wait for the others at the start")


class ArithmeticConfig(Section):
    """Problems of builtin:arithmetic."""

    terms: Annotated[int, Field(ge=2)] = Field(default=5, description="numbers in a chain")
    highest: Positive = Field(default=99, description="running totals lie in 0..highest")
    written: Share = Field(default=0.5, description="of the sft split: share of completions that write the steps out")
    seed: Seed = Field(default=0, description="of the problems")


class ForksConfig(Section):
    """Problems of builtin:forks."""

    kind: Literal["copy", "echo", "chain"] = Field(default="copy", description="see oarjax.data.tasks.forks")
    forks: Annotated[int, Field(ge=1, le=4)] = Field(default=2, description="choices in a completion")
    filler: Count = Field(default=8, description="letters without meaning per fork")
    right: Share = Field(default=0.45, description="of the sft split: share of choices that are right")
    seed: Seed = Field(default=0, description="of the problems")


class StoriesConfig(Section):
    """Problems of builtin:stories."""

    highest: Annotated[int, Field(ge=10, le=99)] = Field(default=20, description="all numbers lie in 1..highest")
    right: Share = Field(default=1.0, description="of the sft split: share of steps that are right")
    written: Share = Field(default=1.0, description="of the sft split: share of completions that write the steps out")
    seed: Seed = Field(default=0, description="of the problems")


class DatasetConfig(Section):
    source: str = Field(
        description="builtin:arithmetic, builtin:forks, builtin:stories, a .jsonl or .parquet file, a hub dataset name"
    )
    name: str | None = Field(default=None, description="hub dataset configuration, e.g. main")
    split: str = Field(default="train", description="of a hub dataset or built-in task")
    revision: str | None = Field(default=None, description="hub revision (commit, tag or branch) of the dataset")
    prompt_field: str = Field(default="question", description="field of a row with the problem")
    answer_field: str = Field(default="answer", description="field of a row with the reference answer")
    columns: tuple[Word, ...] | Literal["all"] = Field(
        default="all", description="fields of a row that rewards see as Sample.columns; all: those that JSON can hold"
    )
    limit: Count = Field(
        default=0, description="use only the first n rows; 0 = all (a built-in task has a default number)"
    )
    arithmetic: ArithmeticConfig = Field(default=ArithmeticConfig(), description="for source builtin:arithmetic")
    forks: ForksConfig = Field(default=ForksConfig(), description="for source builtin:forks")
    stories: StoriesConfig = Field(default=StoriesConfig(), description="for source builtin:stories")


class DataConfig(Section):
    train: DatasetConfig
    eval: DatasetConfig | None = Field(default=None, description="held-out problems; null = no evaluation")
    template: Literal["chat", "plain"] = Field(
        default="chat", description="chat: the tokenizer's chat template; plain: the prompt as it stands"
    )
    system_prompt: str | None = Field(default=None, description="of the chat template")
    thinking: bool | None = Field(
        default=None, description="for chat templates with enable_thinking (Qwen3); null = the template's default"
    )
    prompt_format: str = Field(default="{prompt}", description="applied to each prompt before the template")
    max_prompt: Positive = Field(default=512, description="tokens; longer prompts are counted and left out, never cut")
    shuffle: bool = Field(default=True, description="draw problems in random order, each once before any twice")


class RolloutConfig(Section):
    prompts: Positive = Field(default=32, description="prompts per iteration, over all hosts")
    group_size: Positive = Field(
        default=8, description="completions per prompt; 1 needs advantage.method=batch, or advantage.function"
    )
    max_new: Positive = Field(default=1024, description="tokens of a completion at most")
    temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="of sampling; the loss uses it too")
    top_k: Count = Field(default=0, description="0 = off")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="draw among the likeliest tokens of this mass; 1 = all"
    )
    min_p: Share = Field(default=0.0, description="least probability, as a share of the likeliest token's; 0 = off")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="logits of tokens of prompt and completion are divided by it, negative ones multiplied"
    )
    stop: tuple[Word, ...] = Field(
        default=(), description="strings that end a completion, of evaluations too; its text is cut before them"
    )
    tensor: Positive | None = Field(
        default=None, description="devices that share one copy of the policy while sampling; null = mesh.tensor"
    )
    prompt_bucket: Positive = Field(default=64, description="prompt lengths are padded up to a multiple of this")
    completion_bucket: Positive = Field(
        default=256, description="microbatches are padded to this times 1, 2, 3, 4, 6, 8, 12 ... tokens"
    )
    segment: Positive = Field(
        default=128,
        description="maximum decode steps before waiting rows may take the slots of finished rows",
    )
    cache_bucket: Positive | None = Field(
        default=None,
        description="slots that the KV cache starts with and grows by; null = an eighth of max_new, at least 128. "
        "While it grows, the old and the new cache are both in memory; max_new = full size from the start",
    )
    slots: Positive | None = Field(
        default=None,
        description="completions decoded at once, over all devices; null = the whole batch. Fewer need less memory and "
        "more steps",
    )


class RewardConfig(Section):
    name: str = Field(description="a built-in reward, or a reward that grading.plugins register")
    weight: float = Field(default=1.0, description="the reward of a completion is the weighted sum")
    settings: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")


class GradingConfig(Section):
    rewards: tuple[RewardConfig, ...] = Field(
        default=(RewardConfig(name="math"),),
        description="by name; their weighted sum is the reward, the first one decides pass@1",
    )
    plugins: tuple[str, ...] = Field(default=(), description="Python files or modules that register rewards")
    workers: Positive | Literal["auto"] = Field(
        default="auto", description="processes on each host; auto: half as many as it has cores, 2 to 32"
    )
    deadline: Annotated[float, Field(gt=0)] = Field(default=5.0, description="seconds per answer")
    memory_mb: Positive = Field(default=2048, description="resident memory above which a worker is killed")
    call_deadline: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="seconds per call of a batch or group reward, and per sample of an async one"
    )
    concurrency: Positive = Field(default=16, description="samples of an async reward in flight")
    overlong_window: Count = Field(
        default=0, description="last tokens before max_new over which the penalty grows; 0 = off"
    )
    overlong_penalty: Rate = Field(default=1.0, description="subtracted from the reward of a completion cut at max_new")


class AdvantageConfig(Section):
    method: Literal["grpo", "rloo", "batch", "gdpo"] = Field(
        default="grpo",
        description="rloo: against the mean of the group's other rewards; batch: of all rewards; gdpo: each reward "
        "normalised on its own",
    )
    leave_one_out: bool = Field(default=False, description="of batch: the mean of the other rewards, which is unbiased")
    function: str | None = Field(
        default=None,
        description="custom advantages, file.py:name or module:name, see oarjax.rl.advantages.AdvantageFunction; the "
        "other fields of this section then do not apply",
    )
    scale: Literal["group", "batch", "none"] = Field(
        default="group",
        description="divide by the standard deviation of the group (GRPO), of the batch, or by nothing (Dr. GRPO)",
    )
    ddof: Literal[0, 1] = Field(default=1, description="1: sample standard deviation; 0: population's")
    eps: Rate = Field(default=1e-4, description="added to the standard deviation")


OFF_POLICY_PRESETS = {
    "tis": {"weighting": "token_truncate", "low": 0.0, "high": 2.0},
    "icepop": {"weighting": "token_mask", "low": 0.5, "high": 5.0},
}
"""Truncated importance sampling with the cap of its report, and IcePop with the bounds of its paper."""


class OffPolicyConfig(Section):
    """Corrections for tokens that another policy drew; in YAML also the name of a preset, ``off_policy: icepop``."""

    weighting: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="none", description="of tokens or rows, by old / behaviour; see oarjax.rl.off_policy.importance_weights"
    )
    low: Rate = Field(default=0.0, description="lowest importance weight")
    high: Annotated[float, Field(gt=0)] = Field(default=2.0, description="highest importance weight")
    support: Literal["whole", "sampled"] = Field(
        default="whole",
        description="sampled: log-probs of the loss and of behaviour are renormalised over what rollout.top_k, top_p "
        "and min_p keep, each policy's by its own logits; the drawn token is always kept",
    )
    max_drift: Rate | None = Field(
        default=None,
        description="nats per token of log(behaviour / policy) above which a row of negative advantage is left out",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in OFF_POLICY_PRESETS:
            raise ValueError(f"expected fields, or one of the presets {', '.join(OFF_POLICY_PRESETS)}, got {value!r}")
        return OFF_POLICY_PRESETS[value]

    @model_validator(mode="after")
    def _ordered(self) -> OffPolicyConfig:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} exceeds high = {self.high}; lower it, or raise high")
        return self


class LossConfig(Section):
    function: str | None = Field(
        default=None,
        description="custom loss, file.py:name or module:name, see oarjax.step.loss.TokenLoss; of the fields "
        "below, only aggregation, kl_beta and kl_in (for the reference's log-probs) and mask_truncated still apply",
    )
    surrogate: Literal["clip", "cispo", "sapo", "gmpo"] = Field(
        default="clip", description="gmpo: clip_low and clip_high bound the log-ratio; its paper has .4 for both"
    )
    level: Literal["token", "sequence"] = Field(
        default="token", description="ratio per token, or one per sequence (GSPO)"
    )
    aggregation: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = Field(
        default="dapo",
        description="mean over tokens (dapo; bnpo: per microbatch), of rows' means (grpo), or over max_new (dr_grpo)",
    )
    clip_low: Share = Field(default=0.2, description="ratios below 1 - clip_low are clipped")
    clip_high: Rate = Field(default=0.28, description="ratios above 1 + clip_high are clipped")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(default=None, description="cap on the ratio if A < 0")
    ratio_cap: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="CISPO's absolute upper bound on the ratio"
    )
    sapo_positive: Annotated[float, Field(gt=0)] = Field(default=1.0, description="SAPO's temperature where A > 0")
    sapo_negative: Annotated[float, Field(gt=0)] = Field(default=1.05, description="and where A is 0 or below")
    kl_beta: Rate = Field(default=0.0, description="coefficient of the KL term to the start policy; 0 = off")
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="reward: kl_beta times log(policy / reference) is taken off every reward instead"
    )
    reference: Literal["device", "host"] = Field(
        default="device", description="memory that holds the KL term's reference policy between scoring passes"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="of the KL term, after Schulman")
    entropy_bonus: float = Field(default=0.0, description="coefficient of the entropy, which is added to the objective")
    router_balance: Rate = Field(
        default=0.0,
        description="coefficient of the load-balancing loss of experts (Switch, eq. 4), which is added to the loss",
    )
    off_policy: OffPolicyConfig = OffPolicyConfig()
    mask_truncated: bool = Field(default=False, description="leave completions cut at max_new out of the loss")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "sampler_correction_cap" in value:
            raise ValueError(
                "sampler_correction_cap is off_policy.high now; set off_policy: {weighting: token_truncate, high: "
                f"{value['sampler_correction_cap']}}}"
            )
        return value


class OptimConfig(Section):
    lr: Rate = Field(default=1e-6, description="learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate after the warm-up; linear and cosine end at 0"
    )
    warmup: Count = Field(default=10, description="updates of linear warm-up")
    b1: Share = Field(default=0.9, description="Adam's decay of the mean gradient")
    b2: Share = Field(default=0.95, description="Adam's decay of the mean squared gradient")
    weight_decay: Rate = Field(default=0.01, description="AdamW's")
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="gradients of a larger norm are scaled down to it"
    )
    moments: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of Adam's moments; bfloat16 halves their memory, needs b1 and b2 <= .99"
    )


class LoraConfig(Section):
    """Low-rank adapters: only they are trained, and the policy is stored once, in the compute dtype."""

    rank: Count = Field(default=0, description="0 = off: every weight is trained")
    alpha: Annotated[float, Field(gt=0)] = Field(default=32.0, description="adapters are scaled by alpha / rank")
    targets: Annotated[tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...], Field(min_length=1)] = Field(
        default=(
            "q",
            "k",
            "v",
            "o",
            "gate",
            "up",
            "down",
        ),
        description="matrices that get adapters",
    )

    start: str | None = Field(
        default=None, description="PEFT folder of adapters to start from; rank, alpha and targets must be its own"
    )

    @property
    def scale(self) -> float:
        """Return alpha / rank, the factor of the adapters' product."""
        return self.alpha / max(self.rank, 1)


class UpdateConfig(Section):
    epochs: Positive = Field(default=1, description="passes over a rollout")
    minibatches: Positive = Field(default=1, description="optimizer updates per epoch")
    microbatch: Positive = Field(default=32, description="rows per forward and backward pass, over all devices")
    skip_zero_variance: bool = Field(
        default=True,
        description="drop groups of equal rewards before credit and update, including their KL and entropy terms",
    )
    refills: Count = Field(default=0, description="extra rollouts of fresh prompts to replace dropped groups")
    fused: Literal["auto", "never"] = Field(
        default="auto",
        description="score and update in one pass: for oar_g with one update per rollout, without KL or reference "
        "answers, where grades are waited for before scoring anyway (skip_zero_variance or refills)",
    )


class SFTConfig(Section):
    data: DatasetConfig
    steps: Positive = Field(description="optimizer updates")
    batch: Positive = Field(default=64, description="pairs per update")
    microbatch: Positive = Field(default=64, description="rows per forward and backward pass")
    optim: OptimConfig = OptimConfig(lr=1e-3)
    max_length: Positive = Field(default=512, description="tokens of prompt and completion; longer pairs are left out")


SAMPLING_PRESETS: dict[str, dict[str, float | int]] = {
    "qwen3-thinking": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0},
    "qwen3-instruct": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0},
    "qwen2.5": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
}
"""Sampling that the model cards of a family recommend; ``qwen3-instruct`` is also Qwen3 without thinking."""


class EvalConfig(Section):
    every: Count = Field(
        default=10, description="iterations between evaluations; 0 = only before the first and after the last"
    )
    samples: Positive = Field(default=1, description="completions per held-out problem")
    temperature: Rate = Field(default=1.0, description="0 = greedy")
    top_k: Count = Field(default=0, description="0 = off")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="as rollout.top_p")
    min_p: Share = Field(default=0.0, description="as rollout.min_p")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(default=1.0, description="as rollout.repetition_penalty")
    batch: Positive = Field(default=128, description="problems sampled at once")


class CheckpointConfig(Section):
    every: Count = Field(default=10, description="iterations between checkpoints; 0 = none")
    keep: Positive = Field(default=2, description="newest checkpoints to keep")
    best: Literal["pass_at_1", "pass_at_k", "maj_at_k"] | None = Field(
        default="pass_at_1",
        description="metric of the evaluation, k = eval.samples; the checkpoint with the highest value is also kept",
    )
    on_failure: Literal["stop", "warn"] = Field(
        default="stop",
        description="if a file of the run cannot be written (disk full or gone): stop with an error, or continue",
    )
    warm_start: Count = Field(default=500, description="sft steps between checkpoints of the warm start; 0 = none")


class HealthConfig(Section):
    """Reaction to values that are not finite. An update with such a value is always skipped."""

    stop_after: Count = Field(default=5, description="consecutive skipped updates before the run stops; 0 = never")
    bad_batches: Count = Field(
        default=3, description="newest batches with such values to keep for oarjax replay; 0 = none"
    )
    params_mb: Count = Field(
        default=2048,
        description="params up to this size are kept too; replay reads larger ones from a checkpoint",
    )


class ReportConfig(Section):
    to: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = Field(
        default=("jsonl",), description="wandb is offline unless WANDB_MODE is set; trackio is local"
    )
    project: Word = Field(default="oarjax", description="project in wandb and trackio")
    name: Word | None = Field(default=None, description="name of the run in them; null = the name of its folder")
    completions: Count = Field(default=4, description="completions saved and shown per iteration")
    groups: Count = Field(
        default=0, description="iterations between Parquet files of all completions, groups/NNNNNN.parquet; 0 = none"
    )
    html: bool = Field(default=True, description="write report.html, and the curves if matplotlib is installed")
    memory: Annotated[Literal["auto", "on", "off"], BeforeValidator(_word_of_switch)] = Field(
        default="auto",
        description="compile the largest programs at the start and report each phase's memory; auto: on TPU and GPU",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_controls(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "controls" in value:
            raise ValueError(
                "controls was replaced by a study: leave it out, and run oarjax study study_grpo base=CONFIG.yaml "
                "run_dir=FOLDER"
            )
        return value


class ExportConfig(Section):
    folder: str | None = Field(default="export", description="HF folder below the run folder; null = no export")
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, description="null = as trained")


class LengthsConfig(Section):
    """Expected lengths of completions: a lognormal, cut at rollout.max_new, or the lengths of a run."""

    mean: Annotated[float, Field(gt=0)] | None = Field(default=None, description="tokens, before the cut")
    sigma: Annotated[float, Field(gt=0)] = Field(default=0.6, description="standard deviation of the log length")
    completions: str | None = Field(default=None, description="completions.jsonl of a run, instead of mean and sigma")

    @model_validator(mode="after")
    def _one_source(self) -> LengthsConfig:
        if (self.mean is None) == (self.completions is None):
            raise ValueError("expected either mean (with sigma) or completions")
        return self


class PlanConfig(Section):
    """Settings of ``oarjax plan``; a run does not read them."""

    topology: str | None = Field(default=None, description="TPU slice to plan for, such as v5e-16 or v5e:4x4")
    lengths: LengthsConfig | None = Field(
        default=None, description="also estimate the step time for completions of such lengths"
    )


class GradientsConfig(Section):
    """Settings of ``oarjax credit --gradients``."""

    minibatches: Annotated[int, Field(ge=3)] = Field(default=16, description="minibatches to draw and compare")
    prompts: Positive | None = Field(default=None, description="prompts per minibatch; null = rollout.prompts")
    sketch: Positive = Field(
        default=1 << 20, description="numbers kept per gradient; larger gradients become a count sketch of this size"
    )


class LabConfig(Section):
    """Settings of ``oarjax credit``: the methods to compare, and the completions to compare them on."""

    problems: Positive = Field(
        default=100,
        description="completions to compare on; with --rollouts the first ones, of any prompts",
    )
    samples: Positive = Field(
        default=1, description="completions per problem; methods that compare the rows of a prompt need several"
    )
    shortest: Positive = Field(default=10, description="reasoning tokens that a completion needs to be included")
    temperature: Rate | None = Field(
        default=None, description="temperature of the completions; null = rollout.temperature, 0 = greedy"
    )
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=lab_methods, description="name to show -> changed fields of credit"
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1, description="share of a row's reasoning that counts as a method's top"
    )
    batch: Positive = Field(default=10, description="completions scored and timed at once")
    branches: Positive = Field(default=128, description="changed completions decoded at once")
    answer_tokens: Positive = Field(default=16, description="tokens decoded to read the answer")
    bootstrap: Positive = Field(default=2000, description="resamples behind each 95% interval")
    shown: Count = Field(default=12, description="completions on the page")
    gradients: GradientsConfig = GradientsConfig()


class Config(Section):
    """A whole run; each section is a class in ``oarjax.config`` that documents its fields."""

    run_dir: str = Field(description="folder for everything that the run writes")
    seed: Seed = Field(default=0, description="of all noise: order of the data, sampling, importance")
    iterations: Count = Field(default=100, description="prompts, rollout and update, this many times")
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field(default="auto", description="a missing device is an error")
    compilation_cache: str | None = Field(default="~/.cache/oarjax/xla", description="null = off")
    compile_ahead: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compile every program that the run may use before its first iteration, prompts padded to one "
        "width; auto: on accelerators",
    )
    profile: tuple[Count, Count] | None = Field(default=None, description="[first, last] iteration to trace")
    policy: PolicyConfig
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    data: DataConfig
    sft: SFTConfig | None = Field(default=None, description="supervised warm start before the iterations; null = none")
    rollout: RolloutConfig = RolloutConfig()
    grading: GradingConfig = GradingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    credit: CreditSettings = CreditSettings()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    report: ReportConfig = ReportConfig()
    export: ExportConfig = ExportConfig()
    lab: LabConfig = LabConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


RUN_FOLDERS = ("start", "sft", "checkpoints", "verdicts", "bad_batches", "policy", "profile", "tensorboard", "wandb")
RUN_FOLDERS += ("groups",)
"""Folders that a run writes below its run folder."""


RUN_FILES = ("config.yaml", "run.json", "metrics.jsonl", "completions.jsonl", "start.json", "sft.json", "inputs.json")
RUN_FILES += ("checkpoints.json", "memory.json", "tracking.json", "summary.json", "facts.json", "report.html", "lock")
RUN_FILES += ("evaluate", "samples", "logs", "tpu", "accept")
"""Other names that a run, or a command that reads one, writes there; ``curve*.png`` are further ones."""

PATHS = ("run_dir", "compilation_cache", "policy.path", "policy.tokenizer", "data.train.source", "data.eval.source")
PATHS += ("sft.data.source", "lora.start", "export.folder", "plan.lengths.completions", "grading.plugins")
PATHS += ("credit.function", "credit.marks", "credit.probe.function", "advantage.function", "loss.function")
"""Fields that may hold the path of a file or folder."""


def _contradictions(c: Config) -> Iterator[str]:
    """Report fields that are valid alone and contradict each other."""
    for name, value in flatten(c.model_dump(mode="json")).items():
        for text in value if isinstance(value, list) else [value]:
            if name in PATHS and isinstance(text, str) and (problem := path_problem(text)) is not None:
                yield f"{name}: {problem}"
        if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            yield f"{name}: {value} names the home folder of a user whom this machine does not know; write the path out"
    path, tokenizer = c.policy.path, c.policy.tokenizer
    if path.startswith("builtin:") and path not in BUILTIN_POLICIES:
        yield f"policy.path: {path} is unknown; accepted: {', '.join(BUILTIN_POLICIES)}, an HF folder, a hub name"
    if path == "builtin:random" and tokenizer is None:
        yield "policy.tokenizer: builtin:random needs one; set an HF folder or a hub name"
    if path != "builtin:random" and tokenizer is not None:
        yield f"policy.tokenizer: {path} has its own tokenizer; set null"
    if sum(n == -1 for n in (c.mesh.slice, c.mesh.data, c.mesh.expert, c.mesh.fsdp, c.mesh.tensor)) > 1:
        yield "mesh: at most one axis can be -1, which takes the remaining devices"
    d = c.distributed
    if len({d.coordinator is None, d.processes is None, d.process is None}) > 1:
        yield "distributed: coordinator, processes and process go together; set all three or none"
    elif d.coordinator is not None and not re.fullmatch(r".+:\d+", d.coordinator):
        yield f"distributed.coordinator: expected host:port such as 10.0.0.2:8476, got {d.coordinator!r}"
    elif d.processes is not None and d.process is not None and d.process >= d.processes:
        yield f"distributed.process: expected a number below processes = {d.processes}, got {d.process}"
    if c.data.thinking is not None and c.data.template != "chat":
        yield f"data.thinking: needs data.template = chat, got {c.data.template}; set null, or data.template=chat"
    if c.update.epochs * c.update.minibatches == 1 and c.loss.dual_clip is not None:
        yield "loss.dual_clip: the ratio is exactly 1 with one epoch and one minibatch; set null or raise update.epochs"
    rows = c.rollout.prompts * c.rollout.group_size
    if c.rollout.prompts % c.update.minibatches:
        yield f"update.minibatches: {c.update.minibatches} does not divide rollout.prompts = {c.rollout.prompts}"
    elif rows // c.update.minibatches % c.update.microbatch:
        yield (
            f"update.microbatch: {c.update.microbatch} does not divide the {rows // c.update.minibatches} rows of a "
            "minibatch (rollout.prompts * rollout.group_size / update.minibatches)"
        )
    if c.sft is not None and c.sft.batch % c.sft.microbatch:
        yield f"sft.microbatch: {c.sft.microbatch} does not divide sft.batch = {c.sft.batch}"
    yield from _bad_objective(c)
    if c.loss.reference == "host" and c.loss.kl_beta == 0 and not reads_reference(c.credit.method):
        yield "loss.reference: host needs a reference, but loss.kl_beta is 0; set device, or raise loss.kl_beta"
    if c.loss.reference == "host" and c.lora.rank:
        yield "loss.reference: host has no use with lora.rank, whose frozen weights are the reference; set device"
    if c.lora.rank == 0 and c.lora != LoraConfig():
        yield "lora.rank: 0, and lora.alpha, targets or start are set; set lora.rank=32, or leave these out"
    for where, o in (("optim", c.optim), *((("sft.optim", c.sft.optim),) if c.sft else ())):
        for name, decay in (("b1", o.b1), ("b2", o.b2)):
            if o.moments == "bfloat16" and decay > 0.99:
                yield (
                    f"{where}.{name}: {decay} is too slow for {where}.moments = bfloat16, whose rounding loses the "
                    f"changes; lower {name} to .99 or less, or set {where}.moments=float32"
                )
    if c.credit.method == CUSTOM and c.credit.function is None:
        yield "credit.function: needed when credit.method is custom; set file.py:name of an oarjax.CreditMethod"
    if c.credit.answer.style == "regex" and not c.credit.answer.pattern:
        yield "credit.answer.pattern: needed when credit.answer.style is regex"
    if c.credit.answer.style != "regex" and c.credit.answer.pattern is not None:
        yield f"credit.answer.pattern: read for style regex only, got style {c.credit.answer.style}; set null"
    if c.credit.answer.cue is not None and c.credit.answer.source == "own":
        yield "credit.answer.cue: read for source reference only, got source own; set null, or source=reference"
    if c.grading.overlong_window > c.rollout.max_new:
        yield f"grading.overlong_window: {c.grading.overlong_window} exceeds rollout.max_new = {c.rollout.max_new}"
    names = [r.name for r in c.grading.rewards]
    if not names or len(set(names)) < len(names):
        yield f"grading.rewards: expected at least one and each once, got {names}"
    if c.profile is not None and not 1 <= c.profile[0] <= c.profile[1] <= c.iterations:
        yield f"profile: expected 1 <= first <= last <= iterations = {c.iterations}, got {list(c.profile)}"
    if c.export.folder is not None and not _is_below(c.export.folder):
        yield f"export.folder: expected a folder below run_dir such as export, got {c.export.folder!r}"
    elif c.export.folder is not None and _is_reserved(PurePath(c.export.folder).parts[0]):
        yield f"export.folder: {c.export.folder} is reserved for other files of the run; choose another such as export"
    if c.checkpoint.best in ("pass_at_k", "maj_at_k") and c.eval.samples == 1:
        yield f"checkpoint.best: {c.checkpoint.best} needs several samples, but eval.samples is 1; raise eval.samples"
    yield from _bad_lab_methods(c)


def _bad_objective(c: Config) -> Iterator[str]:
    """Report advantages and terms of the loss that contradict each other."""
    a, off, skips = c.advantage, c.loss.off_policy, c.update.skip_zero_variance
    if a.function is not None and a != AdvantageConfig(function=a.function):
        yield "advantage.function: replaces the other fields of advantage; leave these out, or set null"
    if a.method == "rloo" and a.scale == "group":
        yield "advantage.scale: group, and rloo divides by no group's std; set none (its paper) or batch"
    if a.method == "batch" and a.scale == "group" and a.function is None:
        yield "advantage.scale: group, and batch looks at no group; set batch or none"
    if a.leave_one_out and a.method != "batch":
        yield f"advantage.leave_one_out: read for method batch only, got {a.method}; set false, or method=batch"
    if c.rollout.group_size == 1 and a.function is None and a.method != "batch":
        yield f"rollout.group_size: 1, and {a.method} compares completions of a prompt; set advantage.method=batch"
    if a.method == "gdpo" and a.scale != "group":
        yield f"advantage.scale: {a.scale}, and gdpo normalises each reward by its group; leave it at group"
    if a.method == "gdpo" and skips:
        yield "advantage.method: gdpo can teach in groups of equal sums; set update.skip_zero_variance=false"
    if c.loss.kl_in == "reward" and c.loss.kl_beta == 0:
        yield "loss.kl_in: reward, and loss.kl_beta is 0; raise it, or set loss.kl_in=loss"
    if c.loss.kl_in == "reward" and skips:
        yield "loss.kl_in: reward, which differs in groups of equal rewards; set update.skip_zero_variance=false"
    if c.loss.kl_in == "reward" and a.method == "gdpo":
        yield "loss.kl_in: reward, and gdpo normalises each reward on its own; set loss.kl_in=loss"
    if c.loss.surrogate == "gmpo" and c.loss.level == "sequence":
        yield "loss.level: sequence, and gmpo takes its own mean over a row; set token"
    roll = c.rollout
    if off.support == "sampled" and (roll.top_k, roll.top_p, roll.min_p) == (0, 1.0, 0.0):
        yield "loss.off_policy.support: sampled, and rollout.top_k, top_p and min_p keep every token; set whole"
    if off.support == "sampled" and c.loss.kl_beta > 0:
        yield "loss.off_policy.support: sampled, and the KL term compares whole distributions; set loss.kl_beta=0"
    if off.support == "sampled" and roll.repetition_penalty != 1:
        yield "loss.off_policy.support: sampled does not follow rollout.repetition_penalty; set the penalty to 1"
    if off.weighting == "none" and (off.low, off.high) != (OffPolicyConfig().low, OffPolicyConfig().high):
        yield "loss.off_policy.weighting: none, and low or high is set; set token_truncate, for one, or leave these out"


def _bad_lab_methods(c: Config) -> Iterator[str]:
    if not c.lab.methods:
        yield "lab.methods: expected at least one method"
    for name, changes in c.lab.methods.items():
        try:
            answer = changed(c.credit, changes).answer
        except ValidationError as error:
            lines = "; ".join(" ".join(line.split()) for e in error.errors() for line in [_explain(e, CreditSettings)])
            yield f"lab.methods.{name}: {lines}"
        else:
            if answer != c.credit.answer:
                yield f"lab.methods.{name}: all methods read the same answers; set credit.answer instead"


CREDIT = TypeAdapter(CreditSettings)


def changed(credit: CreditSettings, changes: dict[str, Any]) -> CreditSettings:
    """Change some fields of a credit section; nested mappings change fields of its sections.

    Raises:
        ValidationError: a field is unknown, or a value is invalid.
    """

    try:
        return _changed(credit, json.dumps(changes))
    except TypeError:  # a value that JSON has no form for
        return CREDIT.validate_python(_merged(asdict(credit), changes))


@lru_cache(maxsize=1024)
def _changed(credit: CreditSettings, changes: str) -> CreditSettings:
    """Validate each pair once: every config names the lab's methods, most of them the same."""
    return CREDIT.validate_python(_merged(asdict(credit), json.loads(changes)))


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        k: _merged(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) else v for k, v in new.items()
    }
    return old | both


def _is_below(folder: str) -> bool:
    """Return True for a relative path to a proper subfolder."""
    path = PurePath(folder)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_reserved(name: str) -> bool:
    """Return True for the names of a run's other files; those that begin with a dot are files half written."""
    return name in (*RUN_FOLDERS, *RUN_FILES) or name.startswith(".") or fnmatchcase(name, "curve*.png")


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply overrides and validate.

    Args:
        path: of a file, or the name of a shipped config, such as ``demo``.
        overrides: ``key.sub=value``, values in YAML; default ().

    Raises:
        ConfigError: the file is missing or not YAML, an override has no ``=`` or no such parent, or fields are invalid;
            one message lists all invalid fields.
    """
    return parse_config(read_tree(path, overrides), source=str(path))


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """Read the fields of a YAML file with ``key.sub=value`` overrides applied, not validated.

    Raises:
        ConfigError: the file is missing or not YAML, or an override has no ``=`` or no such parent.
    """
    path = find_config(path)
    try:
        with path.open(encoding="utf-8") as file:
            tree = read_yaml(file.read(LONGEST + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read: {error}") from None
    except YamlError as error:
        raise ConfigError(f"config {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of fields, got {type(tree).__name__}")
    for override in overrides:
        apply_override(tree, override)
    return tree


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs by name: those of the package, or in a checkout those beside its pyproject.toml."""
    package = Path(str(files("oarjax")))
    folder, project = package / "configs", package.parent / "pyproject.toml"
    if not folder.is_dir() and project.is_file():
        named = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("name")
        folder = package.parent / "configs" if named == "oarjax" else folder
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find_config(path: str | Path) -> Path:
    """Return the path if it exists, else the shipped config of that name (``demo`` or ``configs/demo.yaml``).

    Raises:
        ConfigError: neither exists; suggests the shipped config with the nearest name.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        return path
    return _shipped(path)


def _shipped(path: Path) -> Path:
    name, inside = path.name.removesuffix(".yaml"), path.parent in (Path(), Path("configs"))
    shipped = shipped_configs()
    if inside and name in shipped:
        return shipped[name]
    if path.is_dir():
        own = path / "config.yaml"
        hint = f"a run's own config is {own}" if own.is_file() else "expected a YAML file or the name of a shipped one"
        raise ConfigError(f"config {path}: a folder; {hint}")
    nearest = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"config {path}: no such file; {hint}shipped ones: {', '.join(shipped) or 'none'}")


def copy_shipped(name: str, target: Path | None = None) -> Path:
    """Copy a shipped config to ``target`` (NAME.yaml here) and return where it is.

    Raises:
        ConfigError: no such config; the target exists or cannot be written.
    """
    source = _shipped(Path(name))
    target = target or Path(source.name)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"init: {target} exists; give another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"init: {target} cannot be written: {error.strerror}; give another file") from error
    return target


def parse_config(tree: dict[str, Any], *, source: str = "config") -> Config:
    """Validate a nested dict."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise explained(error, Config, source=source) from None


def explained(error: ValidationError, root: type[Any], *, source: str) -> ConfigError:
    """Turn validation errors of a ``root`` into one error that lists every bad field with the accepted values."""
    lines = [line for e in error.errors() for line in _explain(e, root).splitlines()]
    rest = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
    return ConfigError(f"{source}: {len(lines)} bad field(s)\n" + "\n".join(lines[:20] + rest))


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set the field of a nested dict that ``key.sub=value`` names, creating sections on the way."""
    key, sep, text = override.partition("=")
    if not sep:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    try:
        value = read_yaml(text)
    except YamlError:
        raise ConfigError(f"override {override!r:.200}: the value is not valid YAML; quote it") from None
    *parents, leaf = key.split(".")
    for name in parents:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ConfigError(
                f"override {override!r}: {name} is a value ({tree!r}) and has no field {leaf}; set the fields of "
                f"{name} instead"
            )
    tree[leaf] = value


def _explain(error: Any, root: type[Any]) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        section: Any = root
        for part in error["loc"][:-1]:
            section = _section(section, str(part))
        known = sorted(fields_of(section))
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if ":" in str(error["loc"][-1]):
            hint = " (in YAML a space must follow the colon)"
        return f"  {path}: no such field{hint}; accepted: {', '.join(known)}"
    if error["type"] == "missing":
        return f"  {path}: required and missing"
    if error["type"] == "value_error":
        where = f"{path}: " if error["loc"] else ""  # contradictions name their fields
        return "\n".join(f"  {where}{line}" for line in str(error["ctx"]["error"]).splitlines())
    return f"  {path}: {error['msg']}, got {error['input']!r:.200}"


def fields_of(section: Any) -> dict[str, Any]:
    """Return the annotations of a section's fields by name; none of what is not a section."""
    if isinstance(section, type) and is_dataclass(section):
        hints = get_type_hints(section)
        return {field.name: hints[field.name] for field in fields(section)}
    return {name: field.annotation for name, field in getattr(section, "model_fields", {}).items()}


def _section(section: Any, name: str) -> Any:
    """Return the class of a section's field; None if it is not a section."""
    if name not in fields_of(section):
        return section if name.isdigit() else None
    annotation = fields_of(section)[name]
    return next((c for c in (annotation, *get_args(annotation)) if fields_of(c)), None)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dict with dotted paths."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        flat |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return flat
