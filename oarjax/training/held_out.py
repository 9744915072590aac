"""Measure a policy's held-out accuracy: sample and grade completions of every problem.

A run's evaluations and ``oarjax evaluate`` use it. Noise is a function of (seed, problem, sample), so neither the
batches nor earlier evaluations change a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from oarjax.data.streams import Encoded, eval_batches, eval_order
from oarjax.grading.recorded import Grading
from oarjax.rollout.source import Batch, SamplerSource, Spent, requested, rollout_of
from oarjax.run.run import Run
from oarjax.stats import majority_correct, mean_score, pass_at_k, powers_up_to
from oarjax.step.host_callbacks import HostCallbacks
from oarjax.step.minibatches import take, widen
from oarjax.step.steps import Steps
from oarjax.system.json import number, numbers, to_plain
from oarjax.system.processes import gather, is_first
from oarjax.training.votes import number_votes
from oarjax.types import Grades, Params, Rollout


class Graded(NamedTuple):
    """Graded samples of some problems, ``eval.samples`` rows each."""

    problems: Int[np.ndarray, "P"]  # row numbers in the dataset
    rollout: Rollout
    grades: Grades


@dataclass(frozen=True)
class Evaluation:
    scores: np.ndarray  # [problems], mean over samples of the first reward; NaN if none could be graded
    length: float  # mean tokens of a completion
    truncated: float  # share cut at rollout.max_new
    others: dict[str, float] = field(default_factory=dict)  # pass_at_k and maj_at_k if eval.samples > 1

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "pass_at_1": _mean(self.scores),
            **self.others,
            "eval/length": self.length,
            "eval/truncated": self.truncated,
        }


def plain_evaluation(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """Convert an evaluation to JSON values. NaN (ungraded) becomes null."""
    if evaluation is None:
        return None
    return to_plain(asdict(evaluation))


def evaluation_from(tree: dict[str, Any] | None) -> Evaluation | None:
    """Rebuild an evaluation from ``plain_evaluation``'s JSON."""
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise TypeError(f"expected an object, got {type(tree).__name__}")
    other_metrics = {name: number(value) for name, value in tree.get("others", {}).items()}
    length, truncated = number(tree["length"]), number(tree["truncated"])
    return Evaluation(
        scores=np.array(numbers(tree["scores"])), length=length, truncated=truncated, others=other_metrics
    )


def evaluate(run: Run, grader: Grading, params: Params) -> Evaluation:
    """Sample every held-out problem ``eval.samples`` times. The noise depends on the seed, not on the iteration."""
    held_out = run.held_out
    if held_out is None:
        raise ValueError("evaluate: the config has no data.eval")
    batches = list(graded_batches(run, grader, params, held_out))
    samples = run.cfg.eval.samples
    reward = run.cfg.grading.rewards[0].name
    rewards = np.concatenate([first_rewards(batch, reward) for batch in batches])
    answers = [answer for batch in batches for answer in batch.grades.answers]
    order = np.argsort(eval_order(held_out))  # from the order of the batches to that of the problems
    scores = rewards[order]
    by_problem = [answers[at * samples : (at + 1) * samples] for at in order]
    votes = gather(number_votes(by_problem, scores, run.cfg.grading).tolist() if is_first() else [])[0]
    figures = per_problem(scores, np.asarray(votes, int))
    names = {"pass_at_k": f"pass@{samples}", "maj_at_k": f"maj@{samples}"} if samples > 1 else {}
    return Evaluation(
        scores=mean_score(scores),
        length=float(np.concatenate([batch.rollout.completion.sum(1) for batch in batches]).mean()),
        truncated=float(1 - np.concatenate([batch.rollout.ended for batch in batches]).mean()),
        others={name: _mean(figures[figure]) for name, figure in names.items()},
    )


