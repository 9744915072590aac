"""Count answers that are equal as the reward ``math`` compares them as one candidate of a majority vote."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from oarjax.config.learning import GradingConfig
from oarjax.grading.everyday import bare
from oarjax.grading.grader import Grader
from oarjax.grading.rewards import Sample, plainly_equal
from oarjax.stats import answer_numbers

COMPARING = ("math", "exact")
"""Rewards that say whether two answers are equal; with any other first reward, equal texts are one answer."""


class _Pair(NamedTuple):
    problem: int
    earlier: str
    later: str


def number_votes(
    answers: Sequence[Sequence[str | None]], scores: Float[np.ndarray, "P n"], grading: GradingConfig
) -> Int[np.ndarray, "P n"]:
    """Number each problem's answers so that equal ones have equal numbers; -1 for no answer.

    Right answers equal the reference, and so each other. Others are compared where that can change the majority, in
    grading workers unless both are plain numbers.
    """
    numbers = answer_numbers(answers)
    if scores.shape[1] == 1 or grading.rewards[0].name not in COMPARING:
        return numbers
    correct = (scores >= 1) & (numbers >= 0)
    for row, is_right in zip(numbers, correct):
        if is_right.any():
            row[np.isin(row, row[is_right])] = row[is_right].min()
    pairs = []
    for p, texts in enumerate(answers):
        incorrect = list(dict.fromkeys(t for t, is_right in zip(texts, correct[p]) if t is not None and not is_right))
        votes = (numbers[p] >= 0).sum() - correct[p].sum()
        if correct[p].sum() <= votes and (correct[p].any() or np.isnan(scores[p]).any()):
            pairs += [_Pair(p, a, b) for a, b in combinations(incorrect, 2)]
    for pair, is_equal in zip(pairs, _equal(pairs, grading)):
        if is_equal:
            texts, row = list(answers[pair.problem]), numbers[pair.problem]
            pair_numbers = row[[texts.index(pair.earlier), texts.index(pair.later)]]
            row[np.isin(row, pair_numbers)] = pair_numbers.min()
    return numbers


def _equal(pairs: Sequence[_Pair], grading: GradingConfig) -> list[bool]:
    """Compare answers, those that are not plain numbers in workers; what cannot be compared differs."""
    first = grading.rewards[0]
    plain = [plainly_equal(bare(pair.earlier), bare(pair.later)) for pair in pairs]
    open_pairs = [i for i, is_equal in enumerate(plain) if is_equal is None]
    if first.name != "math" or not open_pairs:
        return [bool(is_equal) for is_equal in plain]
    limits = {"workers": grading.workers, "deadline": grading.deadline, "memory_mb": grading.memory_mb}
    with Grader((("math", 1.0),), settings={"math": first.settings}, **limits) as grader:
        samples = [Sample("", _boxed(pairs[i].later), _boxed(pairs[i].earlier)) for i in open_pairs]
        for i, reward in zip(open_pairs, grader.grade(samples).rewards):
            plain[i] = bool(reward == 1)
    return [bool(is_equal) for is_equal in plain]


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
