"""Device programs of the credit lab that write down what they are asked, and how the lab shows each of its fields."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import oarjax.training.run
from oarjax.config import Config
from oarjax.lab.completions import draw_completions
from oarjax.lab.interventions import Choices
from oarjax.lab.lab import run_lab
from oarjax.lab.programs import Programs, make_programs
from oarjax.models.weights import init_params
from oarjax.training.run import Run, open_run
from oarjax.types import PromptBatch, Rollout


def fake_programs(log: list[Any], session: Run) -> Programs:
    """Completions ``r=2;;#### 3<stop>`` of lengths that differ with the row r. Every changed answer is 5."""
    tokenizer, length = session.tokenizer, session.cfg.rollout.max_new

    def rolled(prompts: Any, texts: list[str], width: int) -> Rollout:
        rows, made = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), bool)
        for row, text in enumerate(texts):
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], session.stop_ids[-1]][:width]
            rows[row, : len(ids)], made[row, : len(ids)] = ids, True
        zeros = np.zeros(rows.shape, np.float32)
        tokens = np.concatenate([np.asarray(prompts.tokens), rows], 1)
        return Rollout(tokens, np.concatenate([prompts.valid, made], 1), made, zeros, zeros, np.ones(len(rows), bool))

    def sample(prompts, key):
        log.append(("sample", np.asarray(prompts.tokens).tolist(), jax.random.key_data(key).tolist()))
        return rolled(prompts, [f"{r % 10}=2{';' * (r % 3)}#### 3" for r in range(len(prompts.problem))], length)

    def choose(rollout):
        own = np.asarray(rollout.tokens)[:, -rollout.completion.shape[1] :]
        return Choices(own, np.where(own == 4, 5, 4))

    def decode(tokens, valid, branches, *, length, width, max_new):
        rows = len(branches.row)
        log.append(("decode", rows, width, max_new))
        prompts = PromptBatch(np.zeros((rows, width), np.int32), np.ones((rows, width), bool), branches.row)
        return rolled(prompts, ["5"] * rows, max_new)

    def changes(rollout, reasoning, answer, other):
        log.append(("changes", rollout.tokens.shape))
        return np.asarray(reasoning) & (np.asarray(other) == 4)

    def by_token(params, rollout, span, keys):
        made = rollout.tokens[:, -span.reasoning.shape[1] :].astype(jnp.float32)
        return jnp.where(span.reasoning, made + (made @ jnp.ones((made.shape[1], 1))), 0)

    def attribute(credit):
        log.append(("attribute", credit.method))
        return by_token

    return Programs({}, sample, choose, decode, changes, by_token, by_token, attribute)


def lab(cfg: Config, *, grader: Any) -> Any:
    """What a whole lab asks of fake programs and a fake grader, and what comes out, without what a clock says."""
    log: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oarjax.training.run, "Grader", grader)
        session = open_run(cfg, Console(file=io.StringIO()))
        programs = fake_programs(log, session)
        drawn = draw_completions(session, programs)
        with session.grader() as graded:
            found = asdict(run_lab(session, programs, graded, drawn))
    for method in found["methods"]:
        method["figures"].pop("seconds")
    return log, repr(found)


def lab_sampler(cfg: Config) -> str:
    """The text of the program that draws the lab's completions."""
    session = open_run(cfg, Console(file=io.StringIO()))
    params = init_params(session.model, jax.random.key(0))
    programs = make_programs(session, params)
    spec = jax.ShapeDtypeStruct
    prompts = PromptBatch(spec((2, 8), jnp.int32), spec((2, 8), jnp.bool_), spec((2,), jnp.int32))  # type: ignore[arg-type]
    return programs.sample.func.lower(params, prompts, jax.eval_shape(lambda: jax.random.key(0))).as_text()  # type: ignore[attr-defined]
