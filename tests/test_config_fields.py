"""Every field of the config is read: changed once, it changes a program, what a run does or writes, or gives an error.

``fields()`` must name every leaf of ``Config``; a new field without an entry here fails. An entry is a changed value,
what the rest of the config must be for the field to matter, and a view: a function of the config whose result must
differ. Views go through the same builders as the command; only device programs and graders are replaced by fakes
where a view looks at the host's side.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import re
import sys
import types
import zlib
from concurrent.futures import Future
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unsound
from conftest import CACHE, ROOT
from fake_lab import lab, lab_sampler
from rich.console import Console

import oarjax.run.grades
import oarjax.run.run
import oarjax.sources.engine
import oarjax.storage.checkpoint
import oarjax.training.command
import oarjax.training.start
import oarjax.training.trainer
import oarjax.training.warm_start
from oarjax.config.loading import parse_config
from oarjax.config.schema import Config
from oarjax.config.section import fields_of
from oarjax.credit.resolved import resolve_method
from oarjax.data.hf import stored_dtype
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.data.tasks.forks import write_forks_policy
from oarjax.data.tasks.stories import write_stories_policy
from oarjax.environments.pool import Environments
from oarjax.errors import UserError
from oarjax.grading.grader import Grader
from oarjax.grading.rewards import Sample
from oarjax.models.weights import abstract_params, init_params
from oarjax.report.console import OnceWarnings
from oarjax.rl.advantages import group_advantages, zero_variance_groups
from oarjax.rollout.source import Batch, SamplerSource
from oarjax.run.adapters import trained_shapes
from oarjax.run.custom import find_optimizer
from oarjax.run.layout import training_layout
from oarjax.run.outside import open_outside
from oarjax.run.run import Run, open_run
from oarjax.sources.engine import EngineError, EngineSource
from oarjax.sources.sync import Sync
from oarjax.step.gradients import Sums
from oarjax.step.programs import make_sft_optimizer, make_sft_steps
from oarjax.step.state import moving_reference
from oarjax.step.steps import Steps
from oarjax.storage.checkpoint import Checkpoints
from oarjax.storage.durable import StorageError
from oarjax.storage.stop import Stop
from oarjax.tools.lab import minibatch_gradients
from oarjax.tools.plan.command import topology_of
from oarjax.tools.plan.expected import survival_of
from oarjax.training.health import Health
from oarjax.types import (
    AnswerSpan,
    Credit,
    GradedRows,
    Grades,
    Hints,
    Mean,
    Privileged,
    PromptBatch,
    Rollout,
    SampledRows,
    Scores,
    TrainBatch,
    TrainState,
)

PLUGIN = ROOT / "tests" / "golden" / "config" / "field_rewards.py"
COMPLETIONS = str(ROOT / "tests" / "golden" / "config" / "completions.jsonl")
PROBE = ROOT / "tests" / "golden" / "config" / "field_probe.py"
EXAMPLES = ROOT / "docs" / "examples"
MARKS = str(EXAMPLES / "custom_marks.py") + ":labelled_steps"
OWN_LOSS = {"loss.function": f"{EXAMPLES / 'custom_loss.py'}:half_as_hard_on_failures"}
OWN_ADVANTAGE = {"advantage.function": f"{EXAMPLES / 'custom_advantages.py'}:best_of_group"}
WIDTH = 8  # prompt positions of the programs that are lowered

BASE: dict[str, Any] = {
    "run_dir": "run",  # below the test's own folder, as the current one
    "iterations": 2,
    "device": "cpu",
    "compilation_cache": str(CACHE),
    "policy": {"path": "policies/tiny", "remat": "none"},
    "data": {
        "template": "plain",
        "max_prompt": 24,
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 16, "arithmetic": {"terms": 2}},
        "eval": {"source": "builtin:arithmetic", "split": "eval", "limit": 3, "arithmetic": {"terms": 2}},
    },
    "sft": {
        "data": {"source": "builtin:arithmetic", "split": "sft", "limit": 16, "arithmetic": {"terms": 2}},
        "steps": 2,
        "batch": 4,
        "microbatch": 2,
        "max_length": 48,
        "optim": {"lr": 1e-3},  # a section that is given has other defaults than one that is not
    },
    "rollout": {"prompts": 4, "group_size": 2, "max_new": 10, "prompt_bucket": 8, "completion_bucket": 5},
    "grading": {"rewards": [{"name": "exact"}], "workers": 1},
    "credit": {"answer": {"style": "hash"}, "masking": {"buckets": 1}},
    "update": {"microbatch": 2},
    "eval": {"every": 0, "batch": 2},
    "checkpoint": {"every": 0},
    "report": {"completions": 1, "html": False},
}


# --- The fields, and how each one shows -----------------------------------------------------------------------------


class Field(NamedTuple):
    value: Any
    view: Any
    given: dict[str, Any] = {}  # noqa: RUF012
    error: str | None = None  # what the message says, where the changed value is one that cannot run here


SEEN_IN_TRAIN = Field(None, None)
"""One function reads the settings of a built-in task for every dataset: for the others a field of each task will do."""


def dataset(where: str) -> dict[str, Field]:
    """Fields of a dataset section, seen in what it encodes to."""
    sees, file, hub = partial(data, where=where), {f"{where}.source": "rows.jsonl"}, {f"{where}.source": "org/set"}
    forks = {f"{name}.source": "builtin:forks" for name in ("data.train", "data.eval", "sft.data")}
    stories = dict.fromkeys(forks, "builtin:stories") | {"data.max_prompt": 128, "sft.max_length": 512}
    forks["policy.path"], stories["policy.path"] = "policies/forks", "policies/stories"
    shown = {
        f"{where}.source": Field("rows.jsonl", sees),
        f"{where}.name": Field("other", sees, hub),
        f"{where}.split": Field("validation", sees, hub),
        f"{where}.revision": Field("abc", sees, hub),
        f"{where}.prompt_field": Field("second", sees, file),
        f"{where}.answer_field": Field("second", sees, file),
        f"{where}.columns": Field(["second"], sees, file),
        f"{where}.limit": Field(2, sees),
        f"{where}.arithmetic.terms": Field(3, sees),
        f"{where}.system_prompt": Field("1", sees),
        f"{where}.forks.kind": Field("chain", sees, forks),
        f"{where}.stories.highest": Field(30, sees, stories),
    }
    of_a_task = {
        f"{where}.arithmetic.highest": Field(30, sees),
        f"{where}.arithmetic.written": Field(0.0, sees, {f"{where}.split": "sft"}),
        f"{where}.arithmetic.seed": Field(1, sees),
        f"{where}.forks.forks": Field(3, sees, forks),
        f"{where}.forks.filler": Field(3, sees, forks | {f"{where}.split": "sft"}),
        f"{where}.forks.right": Field(1.0, sees, forks | {f"{where}.split": "sft"}),
        f"{where}.forks.uneven": Field(0.4, sees, forks | {f"{where}.split": "sft"}),
        f"{where}.forks.seed": Field(1, sees, forks),
        f"{where}.stories.right": Field(0.0, sees, stories | {f"{where}.split": "sft"}),
        f"{where}.stories.written": Field(0.0, sees, stories | {f"{where}.split": "sft"}),
        f"{where}.stories.seed": Field(1, sees, stories),
    }
    mixed, both = {"data.mixture.source": "rows.jsonl"}, {"grading.rewards": [{"name": "math"}, {"name": "exact"}]}
    if where == "sft.data":
        shown[f"{where}.rewards"] = Field(["math"], sees, error="sft.data.rewards: the warm start grades nothing")
    else:
        shown[f"{where}.rewards"] = Field(["math"], sees, both)
    shown[f"{where}.weight"] = Field(3.0, command, mixed)
    if where != "data.train":
        shown[f"{where}.weight"] = Field(3.0, sees, mixed, error=f"{where}.weight: has no effect outside a mixture")
    return shown | (of_a_task if where == "data.train" else dict.fromkeys(of_a_task, SEEN_IN_TRAIN))


def optimizer(where: str, sees: Any) -> dict[str, Field]:
    """Fields of an optimizer section, seen in the program that updates."""
    return {
        f"{where}.lr": Field(0.5, sees),
        f"{where}.schedule": Field("cosine", sees),
        f"{where}.warmup": Field(3, sees),
        f"{where}.b1": Field(0.5, sees),
        f"{where}.b2": Field(0.5, sees),
        f"{where}.weight_decay": Field(0.3, sees),
        f"{where}.clip_norm": Field(0.3, sees),
        f"{where}.moments": Field("bfloat16", sees),
        f"{where}.function": Field("optax.lion", sees),
        f"{where}.settings": Field({"b1": 0.5}, sees, {f"{where}.function": "optax:lion"}),
    }


def fields() -> dict[str, Field]:
    sample, evaluation, score = (partial(program, name=name) for name in ("sample", "evaluate", "score"))
    decode = partial(program, name="decode")
    credit, denominator, update, apply = (
        partial(program, name=name) for name in ("credit", "denominator", "update", "apply")
    )
    masking = {"credit.method": "oar_p"}
    signed = {"credit.method": "signed_values", "update.skip_zero_variance": False}
    signed |= {"credit.answer": {"style": "hash", "source": "reference"}}
    cispo, vespo, kl = {"loss.surrogate": "cispo"}, {"loss.surrogate": "vespo"}, {"loss.kl_beta": 0.1}
    plugin = {"grading.plugins": [str(PLUGIN)]}
    settable = plugin | {"grading.rewards": [{"name": "field_set"}]}
    waiting = plugin | {"grading.rewards": [{"name": "field_waiting"}]}
    tokens_credited = partial(lab, grader=FakeGrader)
    pod = {"distributed": {"coordinator": "10.0.0.2:8476", "processes": 2, "process": 0}}
    turns = {"credit.method": "turn_rewards", "credit.marks": MARKS}
    shear = {"credit.method": "shear", "credit.shear": {"window": 2, "stride": 2}}
    rlsd = {"credit.method": "rlsd", "credit.teacher": "{prompt}{answer}"}
    sdpg = rlsd | {"credit.method": "sdpg"}
    small_lab = {"lab": {"shortest": 3, "methods": {"OAR-P": {"method": "oar_p"}, "random": {"method": "random"}}}}
    engine = {"rollout.engine": {"url": "http://127.0.0.1:1"}, "iterations": 1}
    given_weights = engine | {"rollout.engine.weights": "weights"}
    return {
        "run_dir": Field("elsewhere", command),
        "seed": Field(5, command),
        "iterations": Field(3, command),
        "device": Field("tpu", command, error="device: expected tpu, but JAX finds cpu"),
        "compilation_cache": Field("cache", settings),
        "profile": Field([1, 2], command),
        "compile_ahead": Field("on", prompt_width, {"data.max_prompt": 300}),
        "policy.path": Field("policies/other", update),
        "policy.tokenizer": Field(
            "nowhere", data, {"policy.path": "builtin:random"}, error="tokenizer nowhere: no such folder"
        ),
        "policy.revision": Field("abc", data, {"policy.path": "org/none"}, error=r"org/none.*\(revision abc\)"),
        "policy.compute_dtype": Field("bfloat16", sample),
        "policy.remat": Field("full", update),
        "policy.attention": Field("splash", update),
        "policy.unroll": Field(2, update),
        "policy.head_chunk": Field(8, update),
        "policy.router": Field(
            "replay", data, error="policy.router: replay needs a policy with experts, .* set recompute"
        ),
        "mesh.slice": Field(7, data, error="mesh: .*'slice': 7.* does not multiply to the 1 devices"),
        "mesh.data": Field(7, data, error="mesh: .*'data': 7.* does not multiply to the 1 devices"),
        "mesh.expert": Field(7, data, error="mesh: .*'expert': 7.* does not multiply to the 1 devices"),
        "mesh.fsdp": Field(7, data, error="mesh: .*'fsdp': 7.* does not multiply to the 1 devices"),
        "mesh.tensor": Field(7, data, error="mesh: .*'tensor': 7.* does not multiply to the 1 devices"),
        "distributed.coordinator": Field("10.0.0.3:8476", joins, pod),
        "distributed.processes": Field(3, joins, pod),
        "distributed.process": Field(1, joins, pod),
        "distributed.timeout": Field(5, joins, pod),
        **dataset("data.train"),
        **dataset("data.eval"),
        **dataset("sft.data"),
        **{name.replace("train", "mixture"): SEEN_IN_TRAIN for name in dataset("data.train")},
        "data.mixture.source": Field("rows.jsonl", data),
        "data.mixture.weight": Field(3.0, command, {"data.mixture.source": "rows.jsonl"}),
        "data.difficulty.easy_above": Field(0.5, thinned),
        "data.difficulty.easy_share": Field(0.75, thinned, {"data.difficulty": {"easy_above": 0.5}}),
        "data.difficulty.hard_below": Field(0.5, thinned),
        "data.difficulty.hard_share": Field(0.75, thinned, {"data.difficulty": {"hard_below": 0.5}}),
        "data.template": Field("chat", data, error="no chat template; set data.template to plain"),
        "data.system_prompt": Field("1", data),
        "data.thinking": Field(False, data, error="data.thinking: needs data.template = chat"),
        "data.prompt_format": Field("({prompt})", data),
        "data.max_prompt": Field(5, data),
        "data.shuffle": Field(False, command),
        "sft.steps": Field(3, command),
        "sft.batch": Field(6, command),
        "sft.microbatch": Field(4, command),
        "sft.max_length": Field(12, partial(data, where="sft.data")),
        "sft.completion_bucket": Field(2, command),
        **optimizer("sft.optim", sft_program),
        "rollout.prompts": Field(6, command),
        "rollout.group_size": Field(4, command),
        "rollout.max_new": Field(12, sample),
        "rollout.temperature": Field(0.7, sample),
        "rollout.top_k": Field(3, sample),
        "rollout.top_p": Field(0.5, sample),
        "rollout.min_p": Field(0.2, sample),
        "rollout.repetition_penalty": Field(1.2, sample),
        "rollout.stop": Field(["7"], sample),
        "rollout.tensor": Field(7, data, error="rollout.tensor: 7 does not divide the 1 devices"),
        "rollout.devices": Field(
            1,
            data,
            {"update.lag": 1, "checkpoint.every": 1},
            error="rollout.devices: 1, and there are 1 devices, of which one at least has to learn",
        ),
        "rollout.attention": Field("kernel", decode),
        "rollout.cache": Field("int8", decode, {"loss.off_policy.weighting": "token_truncate"}),
        "rollout.prompt_bucket": Field(12, command),
        "rollout.completion_bucket": Field(2, command),
        "rollout.from": Field(["nowhere.jsonl"], command, error="rollout.from: expected a .jsonl or .parquet file"),
        "rollout.engine.url": Field("http://other:1", asked, engine),
        "rollout.engine.model": Field("policy", asked, engine),
        "rollout.engine.deadline": Field(3.0, asked, engine),
        "rollout.engine.retries": Field(0, asked, engine),
        "rollout.engine.concurrency": Field(2, asked, engine),
        "rollout.engine.weights": Field("elsewhere", synced, given_weights),
        "rollout.engine.dtype": Field("float32", synced, given_weights),
        "rollout.engine.drill": Field(2, synced, given_weights),
        "rollout.environment.name": Field("builtin:calculator", plays, PLAYED),
        "rollout.environment.settings": Field({"highest": 7}, plays, PLAYED),
        "rollout.environment.turns": Field(3, plays, PLAYED),
        "rollout.environment.deadline": Field(2.0, plays, PLAYED),
        "rollout.environment.thinking": Field(
            "keep", plays, PLAYED, error="rollout.environment.thinking: keep needs data.template = chat"
        ),
        "rollout.segment": Field(4, decode),
        "rollout.cache_bucket": Field(4, decode),
        "rollout.slots": Field(4, decode),
        "grading.rewards.name": Field("format", grading),
        "grading.rewards.weight": Field(2.0, grading),
        "grading.rewards.settings": Field({"value": 2.0}, grading, settable),
        "grading.call_deadline": Field(0.1, grading, waiting),
        "grading.concurrency": Field(2, grading, waiting),
        "grading.plugins": Field([str(PLUGIN)], grading, {"grading.rewards": [{"name": "field_pid"}]}),
        "grading.workers": Field(2, grading, {"grading.rewards": [{"name": "field_pid"}], **plugin}),
        "grading.deadline": Field(0.2, grading, {"grading.rewards": [{"name": "field_slow"}], **plugin}),
        "grading.memory_mb": Field(300, grading, {"grading.rewards": [{"name": "field_large"}], **plugin}),
        "grading.overlong_window": Field(4, command),
        "grading.overlong_penalty": Field(0.5, command, {"grading.overlong_window": 4}),
        "advantage.leave_one_out": Field(
            True, partial(program, name="advantages"), {"advantage.method": "batch", "advantage.scale": "none"}
        ),
        "advantage.discount": Field(0.5, remembered, {"advantage.method": "problem", "advantage.scale": "none"}),
        "advantage.method": Field("rloo", partial(program, name="advantages"), {"advantage.scale": "none"}),
        "advantage.settings": Field({"top": 2.0}, partial(program, name="advantages"), OWN_ADVANTAGE),
        "advantage.function": Field(OWN_ADVANTAGE["advantage.function"], partial(program, name="advantages")),
        "advantage.soft": Field(
            "reward", score, {name: value for name, value in signed.items() if name != "credit.method"}
        ),
        "advantage.scale": Field("none", partial(program, name="advantages")),
        "advantage.ddof": Field(0, partial(program, name="advantages")),
        "advantage.eps": Field(0.5, partial(program, name="advantages")),
        "credit.method": Field("oar_p", score),
        "credit.function": Field(
            f"{EXAMPLES / 'custom_credit.py'}:later",
            score,
            {"credit.method": "custom", "credit.function": f"{EXAMPLES / 'custom_credit.py'}:surprising"},
        ),
        "credit.permuted_of": Field("oar_p", score, {"credit.method": "permuted"}),
        "credit.polarity": Field("wrong", credit),
        "credit.estimator": Field("noisy", score),
        "credit.sigma": Field(0.5, score, {"credit.estimator": "noisy"}),
        "credit.draws": Field(2, score),
        "credit.masking.counterfactual": Field("deleted", score, masking),
        "credit.masking.mask_id": Field(7, score, masking),
        "credit.masking.unit": Field("sentence", spans, {"credit.method": "oar_p"}),
        "credit.masking.chunk": Field(2, score, masking),
        "credit.masking.buckets": Field(2, score, masking),
        "credit.fisher.outcomes": Field(2, score, {"credit.method": "oar_f"}),
        "credit.fisher.sampled": Field(1, score, {"credit.method": "oar_f"}),
        "credit.local.window": Field(1, score, {"credit.method": "oar_l"}),
        "credit.local.answers": Field(1, score, {"credit.method": "oar_l"}),
        "credit.screen.share": Field(0.5, score, {"credit.method": "oar_screened"}),
        "credit.screen.by": Field("oar_f", score, {"credit.method": "oar_screened"}),
        "credit.signed_values.by": Field("random", score, signed),
        "credit.signed_values.places": Field(1, score, signed),
        "credit.signed_values.candidates": Field(2, score, signed),
        "credit.signed_values.share": Field(0.5, credit, signed),
        "credit.entropy.share": Field(0.5, credit, {"credit.method": "entropy_top"}),
        "credit.entropy.scope": Field("sequence", credit, {"credit.method": "entropy_top"}),
        "credit.entropy.mass": Field("free", credit, {"credit.method": "entropy_top"}),
        "credit.keywords.words": Field(["+", "7"], credit, {"credit.method": "keywords"}),
        "credit.keywords.boost": Field(1.0, credit, {"credit.method": "keywords"}),
        "credit.grail.mean": Field(0.9, credit, {"credit.method": "grail"}),
        "credit.grail.spread": Field(0.4, credit, {"credit.method": "grail"}),
        "credit.grail.low": Field(0.2, credit, {"credit.method": "grail"}),
        "credit.grail.high": Field(3.0, credit, {"credit.method": "grail"}),
        "credit.probe.mode": Field("last", command),
        "credit.probe.warmup_mode": Field("answer_joint", command, {"credit.probe.warmup_iterations": 1}),
        "credit.probe.warmup_iterations": Field(1, command),
        "credit.probe.function": Field(f"{PROBE}:last_state", score),
        "credit.gate.rule": Field("level", credit),
        "credit.gate.levels": Field("boost", credit),
        "credit.gate.tau": Field(0.2, credit),
        "credit.gate.boost": Field(0.5, credit),
        "credit.gate.floor": Field(0.3, credit),
        "credit.gate.mass": Field("free", credit),
        "credit.ktae.fisher": Field(0.5, credit, {"credit.method": "ktae"}),
        "credit.ktae.gain": Field(0.5, credit, {"credit.method": "ktae"}),
        "credit.ktae.scale": Field(0.5, credit, {"credit.method": "ktae"}),
        "credit.dgpo.tau": Field(0.9, credit, {"credit.method": "dgpo"}),
        "credit.dgpo.kappa": Field(2.0, credit, {"credit.method": "dgpo"}),
        "credit.causal_spans.spans": Field(2, spans, {"credit.method": "causal_spans"}),
        "credit.causal_spans.boost": Field(3.0, credit, {"credit.method": "causal_spans"}),
        "credit.causal_spans.floor": Field(0.2, credit, {"credit.method": "causal_spans"}),
        "credit.causal_spans.answer": Field(1.0, credit, {"credit.method": "causal_spans"}),
        "credit.fipo.gamma": Field(0.5, update, {"credit.method": "fipo", "update.epochs": 2}),
        "credit.fipo.clip": Field(0.5, update, {"credit.method": "fipo", "update.epochs": 2}),
        "credit.fipo.levels": Field("both", update, {"credit.method": "fipo", "update.epochs": 2}),
        "credit.fipo.drop": Field(0.5, update, {"credit.method": "fipo", "update.epochs": 2}),
        "credit.fipo.cap": Field(0.5, update, {"credit.method": "fipo", "update.epochs": 2}),
        "credit.critic_search.share": Field(0.5, credit, {"credit.method": "critic_search", "credit.marks": MARKS}),
        "credit.turn_rewards.values": Field("differences", credit, turns),
        "credit.turn_rewards.discount": Field(0.5, credit, turns),
        "credit.turn_rewards.weight": Field(2.0, credit, turns),
        "credit.turn_oar.by": Field("oar_l", score, {**turns, "credit.method": "turn_oar"}),
        "credit.turn_oar.share": Field("rewards", credit, {**turns, "credit.method": "turn_oar"}),
        "credit.shear.window": Field(3, credit, shear),
        "credit.shear.stride": Field(1, credit, shear),
        "credit.shear.epsilon": Field(0.5, credit, shear),
        "credit.shear.iterations": Field(9, credit, shear),
        "credit.rlsd.strength": Field(0.9, credit, rlsd),
        "credit.rlsd.iterations": Field(9, credit, rlsd),
        "credit.rlsd.clip": Field(0.5, credit, rlsd),
        "credit.sdpg.beta": Field(0.5, update, sdpg),
        "credit.sdpg.rows": Field("correct", update, sdpg),
        "credit.marks": Field(MARKS, hints, {"credit.method": "egca"}),
        "credit.teacher": Field("{prompt}={answer}", hints, rlsd),
        "credit.delta.low": Field(0.5, credit, {"credit.method": "delta"}),
        "credit.delta.high": Field(1.5, credit, {"credit.method": "delta"}),
        "credit.delta.rounds": Field(0, credit, {"credit.method": "delta"}),
        "credit.answer.style": Field("boxed", spans),
        "credit.answer.source": Field("reference", probes),
        "credit.answer.cue": Field("=", probes, {"credit.answer": {"style": "hash", "source": "reference"}}),
        "credit.answer.pattern": Field("[0-9]", spans, {"credit.answer": {"style": "regex", "pattern": "[+]"}}),
        "lab.problems": Field(2, tokens_credited, small_lab),
        "lab.samples": Field(2, tokens_credited, small_lab),
        "lab.shortest": Field(4, tokens_credited, small_lab),
        "lab.temperature": Field(0.0, lab_sampler),
        "lab.methods": Field({"mine": {"method": "oar_l"}}, tokens_credited, small_lab),
        "lab.share": Field(0.5, tokens_credited, small_lab),
        "lab.batch": Field(2, tokens_credited, small_lab),
        "lab.branches": Field(2, tokens_credited, small_lab),
        "lab.answer_tokens": Field(3, tokens_credited, small_lab),
        "lab.continuations": Field(2, tokens_credited, small_lab),
        "lab.bootstrap": Field(50, tokens_credited, small_lab),
        "lab.shown": Field(1, tokens_credited, small_lab),
        "lab.gradients.minibatches": Field(4, gradients),
        "lab.gradients.prompts": Field(6, gradients),
        "lab.gradients.sketch": Field(99, gradients),
        "loss.function": Field(OWN_LOSS["loss.function"], update),
        "loss.settings": Field({"share": 0.2}, update, OWN_LOSS),
        "loss.surrogate": Field("cispo", update),
        "loss.level": Field("sequence", update, {"update.epochs": 2}),
        "loss.aggregation": Field("grpo", denominator),
        "loss.clip_low": Field(0.1, update),
        "loss.clip_high": Field(0.1, update),
        "loss.dual_clip": Field(3.0, update, {"update.epochs": 2}),
        "loss.ratio_cap": Field(2.0, update, cispo),
        "loss.kl_beta": Field(0.1, score),
        "loss.reference": Field("host", references, kl),
        "loss.kl_estimator": Field("k2", update, kl),
        "loss.kl_in": Field("reward", command, kl | {"update.skip_zero_variance": False}),
        "loss.teacher": Field("policies/other", references, kl),
        "loss.sapo_positive": Field(2.0, update, {"loss.surrogate": "sapo"}),
        "loss.sapo_negative": Field(2.0, update, {"loss.surrogate": "sapo"}),
        "loss.vespo_k_positive": Field(1.0, update, vespo),
        "loss.vespo_lambda_positive": Field(1.0, update, vespo),
        "loss.vespo_k_negative": Field(1.0, update, vespo),
        "loss.vespo_lambda_negative": Field(1.0, update, vespo),
        "loss.kl_corrected": Field(True, update, kl),
        "loss.reference_every": Field(1, references, kl),
        "loss.entropy_bonus": Field(0.1, update),
        "loss.entropy_target": Field(0.5, apply),
        "loss.entropy_step": Field(0.1, apply, {"loss.entropy_target": 0.5}),
        "loss.entropy_highest": Field(0.1, apply, {"loss.entropy_target": 0.5}),
        "loss.router_balance": Field(0.1, data, error="loss.router_balance: 0.1 needs a policy with experts"),
        "loss.off_policy.weighting": Field("sequence_mask", update),
        "loss.off_policy.low": Field(0.5, update, {"loss.off_policy": {"weighting": "token_truncate"}}),
        "loss.off_policy.high": Field(3.0, update, {"loss.off_policy": {"weighting": "token_truncate"}}),
        "loss.off_policy.support": Field("sampled", update, {"rollout.top_k": 3}),
        "loss.off_policy.max_drift": Field(0.1, update),
        "loss.mask_truncated": Field(True, command),
        "update.epochs": Field(2, command),
        "update.minibatches": Field(2, command),
        "update.microbatch": Field(4, command),
        "update.prompt_rows": Field(1, lambda cfg: build(cfg).steps.prompt_rows),
        "update.skip_zero_variance": Field(False, command),
        "update.refills": Field(1, command),
        "update.lag": Field(1, command, {"checkpoint.every": 1, "loss.off_policy.weighting": "token_truncate"}),
        "update.fused": Field("never", lambda cfg: build(cfg).steps.fused_add is None),
        **optimizer("optim", apply),
        "lora.rank": Field(2, update),
        "lora.alpha": Field(4.0, update, {"lora.rank": 2}),
        "lora.targets": Field(["q", "v"], update, {"lora.rank": 2}),
        "lora.start": Field(
            "nowhere", data, {"lora.rank": 2}, error="lora.start: .*adapter_config.json: cannot be read"
        ),
        "eval.every": Field(1, command),
        "eval.samples": Field(2, command),
        "eval.temperature": Field(0.0, evaluation),
        "eval.top_k": Field(3, evaluation),
        "eval.top_p": Field(0.5, evaluation),
        "eval.min_p": Field(0.2, evaluation),
        "eval.repetition_penalty": Field(1.2, evaluation),
        "eval.batch": Field(4, command),
        "eval.kl": Field("on", command),
        "checkpoint.every": Field(1, command),
        "checkpoint.keep": Field(1, command, {"checkpoint.every": 1}),
        "checkpoint.best": Field(None, command, {"checkpoint.every": 2, "eval.every": 1, "iterations": 4}),
        "checkpoint.rollouts": Field("all", command, {"checkpoint.every": 1, "checkpoint.keep": 1}),
        "checkpoint.on_failure": Field("warn", unwritable, {"checkpoint.every": 1}),
        "checkpoint.warm_start": Field(1, warm_start_saves),
        "health.stop_after": Field(2, unhealthy),
        "health.bad_batches": Field(1, unhealthy),
        "health.params_mb": Field(0, unhealthy),
        "plan.lengths.mean": Field(90.0, expected_lengths, {"plan.lengths.mean": 40.0}),
        "plan.lengths.sigma": Field(0.3, expected_lengths, {"plan.lengths.mean": 40.0}),
        "plan.lengths.completions": Field(COMPLETIONS, expected_lengths),
        "plan.topology": Field("v5e-16", planned_for, {"plan.topology": "v5e-8"}),
        "report.to": Field(["jsonl", "tensorboard"], command),
        "report.project": Field("other", tracked, {"report.to": ["jsonl", "wandb"]}),
        "report.name": Field("other", tracked, {"report.to": ["jsonl", "wandb"]}),
        "report.memory": Field("on", memory_tables),
        "report.completions": Field(2, command),
        "report.groups": Field(1, command),
        "report.html": Field(True, command),
        "export.folder": Field("trained", command),
        "export.dtype": Field("bfloat16", command),
    }


def leaves(section: type, prefix: str = "") -> list[str]:
    """Dotted paths of all fields that are not sections; lists of sections count as one."""
    found = []
    for name, annotation in fields_of(section).items():
        inner = [t for t in parts(annotation) if fields_of(t)]
        found += leaves(inner[0], f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found


def parts(annotation: Any) -> list[Any]:
    """A type and everything it is made of."""
    return [annotation, *(p for inner in getattr(annotation, "__args__", ()) for p in parts(inner))]


# --- Views: what a config does, as something that can be compared ----------------------------------------------------


def expected_lengths(cfg: Config) -> list[float] | None:
    survival = survival_of(cfg.plan.lengths, limit=cfg.rollout.max_new)
    return None if survival is None else survival.tolist()


def planned_for(cfg: Config) -> str:
    return topology_of(cfg.plan.topology).name


def build(cfg: Config) -> Run:
    return open_run(cfg, Console(file=io.StringIO()))


def spec(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def program(cfg: Config, *, name: str) -> str:
    """The text of a device program, as lowered for the config's shapes."""
    run = build(cfg)
    steps = run.steps
    params = abstract_params(run.model, dtype=jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows, T = cfg.rollout.prompts * cfg.rollout.group_size, cfg.rollout.max_new
    b = cfg.update.microbatch
    M = rows // cfg.update.minibatches // b
    tokens, valid, mask, values = (
        spec((M, b, WIDTH + T), jnp.int32),
        spec((M, b, WIDTH + T), jnp.bool_),
        spec((M, b, T), jnp.bool_),
        spec((M, b, T)),
    )
    span = AnswerSpan(mask, mask, spec((M, b), jnp.bool_))
    count = spec((), jnp.int32)
    if name in ("sample", "evaluate", "decode"):
        prompts = cfg.rollout.prompts
        batch = PromptBatch(
            spec((prompts, WIDTH), jnp.int32), spec((prompts, WIDTH), jnp.bool_), spec((prompts,), jnp.int32)
        )
        if name == "decode":
            found = steps.sample.programs(params, batch, key)
            return "\n".join([*(p.name for p in found), found[1].lower().as_text()])
        return jax.jit(getattr(steps, name).whole).lower(params, batch, key).as_text()
    rollout = Rollout(tokens, valid, mask, values, values, spec((M, b), jnp.bool_))
    if name == "score":
        probed = (rollout, span.replace(outcome=mask)) if run.wants_outcome else None
        rows = SampledRows(rollout, span, spec((M, b), jnp.int32), probed)
        return steps.score.lower(params, params, rows, key, count, count, probe="last").as_text()
    if name == "credit":
        found = {n: spec((M, b, T, 4)) if n == "hidden" else values for n in resolve_method(cfg.credit).measures}
        scores, hints = Scores(values, values, values, found or None), Hints(values, spec((M, b, T), jnp.int32))
        sampled = SampledRows(rollout, span, spec((M, b), jnp.int32), None, hints)
        return steps.credit.lower(scores, sampled, GradedRows(spec((M, b)), mask), key, count).as_text()
    if name == "advantages":
        return steps.advantages.lower(spec((rows,)), {"exact": spec((rows,))}).as_text()
    if name == "denominator":
        return steps.denominator.lower(spec((rows, T), jnp.bool_)).as_text()
    trained, frozen = trained_shapes(cfg.lora, run.model), params if cfg.lora.rank else None
    state = jax.eval_shape(
        lambda p, f: TrainState(jnp.zeros((), jnp.int32), p, run.optimizer.init(p), jax.random.key(0), f),
        trained,
        frozen,
    )
    if name == "apply":
        once = Mean(spec(()), spec(()))  # type: ignore[arg-type]
        return steps.apply.lower(state, Sums(trained, once, {"entropy": once}), spec(())).as_text()
    old = values if cfg.update.epochs * cfg.update.minibatches > 1 else None
    ref = values if cfg.loss.kl_beta > 0 else None
    teacher = Privileged(tokens, valid) if cfg.credit.method == "sdpg" else None
    batch = TrainBatch(tokens, valid, mask, values, old, ref, values, teacher)
    sums = jax.eval_shape(steps.zeros, state, batch)
    return steps.accumulate.lower(sums, state, batch, count, count).as_text()


def sft_program(cfg: Config) -> str:
    """The text of the warm start's update; that of the gradient before it has nothing of its optimizer."""
    assert cfg.sft is not None
    run = build(cfg)
    tx, _ = make_sft_optimizer(cfg.sft, function=find_optimizer(cfg.sft.optim))
    steps = make_sft_steps(
        run.policy, tx, training_layout(cfg.lora, run.model, run.mesh, tx), head_chunk=cfg.policy.head_chunk
    )
    params, once = abstract_params(run.model, dtype=jnp.float32), Mean(spec(()), spec(()))  # type: ignore[arg-type]
    state = jax.eval_shape(lambda p: TrainState(jnp.zeros((), jnp.int32), p, tx.init(p), jax.random.key(0)), params)
    return steps.apply.lower(state, Sums(params, once, {}), None).as_text()


def data(cfg: Config, *, where: str = "data.train") -> Any:
    """The ids and answers that a dataset section comes to."""
    run = build(cfg)
    encoded = {"data.train": run.train, "data.eval": run.held_out, "sft.data": run.pairs}[where]
    return (
        encoded.prompts,
        encoded.completions,
        [(p.answer, p.columns, p.rewards) for p in encoded.problems],
        encoded.dropped,
    )


def gradients(cfg: Config) -> Any:
    """The minibatches that the lab draws for its gradients, and how many numbers of a gradient it keeps."""
    log: list[Any] = []

    class EnoughSeen(Exception):
        pass

    class Idle:
        def submit(self, samples: Any) -> Any:
            raise AssertionError("nothing is drawn that could be graded")

    def draw(state: Any, number: int, *, steps: Any, host: Any, rollout: Any, refills: int) -> Any:
        log.append((number, rollout.prompts))
        problems, rows = np.zeros(rollout.prompts, np.int32), rollout.prompts * rollout.group_size
        made, zeros = np.ones((rows, 10), bool), np.zeros((rows, 10), np.float32)
        completions = Rollout(np.zeros((rows, 18), np.int32), np.ones((rows, 18), bool), made, zeros, zeros, made[:, 0])
        rewards = (np.arange(rows) % 2).astype(np.float32)
        return (
            problems,
            completions,
            lambda: types.SimpleNamespace(rewards=rewards, per_reward={}),
            None,
        )

    def gradient_program(steps: Any, *, by_piece: bool, size: int) -> Any:
        log.append(size)
        raise EnoughSeen

    run = build(cfg)
    params = init_params(run.model, jax.random.key(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minibatch_gradients, "draw", draw)
        patch.setattr(minibatch_gradients, "gradient_program", gradient_program)
        with pytest.raises(EnoughSeen):
            minibatch_gradients.measure_gradients(run, params, Idle())
    return log


def completed(run: Run) -> Rollout:
    """A completion with several places where an answer may stand."""
    ids = run.tokenizer("1+2=3;3+0=3;#### 3", add_special_tokens=False)["input_ids"]
    tokens = np.asarray([[0, *ids]], np.int32)
    mask = np.ones((1, len(ids)), bool)
    zeros = np.zeros(mask.shape, np.float32)
    return Rollout(tokens, np.ones(tokens.shape, bool), mask, zeros, zeros, np.ones(1, bool))


def spans(cfg: Config) -> Any:
    """Where an answer is found in a completion that has several."""
    run = build(cfg)
    found = run.find_answers(completed(run))
    return [None if x is None else np.asarray(x).tolist() for x in vars(found).values()]


def probes(cfg: Config) -> Any:
    """What importance is measured on."""
    run = build(cfg)
    rollout = completed(run)
    if cfg.credit.answer.source == "own":
        return rollout.tokens.tolist()
    problems = np.array([min(run.train.by_index)])
    return run.probed(rollout, run.find_answers(rollout), problems)[0].tokens.tolist()


def hints(cfg: Config) -> Any:
    """What a credit method reads beside the rollouts."""
    run = build(cfg)
    made = run.hints
    assert made is not None
    return jax.tree.map(np.ndarray.tolist, made(completed(run), np.array([min(run.train.by_index)])))


def joins(cfg: Config) -> Any:
    """How this process looks for the others."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", lambda **told: asked.append(told))
        build(cfg)
    return asked


def unhealthy(cfg: Config) -> Any:
    """A run whose every update is skipped, with 1 MiB of params: when it stops, and what it leaves."""
    run, folder = build(cfg), Path(cfg.run_dir)
    health = Health(run, folder, OnceWarnings(Console(file=io.StringIO())))
    for iteration in range(1, 10):
        health(unsound.phase_record(iteration, loss=1.0, params={"w": jnp.ones(2**18)}))
        if health.after(iteration):
            break
    return iteration, sorted(path.name for path in folder.glob("bad_batches/*"))


def prompt_width(cfg: Config) -> Any:
    """The width of the first prompts."""
    return next(build(cfg).prompts())[0].tokens.shape[1]


def asked(cfg: Config) -> Any:
    """What an engine that cannot be reached is asked, how often, for how long and by how many at once."""
    sent: list[Any] = []
    running = [0, 0]

    async def post(address: Any, body: bytes, headers: Any, *, timeout: float, most: int, threads: Any) -> Any:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.01)
        running[0] -= 1
        sent.append((address.netloc, json.loads(body), timeout))
        raise OSError("nobody there")

    run = build(cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.sources.engine, "post", post)
        patch.setattr(oarjax.sources.engine, "PAUSE", 0.0)
        source = open_outside(run).engine
        assert source is not None
        batch = Batch(next(run.prompts())[0], jax.random.key(0), 1, 0, cfg.rollout.group_size, cfg.rollout.max_new)
        with pytest.raises(EngineError):
            source.draw(batch)
    rows = {body["request_id"] for _, body, _ in sent}
    first = [body for _, body, _ in sent if body["request_id"] == "1-0-0-0"]
    return {place for place, *_ in sent}, first, {timeout for *_, timeout in sent}, running[1], len(rows) > 0


def synced(cfg: Config) -> Any:
    """Where the weights of three syncs and their drills are written for an engine, and in which dtype."""
    places: list[Path] = []

    def call(self: EngineSource, calls: dict[str, Any]) -> None:
        places.append(Path(calls["/collective_rpc"]["kwargs"]["weights_path"]))

    run = build(cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineSource, "_all_of", call)
        patch.setattr(Sync, "_check", lambda *_, **__: np.zeros(1))
        source = open_outside(run).engine
        assert source is not None
        assert source._sync is not None
        for _ in range(3):
            source._sync.push(run.load())
    return [(str(place.relative_to(Path.cwd())), str(stored_dtype(place))) for place in places]


def settings(cfg: Config) -> Any:
    build(cfg)
    return jax.config.jax_compilation_cache_dir


def grading(cfg: Config) -> Any:
    """What real workers make of four completions. Process ids count as how many there are."""
    run = build(cfg)
    samples = [Sample(prompt="1+1=", completion=f"#### {n}", answer="2") for n in range(4)]
    with run.grader() as grader:
        grades = grader.grade(samples)
    if "field_pid" in grades.per_reward:
        return len(set(grades.rewards.tolist()))
    return grades.rewards.tolist(), grades.verdicts


PLAYED = {"rollout.environment": {"name": "builtin:guess"}}
"""Changes for fields of environments."""


def plays(cfg: Config) -> Any:
    """How a run's environment is started, how many turns it answers, and how its words are written."""
    started: list[Any] = []

    class Remembered(Environments):
        def __init__(self, *args: Any, **named: Any) -> None:
            started.append((args, named))

        def __enter__(self) -> Remembered:
            return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.run.grades, "Environments", Remembered)
        run = build(cfg)
        nothing: Any = lambda *_: None  # noqa: E731
        source: Any = run.episodes(SamplerSource(*[nothing] * 5), run.train)
    return started, source._most, source._reply("1")


def command(cfg: Config, *, shown: io.StringIO | None = None, extend: bool = False) -> Any:
    """A whole run with fake device programs and a fake grader: what they were asked, and what was written."""
    log: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.run.grades, "Grader", FakeGrader)
        patch.setattr(oarjax.run.run, "make_steps", partial(fake_steps, log))
        patch.setattr(oarjax.training.warm_start, "make_sft_steps", partial(fake_sft_steps, log))
        patch.setattr(oarjax.training.start, "peak_flops", lambda dtype: (1e9, "fake"))
        patch.setattr(jax.profiler, "start_trace", lambda folder: log.append("trace"))
        patch.setattr(jax.profiler, "stop_trace", lambda: log.append("end of trace"))
        console = Console(file=shown or io.StringIO(), width=200)
        oarjax.training.command.train_once(cfg, console, Stop(), extend=extend)
    folder = Path(cfg.run_dir)
    written = {str(p): p.stat().st_size for p in sorted(folder.rglob("*")) if p.suffix == ".safetensors"}
    checkpoints = sorted(p.name for p in folder.glob("checkpoints/*"))
    inside = [p for p in folder.rglob("*") if p.is_file() and "events" not in p.name and "checkpoints" not in p.parts]
    files = sorted(map(str, inside))
    events = any("events" in p.name for p in folder.rglob("*"))
    completions = (folder / "completions.jsonl").read_text()
    return log, written, files, checkpoints, events, logged(folder / "metrics.jsonl"), completions


