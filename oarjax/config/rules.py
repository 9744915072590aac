"""Fields that are valid alone and contradict each other: one rule per section or pair, all reported at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from oarjax.config.changes import changed, explain
from oarjax.config.inputs import (
    BUILTIN_POLICIES,
    DataConfig,
    DifficultyConfig,
    DistributedConfig,
    MeshConfig,
    PolicyConfig,
)
from oarjax.config.learning import (
    MOST_DRIVEN,
    RECORDED,
    AdvantageConfig,
    GradingConfig,
    LoraConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
    SFTConfig,
    UpdateConfig,
)
from oarjax.config.outputs import CheckpointConfig, EvalConfig, ExportConfig, LabConfig
from oarjax.config.section import flatten
from oarjax.credit.record import CUSTOM
from oarjax.credit.registry import METHODS, reads_reference
from oarjax.credit.settings import CreditSettings
from oarjax.system.paths import path_problem

RUN_FOLDERS = ("start", "sft", "checkpoints", "verdicts", "bad_batches", "policy", "profile", "tensorboard", "wandb")
RUN_FOLDERS += ("groups", "rollouts")
"""Folders that a run writes below its run folder."""


RUN_FILES = ("config.yaml", "run.json", "metrics.jsonl", "completions.jsonl", "start.json", "sft.json", "inputs.json")
RUN_FILES += ("checkpoints.json", "memory.json", "tracking.json", "summary.json", "facts.json", "report.html", "lock")
RUN_FILES += ("evaluate", "samples", "logs", "tpu", "accept")
"""Other names that a run, or a command that reads one, writes there; ``curve*.png`` are further ones."""

PATHS = ("run_dir", "compilation_cache", "policy.path", "policy.tokenizer", "data.train.source", "data.eval.source")
PATHS += ("sft.data.source", "lora.start", "export.folder", "plan.lengths.completions", "grading.plugins")
PATHS += ("credit.function", "credit.marks", "credit.probe.function", "advantage.function", "loss.function")
PATHS += ("loss.teacher", "optim.function", "sft.optim.function", "rollout.from", "rollout.engine.weights")
"""Fields that may hold the path of a file or folder."""


def check_paths(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report texts that cannot be paths, and home folders of unknown users, in a config given as nested mappings."""
    for name, value in flatten(tree).items():
        texts = value if isinstance(value, list) else [value]
        yield from check_paths({name: {str(n): part for n, part in enumerate(texts) if isinstance(part, Mapping)}})
        for text in texts:
            is_path = re.sub(r"mixture\.\d+", "train", name) in PATHS
            if is_path and isinstance(text, str) and (problem := path_problem(text)) is not None:
                yield f"{name}: {problem}"
        if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            yield f"{name}: {value} names the home folder of a user unknown to this machine; write out the path"


def check_mixture(
    data: DataConfig, grading: GradingConfig, advantage: AdvantageConfig, sft: SFTConfig | None
) -> Iterator[str]:
    """Report weights and rewards of data sets that nothing reads, or that contradict the rewards."""
    names = [reward.name for reward in grading.rewards]
    parts = {"data.train": data.train, "data.eval": data.eval}
    parts |= {f"data.mixture.{number}": part for number, part in enumerate(data.mixture)}
    for where, part in parts.items():
        if part is not None and (unknown := [name for name in part.rewards if name not in names]):
            yield f"{where}.rewards: {unknown[0]} is not in grading.rewards, only {', '.join(names)}; correct or add it"
        if part is not None and part.rewards and advantage.method == "gdpo":
            yield f"{where}.rewards: gdpo normalises each reward over all rows; set [], or another advantage.method"
    if data.eval is not None and data.eval.rewards and names[0] not in data.eval.rewards:
        yield f"data.eval.rewards: the first of grading.rewards, {names[0]}, decides pass@1; name it too"
    alone = {"data.eval": data.eval, "sft.data": sft and sft.data, "data.train": None if data.mixture else data.train}
    for where, part in alone.items():
        if part is not None and part.weight != 1:
            yield f"{where}.weight: has no effect outside a mixture, got {part.weight}; set 1, or add data.mixture"
    if sft is not None and sft.data.rewards:
        yield "sft.data.rewards: the warm start grades nothing; set []"


