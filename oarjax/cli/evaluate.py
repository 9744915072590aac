"""Held-out accuracy of a policy, sampled with the evaluation's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from oarjax.cli.session import Session
from oarjax.host.data import eval_batches
from oarjax.host.verdicts import Grading
from oarjax.steps import Steps
from oarjax.types import Params


@dataclass(frozen=True)
class Evaluation:
    scores: np.ndarray  # [problems], mean over samples of the first reward; NaN where none could be graded
    length: float  # mean completion, tokens
    truncated: float  # share cut at rollout.max_new

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "pass_at_1": float(np.nanmean(self.scores)) if np.isfinite(self.scores).any() else float("nan"),
            "eval/length": self.length,
            "eval/truncated": self.truncated,
        }


def plain_evaluation(found: Evaluation | None) -> dict[str, Any] | None:
    """An evaluation as JSON. NaN (ungraded) is null."""
    if found is None:
        return None
    scores = [None if np.isnan(s) else float(s) for s in found.scores]
    return {"scores": scores, "length": found.length, "truncated": found.truncated}


def evaluation_from(tree: dict[str, Any] | None) -> Evaluation | None:
    """What ``plain_evaluation`` made, back."""
    if tree is None:
        return None
    scores = np.asarray([np.nan if s is None else s for s in tree["scores"]])
    return Evaluation(scores=scores, length=tree["length"], truncated=tree["truncated"])


def evaluate(session: Session, steps: Steps, grader: Grading, params: Params) -> Evaluation:
    """Sample every held-out problem ``eval.samples`` times. The noise depends on the seed, not on the iteration."""
    cfg, held_out = session.cfg, session.held_out
    if held_out is None:
        raise ValueError("evaluate: the config has no data.eval")
    key = jax.random.fold_in(jax.random.key(cfg.seed), 2**31 - 1)
    scores, lengths, ended, waiting = [], [], [], []
    batches = eval_batches(held_out, batch=cfg.eval.batch, bucket=cfg.rollout.prompt_bucket, pad_id=session.pad_id)
    for n, (prompts, _, real) in enumerate(batches):
        rollout = session.fetch(steps.evaluate(params, session.place(prompts, "rows"), jax.random.fold_in(key, n)))
        rows = real * cfg.eval.samples
        lengths.append(rollout.completion.sum(1)[:rows])
        ended.append(rollout.ended[:rows])
        waiting.append((session.submit(grader, held_out.by_index, prompts, rollout), rows))
    first = cfg.grading.rewards[0].name
    for wait, rows in waiting:
        given = wait().per_reward[first][:rows].reshape(-1, cfg.eval.samples)
        known = np.isfinite(given)
        scores.append(np.where(known.any(1), np.nansum(given, 1) / np.maximum(known.sum(1), 1), np.nan))
    return Evaluation(
        scores=np.concatenate(scores),
        length=float(np.concatenate(lengths).mean()),
        truncated=float(1 - np.concatenate(ended).mean()),
    )
