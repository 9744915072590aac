"""Grade a rollout while the devices compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from oarjax.config import Config
from oarjax.data.problems import Problem
from oarjax.grading.recorded import Grading
from oarjax.grading.rewards import Sample
from oarjax.rl.grpo import overlong_penalty
from oarjax.system.processes import gather_grades
from oarjax.types import Grades, Rollout


def submit(
    cfg: Config,
    grader: Grading,
    problems: Sequence[Problem],
    rollout: Rollout,
    rows: Int[np.ndarray, "r"],
    texts: Sequence[str],
) -> Callable[[], Grades]:
    """Start grading this process's share of a rollout; calling the result waits for the grades of all of it.

    Args:
        rows: this process's share of the completions.
        problems: of these rows.
        texts: of these rows.

    Returns:
        A function that gives the grades, with the overlong penalty taken off the rewards.
    """
    lengths = rollout.completion.sum(1)
    pending = grader.submit(
        [
            Sample(
                prompt=problem.prompt,
                completion=text,
                answer=problem.reference,
                ended=bool(ended),
                tokens=int(length),
            )
            for problem, text, ended, length in zip(problems, texts, rollout.ended[rows], lengths[rows])
        ]
    )

    @cache  # asked for more than once, and all processes must gather as often
    def wait() -> Grades:
        grades, window = gather_grades(pending.result()), cfg.grading.overlong_window
        if window == 0:
            return grades
        cut = np.asarray(
            overlong_penalty(
                jnp.asarray(lengths),
                max_length=cfg.rollout.max_new,
                window=window,
                penalty=cfg.grading.overlong_penalty,
            ),
            np.float32,
        )
        return replace(grades, rewards=grades.rewards - cut, per_reward={**grades.per_reward, "overlong": -cut})

    return wait
