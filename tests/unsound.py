"""Build minibatches that are not finite, for tests of how a run reacts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from conftest import CACHE

from oarjax.step.host_callbacks import PhaseRecord
from oarjax.types import AnswerSpan, Evidence, Mean, Rollout, Scores, TrainState

ROWS, PROMPT, LENGTH = 4, 3, 5

MICRO = {
    "iterations": 8,
    "device": "cpu",
    "compilation_cache": str(CACHE),
    "data": {
        "template": "plain",
        "max_prompt": 24,
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 20, "arithmetic": {"terms": 2}},
    },
    "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
    "grading": {"rewards": [{"name": "exact"}], "workers": 1},
    "credit": {"method": "uniform", "answer": {"style": "regex", "pattern": "[0-9]"}},
    "update": {"microbatch": 8},
    "optim": {"warmup": 0, "lr": 1e-3},
    "checkpoint": {"every": 1, "keep": 3},
    "report": {"html": False, "completions": 3},
    "export": {"folder": None},
}
"""A run of seconds, without run_dir and policy."""


def evidence(*, scored: bool = True) -> Evidence:
    """Return four completions of 2 to 5 tokens in two microbatches, the first importance of the last row NaN."""
    draw = np.random.default_rng(0)
    is_token = np.arange(LENGTH) < np.array([2, 3, 4, 5])[:, None]
    values = np.where(is_token, draw.normal(size=is_token.shape), 0).astype(np.float32)
    importance = np.abs(values)
    importance[3, 0] = np.nan
    rollout = Rollout(
        tokens=draw.integers(3, 20, (ROWS, PROMPT + LENGTH)).astype(np.int32),
        valid=np.concatenate([np.ones((ROWS, PROMPT), bool), is_token], 1),
        completion=is_token,
        behaviour_logps=values,
        filtered_logps=values,
        ended=np.ones(ROWS, bool),
    )
    span = AnswerSpan(is_token & (np.arange(LENGTH) < 2), is_token & (np.arange(LENGTH) == 2), np.ones(ROWS, bool))
    extras = {}
    if scored:
        extras = {
            "scores": Scores(values, None, importance, None),
            "advantages": values[:, 0],
            "completion": is_token,
            "weights": np.ones(is_token.shape, np.float32),
        }
    microbatches = jax.tree.map(
        lambda x: x.reshape(2, 2, *x.shape[1:]), (rollout, span, np.arange(ROWS, dtype=np.int32), extras)
    )
    r, s, numbers, extras = microbatches
    return Evidence(r, s, numbers, np.int32(2), **extras, denominator=np.float32(14) if scored else None)


def phase_record(iteration: int, *, phase="update", step=7, params=None, **nonfinite: float) -> PhaseRecord:
    """Return a record for a watch; ``nonfinite`` are shares of values that are not finite."""
    metrics = {f"nonfinite/{name}": Mean(jnp.float32(share), jnp.float32(1)) for name, share in nonfinite.items()}
    state = TrainState(jnp.int32(step), params or {"a": {"w": jnp.ones(3)}}, (), jax.random.key(3))
    metrics["loss"] = Mean(jnp.float32(jnp.nan), jnp.float32(1))
    return PhaseRecord(phase, iteration, 1, metrics, state, "last", evidence())