def check_difficulty(pools: DifficultyConfig | None, rollout: RolloutConfig) -> Iterator[str]:
    """Report pools that hold no problem, or all, or that nothing reads."""
    if pools is None:
        return
    if rollout.recorded:
        yield "data.difficulty: rollouts of files come in their own order; set null, or leave rollout.from out"
    default, easy, hard = DifficultyConfig(), pools.easy_above, pools.hard_below
    if easy is None and hard is None:
        yield "data.difficulty: needs easy_above or hard_below; set one, or data.difficulty=null"
    if easy is None and pools.easy_share != default.easy_share:
        yield "data.difficulty.easy_share: has no effect without easy_above; set it, or leave easy_share out"
    if hard is None and pools.hard_share != default.hard_share:
        yield "data.difficulty.hard_share: has no effect without hard_below; set it, or leave hard_share out"
    if easy is not None and hard is not None and hard >= easy:
        yield f"data.difficulty.hard_below: expected less than easy_above = {easy}, got {hard}; lower it"


def check_policy(policy: PolicyConfig) -> Iterator[str]:
    """Report an unknown built-in policy, and a tokenizer where the policy has its own."""
    path, tokenizer = policy.path, policy.tokenizer
    if path.startswith("builtin:") and path not in BUILTIN_POLICIES:
        yield f"policy.path: {path} is unknown; accepted: {', '.join(BUILTIN_POLICIES)}, an HF folder, a hub name"
    if path == "builtin:random" and tokenizer is None:
        yield "policy.tokenizer: builtin:random needs one; set an HF folder or a hub name"
    if path != "builtin:random" and tokenizer is not None:
        yield f"policy.tokenizer: {path} has its own tokenizer; set null"


def check_devices(mesh: MeshConfig, processes: DistributedConfig) -> Iterator[str]:
    """Report axes of unknown size, and processes that are only half described."""
    d = processes
    if sum(n == -1 for n in (mesh.slice, mesh.data, mesh.expert, mesh.fsdp, mesh.tensor)) > 1:
        yield "mesh: at most one axis can be -1, which stands for all remaining devices"
    if len({d.coordinator is None, d.processes is None, d.process is None}) > 1:
        yield "distributed: coordinator, processes and process must be set together; set all three or none"
    elif d.coordinator is not None and not re.fullmatch(r".+:\d+", d.coordinator):
        yield f"distributed.coordinator: expected host:port such as 10.0.0.2:8476, got {d.coordinator!r}"
    elif d.processes is not None and d.process is not None and d.process >= d.processes:
        yield f"distributed.process: expected a number below processes = {d.processes}, got {d.process}"


def check_prompts(data: DataConfig) -> Iterator[str]:
    """Report settings of a chat template for prompts without one."""
    if data.thinking is not None and data.template != "chat":
        yield f"data.thinking: needs data.template = chat, got {data.template}; set null, or data.template=chat"


def check_batches(rollout: RolloutConfig, update: UpdateConfig, sft: SFTConfig | None) -> Iterator[str]:
    """Report batches that do not divide into minibatches and microbatches."""
    rows = rollout.prompts * rollout.group_size
    if rollout.prompts % update.minibatches:
        yield f"update.minibatches: {update.minibatches} does not divide rollout.prompts = {rollout.prompts}"
    elif rows // update.minibatches % update.microbatch:
        yield (
            f"update.microbatch: {update.microbatch} does not divide the {rows // update.minibatches} rows of a "
            "minibatch (rollout.prompts * rollout.group_size / update.minibatches)"
        )
    if sft is not None and sft.batch % sft.microbatch:
        yield f"sft.microbatch: {sft.microbatch} does not divide sft.batch = {sft.batch}"


