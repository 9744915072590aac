"""Try rewards and environment before training, in the run's own workers: on the first problem, and on nonsense."""

from __future__ import annotations

import numpy as np

from oarjax.data.problems import Problem
from oarjax.environments.pool import Environments, Episode
from oarjax.grading.grader import Grader
from oarjax.grading.pool import GraderError
from oarjax.grading.rewards import Sample
from oarjax.report.console import OnceWarnings
from oarjax.run.run import Run
from oarjax.sources.driven import DriverLink, task_of
from oarjax.system.processes import only_first
from oarjax.types import Grades

AROUND = {"boxed": r"\boxed{%s}", "hash": "#### %s", "tag": "<answer>%s</answer>"}
"""An answer as each style marks it. A custom pattern may or may not match the bare answer."""

NONSENSE = "flurb"
COMPLETIONS = ("the reference answer", "nonsense")
READERS = ("exact", "math")
"""Rewards that must be 1 for the reference answer."""


def try_rewards(run: Run, grader: Grader) -> None:
    """Play a turn of the first problem; grade its reference answer, and nonsense, and warn of odd grades.

    A program that plays episodes itself is started.

    Raises:
        UserError: it cannot play, or the problem has no task for it.
        GraderError: the environment or a reward raised an exception, or ended its worker.
    """
    problem = next(iter(run.train.problems))
    if isinstance(run.environments, Environments):
        _try_environment(run.environments, problem)
    if isinstance(driver := run.environments, DriverLink):
        task_of(problem)
        only_first(driver.open)
    frame = AROUND.get(run.cfg.credit.answer.style, "%s")
    texts = (frame.replace("%s", problem.reference), NONSENSE)
    grades = grader.grade(
        [
            # A tokenizer need not know these texts: characters stand for tokens.
            Sample(
                prompt=problem.prompt,
                completion=text,
                answer=problem.reference,
                tokens=len(text),
                columns=problem.columns,
                limit=run.cfg.rollout.max_new,
                chat=problem.chat,
                completion_ids=tuple(range(len(text))),
                rewards=problem.rewards,
            )
            for text in texts
        ]
    )
    for name, verdict, note in zip(COMPLETIONS, grades.verdicts, grades.notes):
        if verdict == "crash":
            raise GraderError(
                f"grading.rewards: on {name} of the first training problem, {note}; fix the reward and start again"
            )
    if (doubt := _doubt(grades)) is not None:
        OnceWarnings(run.console).say("rewards", f"the reference answer of the first training problem {doubt}")


def _try_environment(environments: Environments, problem: Problem) -> None:
    """Begin an episode, answer with the problem's reference, or nonsense without one, and end it."""
    episode = Episode(problem.columns, 0, (problem.reference or NONSENSE,))
    (step,) = environments.advance([episode])
    if step.text is not None:
        (step,) = environments.finish([episode._replace(observations=(step.text,))])
    if step.failed:
        raise GraderError(
            f"rollout.environment: an episode of the first training problem (columns {', '.join(problem.columns)}), "
            f"answered with {episode.texts[0]!r:.60}, fails: {step.failed}; fix the class and start again"
        )


def _doubt(grades: Grades) -> str | None:
    """Describe what is odd about the grades of a reference answer and of nonsense, or return None."""
    scores = {name: values[0] for name, values in grades.per_reward.items() if not np.isnan(values[0])}
    rewards = ", ".join(f"{name} {value:g}" for name, value in scores.items())
    verdict, note, (reference, nonsense) = grades.verdicts[0], grades.notes[0], grades.rewards
    if verdict == "timeout":
        return (
            f"has no grade ({note}); is grading.deadline long enough, or grading.call_deadline, which batch, group and "
            "async rewards have?"
        )
    if verdict == "ungraded":
        return f"has no grade ({note}); do data.train's answers have the form that the rewards expect?"
    if any(scores.get(name, 1.0) != 1.0 for name in READERS):
        return f"is not graded as right ({rewards}); does it fit credit.answer.style?"
    if np.isfinite(nonsense) and reference < nonsense:
        return (
            f"gets {reference:g} ({rewards}) and nonsense {nonsense:g}; are the weights of grading.rewards as intended?"
        )
    return None
