"""Fake device programs of the credit lab that log their calls, and the lab's results by config field."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import oarjax.run.grades
from oarjax.config.schema import Config
from oarjax.models.weights import init_params
from oarjax.run.run import Run, open_run
from oarjax.tools.lab.completions import sample_completions
from oarjax.tools.lab.interventions import Choices
from oarjax.tools.lab.lab import run_lab
from oarjax.tools.lab.programs import LabPrograms, make_programs
from oarjax.types import PromptBatch, Rollout


def fake_programs(log: list[Any], run: Run) -> LabPrograms:
    """Return fake programs: row r completes ``r=2;;#### 3<stop>`` in varying lengths, and every changed answer is 5."""
    tokenizer, length = run.tokenizer, run.cfg.rollout.max_new

    def rolled(prompts: Any, texts: list[str], width: int) -> Rollout:
        rows, is_token = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), bool)
        for row, text in enumerate(texts):
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], run.stop_ids[-1]][:width]
            rows[row, : len(ids)], is_token[row, : len(ids)] = ids, True
        zeros = np.zeros(rows.shape, np.float32)
        tokens = np.concatenate([np.asarray(prompts.tokens), rows], 1)
        valid = np.concatenate([prompts.valid, is_token], 1)
        return Rollout(tokens, valid, is_token, zeros, zeros, np.ones(len(rows), bool))

    def sample(prompts, key):
        log.append(("sample", np.asarray(prompts.tokens).tolist(), jax.random.key_data(key).tolist()))
        return rolled(prompts, [f"{r % 10}=2{';' * (r % 3)}#### 3" for r in range(len(prompts.problem))], length)

    def choose(rollout):
        tokens = np.asarray(rollout.tokens)[:, -rollout.completion.shape[1] :]
        return Choices(tokens, np.where(tokens == 4, 5, 4))

    def decode(tokens, valid, branches, *, length, width, max_new):
        rows = len(branches.row)
        log.append(("decode", rows, width, max_new))
        prompts = PromptBatch(np.zeros((rows, width), np.int32), np.ones((rows, width), bool), branches.row)
        return rolled(prompts, ["5"] * rows, max_new)

    def changes(rollout, reasoning, answer, other):
        log.append(("changes", rollout.tokens.shape))
        return np.asarray(reasoning) & (np.asarray(other) == 4)

    def by_token(params, rollout, span, keys):
        tokens = rollout.tokens[:, -span.reasoning.shape[1] :].astype(jnp.float32)
        return jnp.where(span.reasoning, tokens + (tokens @ jnp.ones((tokens.shape[1], 1))), 0)

    def measure(wanted):
        def signals(params, rollout, hints, keys):
            tokens = rollout.tokens[:, -rollout.completion.shape[1] :].astype(jnp.float32)
            values = tokens + (tokens @ jnp.ones((tokens.shape[1], 1)))
            return {name: values[..., None] if name == "hidden" else values for name in wanted}

        return signals

    def attribute(credit):
        log.append(("attribute", credit.method))
        return by_token

    def value(credit):
        def valued(params, rollout, span, keys):
            shape = (len(rollout.ended), 1, 2)
            at, ids = np.zeros(shape[:2], np.int32), np.broadcast_to(np.array([4, 5]), shape)
            return at, ids, np.broadcast_to(np.array([0.2, 0.7]), shape), np.full(shape, 0.4), np.ones(shape, bool)

        return valued

    def resample(tokens, valid, branches, *, key, **sizes):
        log.append(jax.random.key_data(key).tolist())
        return decode(tokens, valid, branches, **sizes)

    return LabPrograms({}, sample, choose, decode, changes, by_token, measure, attribute, value, resample)


def lab(cfg: Config, *, grader: Any) -> Any:
    """Return the calls and the result of a whole lab with fake programs and a fake grader, without the timings."""
    log: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.run.grades, "Grader", grader)
        run = open_run(cfg, Console(file=io.StringIO()))
        programs = fake_programs(log, run)
        completions = sample_completions(run, programs)
        with run.grader() as grader_processes:
            result = asdict(run_lab(run, programs, grader_processes, completions))
    for method in result["methods"]:
        method["figures"].pop("seconds")
    return log, repr(result)


def lab_sampler(cfg: Config) -> str:
    """Return the text of the program that samples the lab's completions."""
    run = open_run(cfg, Console(file=io.StringIO()))
    params = init_params(run.model, jax.random.key(0))
    programs = make_programs(run, params)
    spec = jax.ShapeDtypeStruct
    prompts = PromptBatch(spec((2, 8), jnp.int32), spec((2, 8), jnp.bool_), spec((2,), jnp.int32))  # type: ignore[arg-type]
    return programs.sample.func._whole.lower(params, prompts, jax.eval_shape(lambda: jax.random.key(0))).as_text()  # type: ignore[attr-defined]