def remembered(cfg: Config) -> Any:
    """Two iterations of rewards 0 and 1 of one problem, as the trainer remembers them."""
    history = oarjax.training.trainer.history_of(cfg.advantage)
    for reward in (0.0, 1.0):
        history.add(np.zeros(1, np.int32), np.array([reward]))
    return history.state()


def thinned(cfg: Config) -> float | None:
    """The share of its turns in which a problem of mean reward 1/2 is drawn."""
    history, pools = oarjax.training.trainer.history_of(cfg.advantage), cfg.data.difficulty
    history.add(np.zeros(1, np.int32), np.array([0.0, 1.0]))
    return None if pools is None else oarjax.training.trainer.drawn_shares(history, pools)(0)


def references(cfg: Config) -> Any:
    """Where the reference policy lies when an iteration begins, and whether the optimizer's state holds it."""
    kinds: list[Any] = []
    iterate = oarjax.training.trainer.iterate

    def looked(state: Any, reference: Any, *args: Any, **named: Any) -> Any:
        kinds.append({x.sharding.memory_kind for x in jax.tree.leaves(reference)})
        kinds.append((moving_reference(state) is None, shapes(reference)))
        return iterate(state, reference, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.training.trainer, "iterate", looked)
        command(cfg)
    return kinds


def memory_tables(cfg: Config) -> Any:
    """The programs whose memory a run reports before its first update."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.training.start, "report_memory", lambda run, *_: asked.append(run.cfg.rollout.max_new))
        command(cfg)
    return asked


def tracked(cfg: Config) -> Any:
    """What a tracker is told about a run."""
    told: list[Any] = []
    module: Any = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Settings, module.Table = dict, dict

    def init(**options: Any) -> Any:
        told.append({name: options[name] for name in ("project", "name", "mode")})
        return types.SimpleNamespace(
            define_metric=lambda *_, **__: None, log=lambda record: None, finish=lambda: None, dir="wandb/run/files"
        )

    module.init = init
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", module)
        command(cfg)
    return told


def unwritable(cfg: Config) -> Any:
    """What a run does whose first checkpoint cannot be written; an error that is due here is no error of the field."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.storage.checkpoint, "write_manifest", full)
        try:
            return command(cfg)
        except StorageError as error:
            return f"stopped: {'cannot write' in str(error)}"