def check_episodes(rollout: RolloutConfig, evaluation: EvalConfig) -> Iterator[str]:
    """Report more episodes of a taskset at once than its token server has connections."""
    sizes = {
        "eval.batch x eval.samples": evaluation.batch * evaluation.samples,
        "rollout.prompts x rollout.group_size": rollout.prompts * rollout.group_size,
    }
    name = max(sizes, key=sizes.__getitem__)
    if rollout.environment is not None and rollout.environment.taskset is not None and sizes[name] > MOST_DRIVEN:
        yield (
            f"rollout.environment: expected at most {MOST_DRIVEN:,} episodes of {rollout.environment.name} at once, "
            f"got {name} = {sizes[name]:,}; lower one of them"
        )


def check_environment(
    rollout: RolloutConfig, data: DataConfig, grading: GradingConfig, credit: CreditSettings, advantage: AdvantageConfig
) -> Iterator[str]:
    """Report what an episode's rows cannot have, and the reward of an environment that is not there."""
    is_rewarded = any(reward.name == "environment" for reward in grading.rewards)
    if rollout.environment is None:
        if is_rewarded:
            yield "grading.rewards: environment needs rollout.environment; set it, or name another reward"
        if credit.masking.unit == "turn":
            yield "credit.masking.unit: turn needs rollout.environment; set it, or another unit"
        return
    if rollout.environment.thinking == "keep" and data.template != "chat":
        yield f"rollout.environment.thinking: keep needs data.template = chat, got {data.template}; set template"
    if rollout.recorded or rollout.engine is not None:
        yield "rollout.environment: only the run's own sampler draws turns; leave out rollout.from and rollout.engine"
    if credit.answer.source == "reference":
        yield "credit.answer.source: reference puts an answer into single turns; set own, or environment=null"
    if advantage.soft != "off":
        yield f"advantage.soft: {advantage.soft} reads an answer of single turns; set off, or rollout.environment=null"


def check_advantages(
    advantage: AdvantageConfig, group_size: int, update: UpdateConfig, *, pools: bool = False
) -> Iterator[str]:
    """Report advantages whose fields contradict each other, the size of groups, or the groups that are dropped."""
    a = advantage
    yield from _check_settings("advantage", a.function, a.settings)
    if a.function is not None and a != AdvantageConfig(function=a.function, settings=a.settings):
        yield "advantage.function: replaces the other fields of advantage; leave these out, or set null"
    if a.method == "rloo" and a.scale == "group":
        yield "advantage.scale: group, and rloo divides by no group's std; set none (its paper) or batch"
    over_batch = a.method in ("batch", "problem")
    if over_batch and a.scale == "group" and a.function is None:
        yield f"advantage.scale: group, and {a.method} looks at no group; set batch or none"
    if a.scale == "problem" and a.method != "problem":
        yield f"advantage.scale: problem, and {a.method} keeps no earlier rewards; set method=problem, or another scale"
    if a.leave_one_out and not over_batch:
        yield f"advantage.leave_one_out: read for methods batch and problem, got {a.method}; set false, or method=batch"
    if a.discount != 1 and a.method != "problem" and not pools:
        yield (
            f"advantage.discount: read for method problem and data.difficulty only, got {a.method}; set 1, or "
            "method=problem"
        )
    if group_size == 1 and a.function is None and not over_batch:
        yield (
            f"rollout.group_size: {a.method} needs at least 2 completions per prompt, got 1; raise it, or set "
            "advantage.method=batch"
        )
    if a.method == "gdpo" and a.scale != "group":
        yield f"advantage.scale: gdpo normalises each reward within its group, got {a.scale}; set group"
    if a.method == "gdpo" and update.skip_zero_variance:
        yield (
            "advantage.method: gdpo has nonzero advantages in groups of equal total reward; set "
            "update.skip_zero_variance=false"
        )


