"""Expected work of an iteration whose completions differ in length, beside the worst case that a plan compiles for.

Lengths are independent draws from one distribution, given by its survival function S[t] = P(length > t). The number of
rows still decoding at step t is then Binomial(rows, S[t]), so the expectations below are exact sums, not simulations;
only the lengths of sorted microbatches are approximated, by quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from oarjax.costs import Number
from oarjax.stats import binomial_exceedance, normal_cdf


class DecodingWork(NamedTuple):
    """Expected work of one rollout of ``rows`` rows on the devices that share them."""

    steps: float  # decode steps until the last row ends
    row_steps: float  # rows computed, added over the steps: rows that ended wait for a segment's border
    slot_reads: float  # rows computed times cache slots read, added over the steps
    occupancy: float  # share of row_steps that give a token of a completion


def lognormal_survival(*, mean: Number, sigma: Number, limit: int) -> Float[np.ndarray, "limit"]:
    """Return S[t] = P(length > t) for t = 0..limit-1: lognormal lengths, rounded up, at least 1 and cut at ``limit``.

    ``mean`` is the mean of the lognormal before it is cut, so its median is mean * exp(-sigma^2 / 2).

    Raises:
        ValueError: mean or sigma not above 0.
    """
    if not (mean > 0 and sigma > 0):
        raise ValueError(f"lengths: expected mean and sigma above 0, got mean={mean}, sigma={sigma}")
    with np.errstate(divide="ignore"):
        z = (np.log(np.arange(limit, dtype=np.float64)) - np.log(mean) + sigma**2 / 2) / sigma
    return normal_cdf(-z)


def empirical_survival(lengths: Sequence[int], *, limit: int) -> Float[np.ndarray, "limit"]:
    """Return S[t] = share of the measured lengths above t, for t = 0..limit-1; longer ones count as cut at ``limit``.

    Raises:
        ValueError: no lengths, or one below 1.
    """
    values = np.sort(np.asarray(lengths))
    if len(values) == 0 or values[0] < 1:
        raise ValueError(f"lengths: expected completions of at least 1 token, got {len(values)} of {values[:1]} and up")
    return 1.0 - np.searchsorted(values, np.arange(limit), side="right") / len(values)


def mean_length(survival: Float[np.ndarray, "T"]) -> float:
    """Return E[min(length, T)], the sum of the survival function."""
    return float(survival.sum())


def expected_decoding(
    survival: Float[np.ndarray, "T"],
    *,
    rows: int,
    segment: int,
    row_bucket: Callable[[int], int],
    slots_at: Callable[[int], int],
) -> DecodingWork:
    """Compute the expected work of decoding in segments, where rows that ended leave at a segment's border.

    Args:
        segment: decode steps between borders; T for the static loop, which computes every row until the last ends.
        row_bucket: rows computed where so many are still decoding, at least that many.
        slots_at: cache slots per row in the segment that begins at a step.
    """
    limit = len(survival)
    buckets = np.array([row_bucket(n) for n in range(1, rows + 1)], np.float64)
    jumps = np.diff(buckets, prepend=0.0)  # bucket(n) = sum of the jumps up to n
    alive = np.arange(rows)  # P(more than k rows are left), k = 0..rows-1
    steps = row_steps = slot_reads = 0.0
    for start in range(0, limit, segment):
        end = min(start + segment, limit)
        # Inside the segment the loop runs on while any row decodes.
        loop_chances = 1.0 - (1.0 - survival[start:end]) ** rows
        computed = float(jumps @ binomial_exceedance(alive, draws=rows, chance=float(survival[start])))
        # A border with rows left is followed by at least one step; given that, steps run until the last row ends.
        rows_left = float(loop_chances.sum())
        likely = float(loop_chances[0])
        per_row = rows_left / likely if likely > 0 else 0.0
        steps += rows_left
        row_steps += computed * per_row
        slot_reads += computed * per_row * slots_at(start)
    tokens = rows * mean_length(survival)
    return DecodingWork(steps, row_steps, slot_reads, tokens / row_steps if row_steps else 1.0)


def unit_survival(survival: Float[np.ndarray, "T"], *, group: int, rows: int) -> Float[np.ndarray, "T"]:
    """Return P(longest > t) over the units of ``rows`` completions, neighbours in length, of groups of ``group``.

    The k-th of n independent lengths is above t where fewer than k of them are at most t.
    """
    cumulative = 1.0 - survival
    exactly = [comb(group, j) * cumulative**j * survival ** (group - j) for j in range(group)]
    return np.mean([np.sum(exactly[:k], axis=0) for k in range(rows, group + 1, rows)], axis=0)


def sorted_lengths(survival: Float[np.ndarray, "T"], *, rows: int, microbatch: int) -> list[int]:
    """Return the longest completion that each microbatch of length-sorted rows is expected to hold, longest first.

    Rank k of ``rows`` sorted draws is taken to be the quantile (rows - k + 1/2) / rows.
    """
    longest_ranks = np.arange(0, rows, microbatch)
    quantiles = (rows - longest_ranks - 0.5) / rows
    cumulative = 1.0 - survival  # P(length <= t)
    return [max(1, int(np.searchsorted(cumulative, q, side="left"))) for q in quantiles]


def padding_share(
    survival: Float[np.ndarray, "T"], padded: Sequence[int], *, rows: int, microbatch: int, prompt: Number = 0
) -> float:
    """Return the share of the positions of padded microbatches, prompts of ``prompt`` included, that hold no token."""
    total = float(sum(microbatch * (prompt + length) for length in padded))
    return 1.0 - rows * (prompt + mean_length(survival)) / total if total else 0.0
