"""How often a policy is right, from samples that were graded: pass@1, pass@k, the majority's answer, with intervals.

Problems are the independent draws: every figure is a mean over problems, and its interval is over problems too. A
sample that could not be graded is NaN and counts for nothing, neither right nor wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.special import stdtrit  # scipy.stats has it too, and takes a second to import

Z95 = 1.959963984540054  # the normal quantile of a two-sided 95% interval


class Figure(NamedTuple):
    """A mean over problems with its 95% interval; NaN where nothing is known, or a single problem has no interval."""

    value: float
    low: float
    high: float
    problems: int  # that it is a mean over


def mean_score(scores: Float[np.ndarray, "P n"]) -> Float[np.ndarray, "P"]:
    """Mean over each problem's graded samples, NaN where there is none. Its mean over problems is avg@n."""
    known = np.isfinite(scores)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, scores, 0).sum(1) / np.maximum(count, 1), np.nan)


def pass_at_k(correct: Float[np.ndarray, "P n"], *, k: int) -> Float[np.ndarray, "P"]:
    """Chance that at least one of k samples is right, unbiased from the n that there are (Chen et al., 2021, eq. 1).

    With c of n graded samples right: 1 - C(n - c, k) / C(n, k), as the product of 1 - k / i over i in n - c + 1 .. n,
    which overflows for no n. NaN for a problem with fewer than k graded samples.

    Args:
        correct: 1 right, 0 wrong, NaN not graded.

    Raises:
        ValueError: k is not within 1..n.
    """
    if not 1 <= k <= correct.shape[1]:
        raise ValueError(f"pass_at_k: expected k within 1..{correct.shape[1]}, the samples of a problem, got {k}")
    known = np.isfinite(correct)
    n, c = known.sum(1), np.nansum(correct, 1)
    i = np.arange(1, correct.shape[1] + 1)
    among = (i > (n - c)[:, None]) & (i <= n[:, None])
    all_wrong = np.prod(np.where(among, np.maximum(1 - k / i, 0), 1.0), axis=1)
    return np.where(n >= k, 1 - all_wrong, np.nan)


def answer_numbers(answers: Sequence[Sequence[str | None]]) -> Int[np.ndarray, "P n"]:
    """Answers as numbers that are equal where a problem's answers are the same text; -1 for no answer."""
    rows = []
    for given in answers:
        seen: dict[str, int] = {}
        rows.append([-1 if a is None else seen.setdefault(a, len(seen)) for a in given])
    return np.asarray(rows, int).reshape(len(rows), -1)


def majority_correct(answers: Int[np.ndarray, "P n"], correct: Float[np.ndarray, "P n"]) -> Float[np.ndarray, "P"]:
    """Whether the answer that most samples give is right (maj@n); of equally frequent ones the first to come.

    Samples without an answer (-1) have no vote; where none has one, the problem is wrong. NaN where no sample that
    gives the winning answer was graded, or nothing of the problem was.
    """
    found = np.full(len(answers), np.nan)
    for p, (given, right) in enumerate(zip(answers, correct, strict=True)):
        voted = given[given >= 0]
        if not len(voted):
            found[p] = 0.0 if np.isfinite(right).any() else np.nan
            continue
        values, first, votes = np.unique(voted, return_index=True, return_counts=True)
        winner = values[np.lexsort((first, -votes))[0]]
        known = right[(given == winner) & np.isfinite(right)]
        found[p] = known[0] if len(known) else np.nan
    return found


def share_interval(values: Float[np.ndarray, "P"]) -> Figure:
    """Mean of shares over problems, with Student's t interval cut to 0..1.

    Where every problem is 0, or every one 1, t would give no width; Wilson's interval of that many trials is given.
    """
    found = mean_interval(values)
    n = found.problems
    if n and found.value in (0.0, 1.0):
        width = Z95**2 / (n + Z95**2)
        return Figure(found.value, *((0.0, width) if found.value == 0 else (1 - width, 1.0)), n)
    return found._replace(low=max(found.low, 0.0), high=min(found.high, 1.0))


def mean_interval(values: Float[np.ndarray, "P"]) -> Figure:
    """Mean over problems, NaN left out, and Student's t interval: ± t(0.975, P - 1) * deviation / sqrt(P)."""
    known = values[np.isfinite(values)]
    n = len(known)
    if n == 0:
        return Figure(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(known) / n
    half = float(stdtrit(n - 1, 0.975)) * float(known.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Figure(mean, mean - half, mean + half, n)


def paired_difference(ours: Float[np.ndarray, "P"], theirs: Float[np.ndarray, "P"]) -> Figure:
    """Mean of ours - theirs over the problems known in both, with its interval: what is hard for both drops out."""
    return mean_interval(ours - theirs)


def powers_up_to(k: int) -> list[int]:
    """1, 2, 4, ... and k itself: the k's that pass@k is shown for."""
    return sorted({1 << i for i in range(k.bit_length())} | {k})