def check_loss(loss: LossConfig, advantage: AdvantageConfig, update: UpdateConfig) -> Iterator[str]:
    """Report terms of the loss that have no effect or contradict each other."""
    yield from _check_settings("loss", loss.function, loss.settings)
    if update.epochs * update.minibatches == 1 and loss.dual_clip is not None:
        yield (
            "loss.dual_clip: has no effect with one epoch and one minibatch, where the ratio is exactly 1; set null, "
            "or raise update.epochs"
        )
    if loss.kl_in != "loss" and loss.kl_beta == 0:
        yield f"loss.kl_in: {loss.kl_in} needs loss.kl_beta > 0, got 0; raise it, or set loss.kl_in=loss"
    if loss.kl_in != "loss" and update.skip_zero_variance:
        yield (
            f"loss.kl_in: {loss.kl_in} gives groups of equal rewards nonzero advantages; set "
            "update.skip_zero_variance=false"
        )
    if loss.kl_in == "reward" and advantage.method == "gdpo":
        yield "loss.kl_in: reward, and gdpo normalises each reward on its own; set loss.kl_in=loss"
    if loss.kl_in == "reward" and advantage.method == "problem":
        yield "loss.kl_in: reward, and method problem remembers rewards without it; set loss.kl_in=loss"
    if loss.surrogate in ("gmpo", "vespo", "dppo") and loss.level == "sequence":
        yield f"loss.level: sequence, and {loss.surrogate} reads the ratios of tokens; set token"
    if loss.aggregation == "luspo" and loss.level != "sequence":
        yield "loss.aggregation: luspo weighs the ratio of a sequence by its length; set loss.level=sequence"
    if loss.surrogate in ("vespo", "dppo") and loss.off_policy.weighting != "none":
        yield f"loss.off_policy.weighting: {loss.surrogate} compares with the sampler itself; set none"
    if loss.kl_corrected and (loss.kl_beta == 0 or loss.kl_in != "loss"):
        yield "loss.kl_corrected: needs a KL term in the loss; raise loss.kl_beta with loss.kl_in=loss, or set false"


def check_entropy(loss: LossConfig) -> Iterator[str]:
    """Report settings of an adaptive entropy coefficient that nothing reads, or that begin outside their range."""
    d = LossConfig()
    if loss.entropy_target is None and (loss.entropy_step, loss.entropy_highest) != (d.entropy_step, d.entropy_highest):
        yield "loss.entropy_target: null, and entropy_step or entropy_highest is set; set it, or leave these out"
    if loss.entropy_target is not None and loss.function is not None:
        yield "loss.entropy_target: loss.function has its own terms; set null, or leave loss.function out"
    if loss.entropy_target is not None and not 0 <= loss.entropy_bonus <= loss.entropy_highest:
        yield f"loss.entropy_bonus: expected 0 to entropy_highest = {loss.entropy_highest}, got {loss.entropy_bonus}"