def graded_batches(run: Run, grader: Grading, params: Params, encoded: Encoded, *, skip: int = 0) -> Iterator[Graded]:
    """Yield the samples of every problem, batch by batch; a batch is sampled while the batch before it is graded.

    ``params`` are in the training layout; they are laid out for sampling once, here.

    Args:
        skip: number of problems to skip, the first in ``data.streams.eval_order``.
    """
    cfg, environment = run.cfg, run.cfg.rollout.environment
    key = jax.random.fold_in(jax.random.key(cfg.seed), 2**31 - 1)
    pending, sampling = None, run.steps.rollout_params(params)
    settings = {"batch": cfg.eval.batch, "bucket": run.prompt_step, "pad_id": run.pad_id}
    for prompts, _, real in eval_batches(encoded, **settings, order=eval_order(encoded)[skip:]):
        if environment is None:
            rollout = run.fetch(run.steps.evaluate(sampling, run.place(prompts, "prompts"), key))
        else:
            if environment.taskset is not None:  # tasks may be slow: none is played to fill a batch
                prompts = jax.tree.map(itemgetter(slice(real)), prompts)
            batch = Batch(prompts, key, 0, 0, cfg.eval.samples, cfg.rollout.max_new)
            turns = turns_of_problems(run.steps, sampling, partial(run.place, layout="prompts"), run.fetch)
            episodes = run.episodes(turns, encoded).draw(batch)
            rollout = rollout_of(batch, requested(batch, episodes), pad_id=run.pad_id)
        wait = run.submit(grader, encoded.by_index, prompts, rollout)
        if pending is not None:
            yield _leading(*pending, samples=cfg.eval.samples)
        pending = (np.asarray(prompts.problem)[:real], rollout, wait)
    if pending is not None:
        yield _leading(*pending, samples=cfg.eval.samples)


def measure_drift(
    rollout: Rollout,
    start: Params,
    drift: Callable[[Params, Rollout], Any],
    host: HostCallbacks,
    *,
    width: int,
    microbatch: int,
) -> dict[str, float]:
    """Estimate KL(policy || start) of whole completions in nats, for the policy that drew a rollout.

    The mean over all rows, whatever their rewards, of the sum over a completion's tokens of r - 1 - log r with
    r = start / policy, by the sampler's log-probs. As r is 1 on average given what stands before the token, it is
    unbiased like -log r, and varies less.

    Args:
        rollout: of an iteration, whole.
        start: params of the start.
        drift: the program.
        host: places rows and fetches numbers.
        width: positions that prompts are padded to, so that the program is compiled once.
        microbatch: rows at a time.
    """
    rows, count = widen(replace(rollout, origin=None, experts=None), width), len(rollout.ended)
    parts = []
    for first in range(0, count, microbatch):  # the last microbatch is filled up with its last row
        part = take(rows, np.minimum(np.arange(first, first + microbatch), count - 1))
        parts.append(host.fetch(drift(start, host.place(part, "rows"))))
    return {"kl_start": float(np.concatenate(parts)[:count].mean())}


def turns_of_problems(
    steps: Steps, params: Params, place: Callable[[Any], Any], fetch: Callable[[Any], Any]
) -> SamplerSource:
    """Return a source of held-out turns, with noise by problem and sample.

    Args:
        params: as ``steps.rollout_params`` lays them out.
        place, fetch: see ``SamplerSource``.
    """

    def number(batch: Batch, row: int) -> int:
        problem, sample = divmod(row, batch.group_size)
        return int(np.asarray(batch.prompts.problem)[problem]) * batch.group_size + sample

    source = SamplerSource(steps.evaluate, Spent, lambda params: params, place, fetch, steps.evaluate_on, number)
    source.sync(params, 0)
    return source


def first_rewards(batch: Graded, name: str) -> Float[np.ndarray, "P n"]:
    """Return a reward of every sample, the first of which is the score of evaluations; NaN if not graded."""
    return batch.grades.per_reward[name].reshape(len(batch.problems), -1).astype(float)


def per_problem(scores: Float[np.ndarray, "P n"], votes: Int[np.ndarray, "P n"]) -> dict[str, Float[np.ndarray, "P"]]:
    """Compute every figure for every problem. A sample is right if its score is 1 or more.

    ``votes`` are the numbers of the answers, see ``oarjax.training.votes``.
    """
    samples = scores.shape[1]
    correct = np.where(np.isnan(scores), np.nan, scores >= 1)
    if samples == 1:
        return {"pass@1": pass_at_k(correct, k=1)}
    figures = {f"pass@{k}": pass_at_k(correct, k=k) for k in powers_up_to(samples)}
    figures[f"avg@{samples}"] = mean_score(scores)
    figures[f"maj@{samples}"] = majority_correct(votes, correct)
    return figures


def _leading(problems: Int[np.ndarray, "P"], rollout: Rollout, wait: Any, *, samples: int) -> Graded:
    """Wait for the grades, and drop the rows that pad the batch."""
    rows, grades = len(problems) * samples, wait()
    return Graded(
        problems,
        take(rollout, np.arange(rows)),
        Grades(
            rewards=grades.rewards[:rows],
            per_reward={name: values[:rows] for name, values in grades.per_reward.items()},
            verdicts=grades.verdicts[:rows],
            answers=grades.answers[:rows],
            notes=grades.notes[:rows],
        ),
    )


def _mean(values: Float[np.ndarray, "P"]) -> float:
    """Average the known values; NaN without any."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