def warm_start_saves(cfg: Config) -> Any:
    """The steps after which a warm start is saved."""
    saved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda self, number, *_, **__: saved.append(number))
        command(cfg)
    return saved


def logged(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics without what a clock says."""
    clocks = ("seconds/", "time", "tokens_per_second", "mfu")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(clocks)} for line in lines]


def shapes(tree: Any) -> list[Any]:
    return [x.shape for x in jax.tree.leaves(tree)]


equal_groups = jax.jit(zero_variance_groups, static_argnames="group_size")
plain_advantages = jax.jit(group_advantages, static_argnames="group_size")


def fake_steps(log: list[Any], policy: Any, tx: Any, layout: Any, cfg: Config, **_: Any) -> Steps:
    """Device programs that write down what they are given. Completions grow with the row; a few are cut."""

    def roll(name: str, group: int, params: Any, prompts: PromptBatch, key: Any, **_: Any) -> Rollout:
        kind = str(params["embed"]["embedding"].dtype)
        log.append((name, kind, np.asarray(prompts.tokens).tolist(), jax.random.key_data(key).tolist()))
        rows, T = len(prompts.problem) * group, cfg.rollout.max_new
        draw = np.random.default_rng(rows)
        mask = np.arange(T) < (1 + np.arange(rows) % T)[:, None]
        text = np.where(mask, draw.integers(4, 14, (rows, T)), 0)
        tokens, valid = (np.repeat(np.asarray(x), group, axis=0) for x in (prompts.tokens, prompts.valid))
        zeros = np.zeros((rows, T), np.float32)
        return Rollout(
            np.concatenate([tokens, text], 1).astype(np.int32),
            np.concatenate([valid, mask], 1),
            mask,
            zeros,
            zeros,
            np.arange(rows) % 3 != 0,
        )

    def score(params, ref, rows, key, start, stop, *, probe, bucket):
        rollout = rows.rollout
        log.append(("score", shapes(rollout), int(start), int(stop), bucket, probe))
        ref_logps = np.zeros(rollout.completion.shape, np.float32) if cfg.loss.kl_in == "reward" else None
        return Scores(ref_logps=ref_logps)

    def credit(scores, rows, graded, key, iteration):
        advantages, completion = graded.advantages, graded.completion
        log.append(("credit", np.asarray(advantages).tolist(), np.asarray(completion).sum().item()))
        return Credit(completion * 0.0, completion * 1.0, completion * 1.0), {}

    def accumulate(sums, state, batch, start, stop, *, bucket):
        log.append(("update", shapes(batch), int(start), int(stop), bucket))
        return sums

    return Steps(
        rollout_params=lambda params: params,
        sample=partial(roll, "sample", cfg.rollout.group_size),
        evaluate=partial(roll, "evaluate", cfg.eval.samples),
        equal_groups=lambda rewards, past: equal_groups(rewards, group_size=cfg.rollout.group_size),
        advantages=lambda rewards, values, past: plain_advantages(rewards, group_size=cfg.rollout.group_size),
        after_kl=lambda rewards, rollout, ref: log.append(("after KL", np.asarray(ref).shape)) or rewards,
        score=score,
        credit=credit,
        denominator=lambda completion: jnp.asarray(completion.sum(), jnp.float32),
        zeros=lambda state, batch: Sums(state.params, Mean(jnp.zeros(()), jnp.zeros(())), {}),
        accumulate=accumulate,
        apply=lambda state, sums, denominator: (state.replace(step=state.step + 1), {}),
        drift=lambda start, rows: np.ones(len(rows.ended)),
    )


def fake_sft_steps(log: list[Any], policy: Any, tx: Any, layout: Any, *, head_chunk: int) -> Any:
    def update(state, batch, pieces, denominator):
        log.append(("sft", shapes(batch), pieces, np.asarray(batch.tokens).tolist()))
        return state, {"loss": Mean(jnp.ones(()), jnp.ones(()))}

    return types.SimpleNamespace(update=update)


class FakeGrader(Grader):
    """Rewards by length, at once: equal in some groups, different in others."""

    def __init__(self, rewards, **_):
        self.names = [name for name, _ in rewards]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, samples):
        n = len(samples)
        rewards = np.asarray([float(s.tokens in (1, 4, 9, 10)) for s in samples], np.float32)
        done: Future[Grades] = Future()
        done.set_result(Grades(rewards, dict.fromkeys(self.names, rewards), ["graded"] * n, [None] * n, [""] * n))
        return done


def fake_hub() -> Any:
    """The package ``datasets`` as far as it is used: rows that tell how they were asked for."""
    module: Any = types.ModuleType("datasets")
    module.load_dataset = lambda *args, **options: [
        {"question": f"1+{zlib.crc32(repr((args, options)).encode())}=", "answer": "2"}
    ]
    return module


# --- The test --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    size = {"layers": 1, "heads": 2, "kv_heads": 1, "ffn": 16}
    write_builtin_policy(folder / "tiny", seed=0, hidden=16, **size)
    write_builtin_policy(folder / "other", seed=0, hidden=8, **size)
    write_forks_policy(folder / "forks", seed=0)
    write_stories_policy(folder / "stories", seed=0)
    return folder


@pytest.fixture(scope="module")
def seen():
    """Views of configs that several fields start from."""
    return {}


def change(tree: dict[str, Any], path: str, value: Any) -> None:
    if path.startswith("grading.rewards."):
        tree["grading"]["rewards"][0][path.rpartition(".")[2]] = value
        return
    if path.startswith("data.mixture."):
        tree["data"].setdefault("mixture", [{}])[0][path.rpartition(".")[2]] = value
        return
    *parents, leaf = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def test_every_field_has_an_entry():
    assert sorted(fields()) == sorted(leaves(Config))


def look(view: Any, tree: dict[str, Any], here: Path, policies: Path, monkeypatch) -> Any:
    """A view of a config from a folder of its own, or the error that it gives."""
    here.mkdir()
    (here / "policies").symlink_to(policies)
    (here / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2", "second": "3"}\n' * 2)
    monkeypatch.setitem(sys.modules, "datasets", fake_hub())
    monkeypatch.chdir(here)
    try:
        return view(parse_config(tree))
    except UserError as error:
        return f"error: {error}"


@pytest.mark.slow  # some 260 tests of half a second
@pytest.mark.parametrize("path", [p for p in sorted(leaves(Config)) if fields().get(p) is not SEEN_IN_TRAIN])
def test_field_is_read(path, policies, seen, tmp_path, monkeypatch):
    field = fields().get(path)
    assert field is not None, f"{path}: say in fields() how this field shows, or remove it"
    tree = copy.deepcopy(BASE)
    for name, value in copy.deepcopy(field.given).items():
        change(tree, name, value)
    asked = (str(field.view), json.dumps(tree))
    if asked not in seen:
        seen[asked] = look(field.view, tree, tmp_path / "before", policies, monkeypatch)
    change(tree, path, field.value)
    after = look(field.view, tree, tmp_path / "after", policies, monkeypatch)
    assert after != seen[asked]
    if field.error is None:
        assert not str(after).startswith("error:"), after
    else:
        assert re.search(field.error, str(after)), after


@pytest.mark.parametrize("path", ["seed", "grading.deadline", "rollout.top_k", "sft.optim.lr", "data.train.name"])
def test_the_same_config_gives_the_same_view(path, policies, tmp_path, monkeypatch):
    """Otherwise a field that nothing reads could seem to change something."""
    field, tree = fields()[path], copy.deepcopy(BASE)
    for name, value in field.given.items():
        change(tree, name, value)
    one, two = (look(field.view, copy.deepcopy(tree), tmp_path / n, policies, monkeypatch) for n in ("one", "two"))
    assert one == two
    assert not str(one).startswith("error:")
