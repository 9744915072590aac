"""Declare what a run measures, keeps and writes, and the settings of ``oarjax credit`` and ``oarjax plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oarjax.config.section import Count, Positive, Rate, Section, Share, Word
from oarjax.credit.registry import lab_methods

SAMPLING_PRESETS: dict[str, dict[str, float | int]] = {
    "qwen3-thinking": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0},
    "qwen3-instruct": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0},
    "qwen2.5": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
}
"""Sampling that the model cards of a family recommend; ``qwen3-instruct`` is also Qwen3 without thinking."""


class EvalConfig(Section):
    every: Count = Field(default=10, description="iterations between evaluations; 0 = only the first and the last")
    samples: Positive = Field(default=1, description="completions per held-out problem")
    temperature: Rate = Field(default=1.0, description="sampling temperature; 0 = greedy")
    top_k: Count = Field(default=0, description="as rollout.top_k")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="as rollout.top_p")
    min_p: Share = Field(default=0.0, description="as rollout.min_p")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(default=1.0, description="as rollout.repetition_penalty")
    batch: Positive = Field(default=128, description="problems sampled at once")
    kl: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="measure the KL divergence from the start with every evaluation; on: keep the start's params for "
        "it if nothing else does; auto: where they are kept anyway, or lie below adapters",
    )


class CheckpointConfig(Section):
    every: Count = Field(default=10, description="iterations between checkpoints; 0 = none")
    keep: Positive = Field(default=2, description="newest checkpoints to keep")
    best: Literal["pass_at_1", "pass_at_k", "maj_at_k"] | None = Field(
        default="pass_at_1",
        description="also keep the checkpoint with the highest value of this metric of the evaluation (k = "
        "eval.samples)",
    )
    rollouts: Literal["needed", "all"] = Field(
        default="needed",
        description="records of rollouts to keep: those that a kept checkpoint may repeat, or all of them, to train on "
        "with rollout.from",
    )
    on_failure: Literal["stop", "warn"] = Field(
        default="stop",
        description="when a file of the run cannot be written (disk full or gone): stop with an error, or continue "
        "with a warning",
    )
    warm_start: Count = Field(default=500, description="sft steps between checkpoints of the warm start; 0 = none")


class HealthConfig(Section):
    """Reaction to values that are not finite. An update with such a value is always skipped."""

    stop_after: Count = Field(default=5, description="consecutive skipped updates before the run stops; 0 = never")
    bad_batches: Count = Field(default=3, description="newest such batches kept for oarjax replay; 0 = none")
    params_mb: Count = Field(
        default=2048, description="save params up to this size with them; replay reads larger ones from a checkpoint"
    )


class ReportConfig(Section):
    to: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = Field(
        default=("jsonl",), description="wandb is offline unless WANDB_MODE is set; trackio is local"
    )
    project: Word = Field(default="oarjax", description="project name in wandb and trackio")
    name: Word | None = Field(default=None, description="run name in wandb and trackio; null = the name of its folder")
    completions: Count = Field(default=4, description="completions saved and shown per iteration")
    groups: Count = Field(
        default=0, description="iterations between Parquet files of all completions, groups/NNNNNN.parquet; 0 = none"
    )
    html: bool = Field(default=True, description="write report.html, and the curves if matplotlib is installed")
    memory: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="report each phase's memory, from the compiled programs, before the first update; auto: on TPU and "
        "GPU",
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
    folder: str | None = Field(
        default="export", description="Hugging Face folder to export to, below the run folder; null = no export"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="dtype of the exported weights; null = as trained"
    )


class LengthsConfig(Section):
    """Expected lengths of completions: a lognormal, cut at rollout.max_new, or the lengths of a run."""

    mean: Annotated[float, Field(gt=0)] | None = Field(default=None, description="mean length, before the cut")
    sigma: Annotated[float, Field(gt=0)] = Field(default=0.6, description="standard deviation of the log length")
    completions: str | None = Field(default=None, description="completions.jsonl of a run, in place of mean and sigma")

    @model_validator(mode="after")
    def _one_source(self) -> LengthsConfig:
        if (self.mean is None) == (self.completions is None):
            raise ValueError("expected either mean (with sigma) or completions")
        return self


class PlanConfig(Section):
    """Settings of ``oarjax plan``; a run does not read them."""

    topology: str | None = Field(default=None, description="TPU slice to plan for, such as v5e-16 or v5e:4x4")
    lengths: LengthsConfig | None = Field(default=None, description="also estimate the step time for such completions")


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
        default=100, description="completions to compare on; with --rollouts the first ones, of any prompts"
    )
    samples: Positive = Field(
        default=1, description="completions per problem; methods that compare the rows of a prompt need several"
    )
    shortest: Positive = Field(default=10, description="minimum reasoning tokens of a completion")
    temperature: Rate | None = Field(
        default=None, description="sampling temperature of the completions; null = rollout.temperature, 0 = greedy"
    )
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=lab_methods, description="name to show -> fields of credit that differ"
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1, description="share of a row's reasoning that counts as a method's top"
    )
    batch: Positive = Field(default=10, description="completions scored and timed at once")
    branches: Positive = Field(default=128, description="changed completions decoded at once")
    answer_tokens: Positive = Field(default=16, description="tokens decoded to read the answer")
    continuations: Count = Field(
        default=0,
        description="sampled after every token that credit.signed_values lists, to compare its values with Q; 0 = off",
    )
    bootstrap: Positive = Field(default=2000, description="resamples behind each 95% interval")
    shown: Count = Field(default=12, description="completions on the page")
    gradients: GradientsConfig = GradientsConfig()
