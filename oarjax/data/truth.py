"""What is known of a completion's tokens in the built-in tasks, by construction and not by a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oarjax.config import DatasetConfig
from oarjax.data.arithmetic import computed_tokens, first_wrong_step
from oarjax.data.forks import fork_tokens


class Truth(NamedTuple):
    """Marks on the tokens of one completion."""

    computed: list[bool]  # carry the computation: results of steps, choices at forks
    pivotal: list[bool]  # decide what comes out: these, and where a habit is chosen its first token
    wrong: list[bool]  # the first wrong step; none where no step is wrong


def token_truth(task: DatasetConfig, question: str, tokens: Sequence[str]) -> Truth | None:
    """Mark a completion's tokens, whose texts join to its own; None for a dataset of which nothing is known.

    builtin:arithmetic: the digits of results; pivotal is the first token too, which chooses between writing the steps
    out and guessing. builtin:forks: the choices.
    """
    if task.source == "builtin:arithmetic":
        computed = computed_tokens(tokens)
        first = [n == 0 for n in range(len(tokens))]
        return Truth(computed, [a or b for a, b in zip(computed, first)], first_wrong_step(question, tokens))
    if task.source == "builtin:forks":
        forks, wrong = fork_tokens(question, tokens, kind=task.forks.kind, seed=task.forks.seed)
        return Truth(forks, forks, wrong)
    return None