def check_reference(
    loss: LossConfig, lora: LoraConfig, credit: CreditSettings, evaluation: EvalConfig, rollout: RolloutConfig
) -> Iterator[str]:
    """Report a place for a reference policy that nothing needs, and settings of adapters without a rank."""
    is_needed = loss.scores_reference or reads_reference(credit.method) or evaluation.kl == "on"
    if loss.reference == "host" and not is_needed:
        why = "loss.kl_beta is 0; set device, or raise loss.kl_beta"
        why = why if loss.teacher is None else "loss.teacher holds none in memory; set device"
        yield f"loss.reference: host needs a reference, but {why}"
    if loss.teacher == RECORDED and not rollout.recorded:
        yield "loss.teacher: recorded log-probs come with rollouts from files; set rollout.from, or name a policy"
    if loss.reference_every and loss.kl_beta == 0 and not reads_reference(credit.method):
        yield "loss.reference_every: moves a reference that nothing reads; raise loss.kl_beta, or set 0"
    if loss.reference_every and loss.reference == "host":
        yield "loss.reference: host holds a reference that stays, and loss.reference_every moves it; set device"
    if loss.teacher is not None and loss.kl_beta == 0:
        yield "loss.teacher: needs loss.kl_beta > 0, got 0; raise it, or set null"
    if loss.teacher is not None and loss.reference_every:
        yield "loss.teacher: stays the reference, and loss.reference_every moves it; set null, or 0"
    if loss.teacher is not None and reads_reference(credit.method):
        yield f"loss.teacher: {credit.method} compares with the initial policy; set null, or another credit.method"
    if loss.reference == "host" and lora.rank and loss.teacher is None:
        yield (
            "loss.reference: host has no effect with LoRA, where the frozen base weights are the reference already; "
            "set device"
        )
    if lora.rank == 0 and lora != LoraConfig():
        yield "lora.rank: alpha, targets and start have no effect with rank 0; set lora.rank=32, or remove them"


def check_moments(where: str, optim: OptimConfig) -> Iterator[str]:
    """Report decays, of the section named ``where``, whose changes bfloat16 rounds away."""
    for name, decay in (("b1", optim.b1), ("b2", optim.b2)):
        if optim.moments == "bfloat16" and decay > 0.99:
            yield (
                f"{where}.{name}: {decay} is too slow for {where}.moments = bfloat16, whose rounding loses the "
                f"changes; lower {name} to .99 or less, or set {where}.moments=float32"
            )


def _check_settings(where: str, function: str | None, settings: Mapping[str, Any]) -> Iterator[str]:
    if function is None and settings:
        yield f"{where}.settings: read with {where}.function only; set that, or leave the settings out"


def check_optimizer(where: str, optim: OptimConfig) -> Iterator[str]:
    """Report fields of AdamW, in the section named ``where``, beside another optimizer, and settings of none."""
    yield from _check_settings(where, optim.function, optim.settings)
    adam = [n for n in ("b1", "b2", "weight_decay", "moments") if getattr(optim, n) != getattr(OptimConfig(), n)]
    if optim.function is not None and adam:
        yield f"{where}.{adam[0]}: AdamW's, and {where}.function replaces it; leave it out, or use {where}.settings"


def check_credit(credit: CreditSettings) -> Iterator[str]:
    """Report missing fields of credit that another field requires, and fields that have no effect."""
    answer = credit.answer
    if credit.method == CUSTOM and credit.function is None:
        yield "credit.function: needed when credit.method is custom; set file.py:name of an oarjax.CreditMethod"
    if answer.style == "regex" and not answer.pattern:
        yield "credit.answer.pattern: needed when credit.answer.style is regex"
    if answer.style != "regex" and answer.pattern is not None:
        yield f"credit.answer.pattern: applies to style regex only, got style {answer.style}; set null"
    if answer.cue is not None and answer.source == "own":
        yield "credit.answer.cue: applies to source reference only, got source own; set null, or source=reference"


def check_soft(a: AdvantageConfig, loss: LossConfig, update: UpdateConfig, credit: CreditSettings) -> Iterator[str]:
    """Report settings that do not go with the probability of the reference answer as the reward."""
    if a.soft == "off":
        return
    where = f"advantage.soft: {a.soft}"
    if credit.answer.source != "reference":
        yield f"{where} reads the reference answer; set credit.answer.source=reference"
    if update.skip_zero_variance or update.refills:
        yield f"{where} is known after the rows are scored; set update.skip_zero_variance=false and update.refills=0"
    if a.method in ("gdpo", "problem") or a.function is not None:
        name = a.method if a.function is None else "advantage.function"
        yield f"{where}, and {name} reads grades; set advantage.method to grpo, rloo or batch"
    if a.soft == "split" and a.scale != "none":
        yield f"{where} adds two differences in units of the reward; set advantage.scale=none"
    if loss.kl_in == "reward":
        yield f"{where}, and loss.kl_in=reward changes grades; set loss.kl_in=loss"
    if credit.method in METHODS and METHODS[credit.method].kind == "sequence":
        yield f"{where}, and credit.method {credit.method} reads each reward; set another method"


