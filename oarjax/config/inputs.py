"""Declare what a run starts from: the policy, the devices and the data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oarjax.config.section import AxisSize, Count, Positive, Section, Seed, Share, Word

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
        description="builtin:arithmetic, builtin:forks, builtin:stories; a .jsonl, .json, .csv or .parquet file; a "
        "folder of Dataset.save_to_disk; or a hub dataset name"
    )
    name: str | None = Field(default=None, description="hub dataset configuration, e.g. main")
    split: str = Field(default="train", description="of a hub or saved dataset, or a built-in task")
    revision: str | None = Field(default=None, description="hub revision (commit, tag or branch) of the dataset")
    prompt_field: str = Field(
        default="question", description="field of a row with the problem: text, or chat messages that end in the user's"
    )
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
