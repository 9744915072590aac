"""Declare what a run starts from: the policy, the devices and the data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oarjax.config.section import AxisSize, Count, Positive, Section, Seed, Share, Word

BUILTIN_POLICIES = ("builtin:arithmetic", "builtin:forks", "builtin:stories", "builtin:turns", "builtin:random")
"""Policies of the built-in tasks, and a policy for any tokenizer; see ``oarjax.data.tasks.arithmetic``."""


class PolicyConfig(Section):
    path: str = Field(description="Hugging Face folder, hub name, or a tiny Qwen2 built at startup (builtin:...)")
    tokenizer: str | None = Field(
        default=None,
        description="HF folder or hub name of the tokenizer; for builtin:random only, other policies bring theirs",
    )
    revision: str | None = Field(
        default=None, description="hub revision (commit, tag or branch) of the policy, or of builtin:random's tokenizer"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="dtype of matmul operands; auto: bfloat16 on TPU and GPU, float32 elsewhere"
    )
    remat: Literal["none", "dots", "projections", "attention", "full"] = Field(
        default="full",
        description="what the backward pass recomputes of a layer: nothing (none), all but the matmuls (dots), all but "
        "q, k, v, gate, up and kernels of attention (projections), all but q, k, v and these kernels (attention), or "
        "everything (full)",
    )
    attention: Literal["auto", "xla", "splash", "blocked", "cudnn"] = Field(
        default="auto",
        description="attention kernels; splash: Pallas kernels for TPUs (interpreted, hence slow, elsewhere); blocked: "
        "XLA, scores of 128 queries at a time; cudnn: NVIDIA's, bfloat16, for scores and "
        "updates; auto: splash on TPUs, xla on CPUs, blocked on GPUs",
    )
    unroll: Positive = Field(
        default=1,
        description="layers (of hybrids: blocks of layers) per iteration of the loop over layers, decode steps apart; "
        "on a CPU, all layers of a small policy at once are faster",
    )
    head_chunk: Positive = Field(default=2048, description="token positions per chunk of the vocabulary head")
    router: Literal["recompute", "replay"] = Field(
        default="recompute",
        description="experts of a mixture in score and update: chosen again, or those that the sampler chose, stored "
        "per token (replay)",
    )


class MeshConfig(Section):
    """Devices per axis; one axis may be -1 and takes all remaining devices."""

    slice: AxisSize = Field(default=1, description="TPU slices, which are connected by the slower data-center network")
    data: AxisSize = Field(default=-1, description="data-parallel copies of the policy; rows are divided among them")
    expert: AxisSize = Field(default=1, description="devices that divide a mixture's experts; rows are divided too")
    fsdp: AxisSize = Field(default=1, description="devices that shard parameters and optimizer state; rows too")
    tensor: AxisSize = Field(default=1, description="devices that shard the matrices of every layer")


class DistributedConfig(Section):
    """Processes that share the mesh. On a TPU pod they find each other; elsewhere start each with these settings."""

    coordinator: str | None = Field(default=None, description="host:port of process 0; null = detected on a TPU pod")
    processes: Positive | None = Field(default=None, description="total number of processes")
    process: Count | None = Field(default=None, description="index of this process; the only field that differs")
    timeout: Positive = Field(default=300, description="seconds to wait for the other processes at startup")


class ArithmeticConfig(Section):
    """Problems of builtin:arithmetic."""

    terms: Annotated[int, Field(ge=2)] = Field(default=5, description="numbers per chain")
    highest: Positive = Field(default=99, description="running totals lie in 0..highest")
    written: Share = Field(default=0.5, description="share of completions in the sft split that write out the steps")
    seed: Seed = Field(default=0, description="seed of the problems")


class ForksConfig(Section):
    """Problems of builtin:forks."""

    kind: Literal["copy", "echo", "chain"] = Field(default="copy", description="task; see oarjax.data.tasks.forks")
    forks: Annotated[int, Field(ge=1, le=4)] = Field(default=2, description="choices per completion")
    filler: Count = Field(default=8, description="meaningless letters per fork")
    right: Share = Field(default=0.45, description="share of choices in the sft split that are right")
    uneven: Share = Field(
        default=0.0, description="added to right for half of the digits of each fork, subtracted for the others"
    )
    seed: Seed = Field(default=0, description="seed of the problems")


class StoriesConfig(Section):
    """Problems of builtin:stories."""

    highest: Annotated[int, Field(ge=10, le=99)] = Field(default=20, description="all numbers lie in 1..highest")
    right: Share = Field(default=1.0, description="share of steps in the sft split that are right")
    written: Share = Field(default=1.0, description="share of completions in the sft split that write out the steps")
    seed: Seed = Field(default=0, description="seed of the problems")


class DatasetConfig(Section):
    source: str = Field(
        description="builtin:arithmetic, builtin:forks, builtin:stories, builtin:guess, builtin:calculator; a .jsonl, "
        ".json, .csv or .parquet file; a folder of Dataset.save_to_disk; or a hub dataset name"
    )
    name: str | None = Field(default=None, description="hub dataset configuration, e.g. main")
    split: str = Field(default="train", description="split of a hub or saved dataset, or built-in task")
    revision: str | None = Field(default=None, description="hub revision (commit, tag or branch) of the dataset")
    prompt_field: str = Field(default="question", description="column of the problems")
    answer_field: str = Field(default="answer", description="column of the reference answers")
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = Field(
        default=1.0, description="turns among the data sets of data.mixture, relative to the other weights"
    )
    rewards: tuple[Word, ...] = Field(
        default=(), description="names of grading.rewards that grade these problems; [] = all of them"
    )
    system_prompt: str | None = Field(
        default=None, description="system message of these problems in place of data.system_prompt; null = that"
    )
    columns: tuple[Word, ...] | Literal["all"] = Field(
        default="all", description="columns that rewards see in Sample.columns; all: every column that JSON can hold"
    )
    limit: Count = Field(default=0, description="use only the first n rows; 0 = all (built-in tasks: a default size)")
    arithmetic: ArithmeticConfig = Field(default=ArithmeticConfig(), description="problems of builtin:arithmetic")
    forks: ForksConfig = Field(default=ForksConfig(), description="problems of builtin:forks")
    stories: StoriesConfig = Field(default=StoriesConfig(), description="problems of builtin:stories")


class DifficultyConfig(Section):
    """Pools of problems by the mean of their rewards in earlier iterations, faded by advantage.discount."""

    easy_above: float | None = Field(default=None, description="mean reward from which a problem is easy; null = none")
    easy_share: Share = Field(default=0.25, description="share of its turns in which an easy problem is drawn")
    hard_below: float | None = Field(default=None, description="mean reward up to which a problem is hard; null = none")
    hard_share: Share = Field(default=0.25, description="share of its turns in which a hard problem is drawn")


class DataConfig(Section):
    train: DatasetConfig
    mixture: tuple[DatasetConfig, ...] = Field(
        default=(), description="more data sets to train on, each with weight, rewards and system_prompt of its own"
    )
    difficulty: DifficultyConfig | None = Field(
        default=None, description="draw easy and hard problems less often; null = off"
    )
    eval: DatasetConfig | None = Field(default=None, description="held-out problems; null = no evaluation")
    template: Literal["chat", "plain"] = Field(
        default="chat", description="chat: the tokenizer's chat template; plain: the prompt unchanged"
    )
    system_prompt: str | None = Field(default=None, description="system message of the chat template")
    thinking: bool | None = Field(
        default=None,
        description="enable_thinking of chat templates that have it (Qwen3); null = the template's default",
    )
    prompt_format: str = Field(default="{prompt}", description="applied to each prompt before the template")
    max_prompt: Positive = Field(
        default=512,
        description="maximum prompt length in tokens; longer prompts are dropped and counted, never truncated",
    )
    shuffle: bool = Field(default=True, description="draw problems in random order, each once before any twice")
