"""Mark the tokens of completions of the built-in tasks that are known, by construction, to matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oarjax.config.inputs import DatasetConfig
from oarjax.data.tasks.arithmetic import computed_tokens, first_wrong_step
from oarjax.data.tasks.forks import fork_tokens
from oarjax.data.tasks.stories import story_tokens


class Truth(NamedTuple):
    """Marks on the tokens of a completion."""

    computed: list[bool]  # carry the computation: results of steps, choices at forks
    pivotal: list[bool]  # decide the outcome: these, and in arithmetic the first token
    wrong_step: list[bool]  # the first wrong step; all False if no step is wrong


def token_truth(task: DatasetConfig, question: str, tokens: Sequence[str]) -> Truth | None:
    """Mark the tokens of a completion, as the texts that join to it; None for a dataset other than the built-in tasks.

    builtin:arithmetic: the digits of results; the first token is pivotal too, since it chooses between writing the
    steps out and guessing. builtin:forks: the choices. builtin:stories: the results of equations; the words that name
    an operation, and the other parts of equations, are pivotal too.
    """
    if task.source == "builtin:arithmetic":
        computed = computed_tokens(tokens)
        first = [n == 0 for n in range(len(tokens))]
        return Truth(computed, [a or b for a, b in zip(computed, first)], first_wrong_step(question, tokens))
    if task.source == "builtin:forks":
        forks, wrong_step = fork_tokens(question, tokens, kind=task.forks.kind, seed=task.forks.seed)
        return Truth(forks, forks, wrong_step)
    if task.source == "builtin:stories":
        return Truth(*story_tokens(question, tokens))
    return None
