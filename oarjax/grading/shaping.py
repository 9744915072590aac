"""Reward the form of a completion: length, cosine length and repetition; and pass on what an environment gave."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oarjax.grading.rewards import Sample, Unparseable, reward, same_value


@reward("environment")
def environment_reward(sample: Sample) -> float:
    """Return the sum of the rewards that the environment gave to the episode's turns."""
    return float(sum(sample.turn_rewards))


@reward("length", per="group")
def shorter_in_group(samples: Sequence[Sample]) -> list[float]:
    """Return Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), in [-0.5, 0.5].

    With l the completion's tokens, 1/2 - (l - shortest) / (longest - shortest) of its group for a correct answer, the
    same but at most 0 for a wrong one, 0 where all are equally long. "Correct" is the reward ``math``.
    """
    lengths = [sample.tokens for sample in samples]
    low, span = min(lengths), max(lengths) - min(lengths)
    if span == 0:
        return [0.0] * len(samples)
    shares = [0.5 - (length - low) / span for length in lengths]
    return [share if _is_correct(sample) else min(0.0, share) for share, sample in zip(shares, samples)]


@reward("cosine_length")
def cosine_length(
    sample: Sample,
    *,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    cut: float = -1.0,
) -> float:
    """Return the cosine length reward (arXiv 2502.03373, section 4.2): short and right is best, short and wrong worst.

    Along half a cosine from the ``short`` value at 0 tokens to the ``long`` one at ``sample.limit``; ``cut`` for a
    completion that did not end. "Correct" is the reward ``math``; an answer that is no expression counts as wrong.

    Raises:
        ValueError: the sample's limit is not known.
        Unparseable: the reference is not an expression.
    """
    if not sample.ended:
        return cut
    if sample.limit < 1:
        raise ValueError("cosine_length: sample.limit is 0; set it to the maximum number of tokens of a completion")
    short, long = (correct_short, correct_long) if _is_correct(sample) else (wrong_short, wrong_long)
    return long + (short - long) * (1 + math.cos(math.pi * min(sample.tokens / sample.limit, 1.0))) / 2


@reward("repetition")
def repetition(sample: Sample, *, words: int = 3, penalty: float = -1.0) -> float:
    """Return ``penalty`` times the share of the completion's runs of ``words`` words that occurred before in it.

    Raises:
        ValueError: ``words`` is not positive.
    """
    if words < 1:
        raise ValueError(f"repetition: words must be at least 1, got {words}")
    text = sample.completion.lower().split()
    runs = list(zip(*(text[start:] for start in range(words))))
    return penalty * (1 - len(set(runs)) / len(runs)) if runs else 0.0


def _is_correct(sample: Sample) -> bool:
    try:
        return same_value(sample) == 1
    except Unparseable as error:
        if error.which == "reference":
            raise
        return False