def check_values(credit: CreditSettings, update: UpdateConfig) -> Iterator[str]:
    """Report rows that would be left out though a method of kind values learns from them."""
    if credit.method in METHODS and METHODS[credit.method].kind == "values":
        if update.skip_zero_variance:
            yield (
                f"update.skip_zero_variance: true, and {credit.method} learns from rows of advantage 0 too; set false"
            )
        if update.refills:
            yield f"update.refills: {update.refills}, and {credit.method} learns from every group; set 0"


def check_grading(grading: GradingConfig, max_new: int) -> Iterator[str]:
    """Report missing or repeated rewards, and a penalty that begins before the completion."""
    if grading.overlong_window > max_new:
        yield f"grading.overlong_window: {grading.overlong_window} exceeds rollout.max_new = {max_new}"
    names = [reward.name for reward in grading.rewards]
    if not names or len(set(names)) < len(names):
        yield f"grading.rewards: expected one or more distinct rewards, got {names}"


def check_profile(profile: tuple[int, int] | None, iterations: int) -> Iterator[str]:
    """Report iterations to trace that the run does not have."""
    if profile is not None and not 1 <= profile[0] <= profile[1] <= iterations:
        yield f"profile: expected 1 <= first <= last <= iterations = {iterations}, got {list(profile)}"


def check_export(export: ExportConfig) -> Iterator[str]:
    """Report an export folder outside the run folder, or one that is reserved for the run's own files."""
    folder = export.folder
    if folder is not None and not _is_below(folder):
        yield f"export.folder: expected a folder below run_dir such as export, got {folder!r}"
    elif folder is not None and _is_reserved(PurePath(folder).parts[0]):
        yield f"export.folder: {folder} is reserved for other files of the run; choose another such as export"


def check_drift(evaluation: EvalConfig, data: DataConfig) -> Iterator[str]:
    """Report a divergence to measure with evaluations that there are none of."""
    if evaluation.kl == "on" and data.eval is None:
        yield "eval.kl: on is measured with evaluations, and there is no data.eval; set data.eval, or eval.kl=auto"


def check_best(checkpoint: CheckpointConfig, evaluation: EvalConfig) -> Iterator[str]:
    """Report a metric of several samples where evaluations draw one."""
    if checkpoint.best in ("pass_at_k", "maj_at_k") and evaluation.samples == 1:
        yield f"checkpoint.best: {checkpoint.best} needs several samples, but eval.samples is 1; raise eval.samples"


def check_lab(lab: LabConfig, credit: CreditSettings) -> Iterator[str]:
    """Report methods of ``oarjax credit`` that are invalid credit sections, or that read other answers."""
    if not lab.methods:
        yield "lab.methods: expected at least one method"
    for name, changes in lab.methods.items():
        try:
            answer = changed(credit, changes).answer
        except ValidationError as error:
            lines = "; ".join(" ".join(line.split()) for e in error.errors() for line in [explain(e, CreditSettings)])
            yield f"lab.methods.{name}: {lines}"
        else:
            if answer != credit.answer:
                yield f"lab.methods.{name}: all methods read the same answers; set credit.answer instead"


def _is_below(folder: str) -> bool:
    """Return True for a relative path to a proper subfolder."""
    path = PurePath(folder)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_reserved(name: str) -> bool:
    """Return True for the names of a run's other files; those that begin with a dot are files half written."""
    return name in (*RUN_FOLDERS, *RUN_FILES) or name.startswith(".") or fnmatchcase(name, "curve*.png")
