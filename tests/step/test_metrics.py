from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.config.learning import LossConfig, RolloutConfig
from oarjax.rl.advantages import zero_variance_groups
from oarjax.step.loss import GAP_COUNTS, bound_loss, gap_metrics, token_loss
from oarjax.step.metrics import lag_of, rollout_metrics
from oarjax.types import Grades, Mean, Origin, Rollout, TrainBatch


def test_metrics_of_a_hand_made_rollout():
    # two groups of two: lengths 1, 3 | 2, 3 of 3; the last row is cut, the third ungraded
    completion = np.arange(3) < np.array([1, 3, 2, 3])[:, None]
    rollout = Rollout(
        tokens=np.zeros((4, 5), np.int32),
        valid=np.concatenate([np.array([[0, 1], [0, 1], [1, 1], [1, 1]], bool), completion], 1),
        completion=completion,
        behaviour_logps=np.zeros((4, 3), np.float32),
        filtered_logps=np.zeros((4, 3), np.float32),
        ended=np.array([True, True, True, False]),
    )
    rewards = np.float32([1, 0, np.nan, 1])
    verdicts = ["graded", "graded", "timeout", "graded"]
    grades = Grades(rewards, {"math": rewards}, verdicts, ["1"] * 4, [""] * 4)
    equal = np.asarray(zero_variance_groups(jnp.asarray(rewards), group_size=2))
    m = rollout_metrics(rollout, grades, equal=equal)
    assert m["reward"] == pytest.approx(2 / 3)
    assert m["ungraded"] == 1 / 4
    assert m["verdict/timeout"] == 1 / 4
    assert m["zero_variance"] == 1 / 2  # the second group has one graded reward
    assert (m["length"], m["length_max"], m["truncated"]) == (9 / 4, 3, 1 / 4)
    assert (m["prompt_tokens"], m["completion_tokens"]) == (6, 9)
    assert m["groups_drawn"] == 2
    assert m["reward/math"] == pytest.approx(2 / 3)


def test_all_ungraded_is_not_a_reward_of_zero():
    ones = np.ones((2, 1), bool)
    rollout = Rollout(np.zeros((2, 2)), np.ones((2, 2), bool), ones, ones * 0.0, ones * 0.0, np.ones(2, bool))
    grades = Grades(np.full(2, np.nan, np.float32), {}, ["crash"] * 2, [None] * 2, [""] * 2)
    m = rollout_metrics(rollout, grades, equal=np.ones(1, bool))
    assert np.isnan(m["reward"])
    assert (m["ungraded"], m["zero_variance"]) == (1, 1)


def test_the_lag_is_a_mean_over_tokens():
    completion = np.array([[True, True, False], [True, True, True]])
    versions = np.where(completion, np.array([[4], [5]], np.int32), -1).astype(np.int32)
    origin = Origin(np.zeros((2, 3), np.int32), versions, np.zeros(2, np.int32))
    zeros = np.zeros((2, 3), np.float32)
    rollout = Rollout(np.zeros((2, 3)), completion, completion, zeros, zeros, np.ones(2, bool), origin=origin)
    assert lag_of(rollout, 6) == pytest.approx((2 * 1 + 3 * 0) / 5)
    assert lag_of(rollout, 8) == pytest.approx((2 * 3 + 3 * 2) / 5)


def spread(gaps, **settings):
    """The metrics of one row per gap of 100 tokens, of which so many differ by it and the others by nothing."""
    behaviour = np.zeros((len(gaps), 100), np.float32)
    for row, (count, gap) in zip(behaviour, gaps):
        row[:count] = gap
    mask, zeros = jnp.ones(behaviour.shape, bool), jnp.zeros(behaviour.shape)
    batch = TrainBatch(zeros.astype(int), mask, mask, zeros + 1, None, None, jnp.asarray(behaviour))  # type: ignore[arg-type]
    loss = token_loss(LossConfig(**settings), RolloutConfig(max_new=100), lag=1)
    return loss(zeros, zeros, batch)


@pytest.mark.parametrize(
    ("gaps", "p99", "largest"),
    [
        ([(0, 0.0), (0, 0.0)], 2.0**-20, 2.0**-20),  # the lowest bound
        ([(1, 0.5), (0, 0.0)], 2.0**-20, 0.5),
        ([(100, 0.2), (1, -3.0)], 2.0**-2.25, 2.0**1.75),
        ([(3, 0.26), (1, 0.1)], 2.0**-1.75, 2.0**-1.75),
    ],
)
def test_percentile_and_maximum_of_the_gap_are_read_from_counts_of_microbatches(gaps, p99, largest):
    """Each is the first bound at or above it, and two microbatches add up to one."""
    parts = [spread([each])[1] for each in gaps]
    counts = parts[0][GAP_COUNTS] + parts[1][GAP_COUNTS]
    found = gap_metrics(counts)
    assert (found["sampler_gap/p99"], found["sampler_gap/max"]) == (pytest.approx(p99), pytest.approx(largest))
    whole = spread(gaps)[1]
    np.testing.assert_array_equal(counts.total, whole[GAP_COUNTS].total)
    assert gap_metrics(None) == {}
    assert gap_metrics(Mean(counts.total * 0, counts.count * 0)) == {}


def test_weights_at_a_bound_are_counted_as_truncated():
    settings: Any = {"off_policy": {"weighting": "token_truncate", "low": 0.5, "high": 2.0}}
    mean, metrics = spread([(4, 1.0), (6, -1.0), (7, 0.1)], **settings)  # ratios e^-1, e, e^-.1
    assert float(metrics["sampler_truncated"].value) == pytest.approx(10 / 300)
    assert "sampler_truncated" not in spread([(4, 1.0)])[1]
    plain = bound_loss(LossConfig(**settings), max_length=100)
    assert token_loss(LossConfig(), RolloutConfig(max_new=100), lag=0).func is plain.func  # type: ignore[attr-defined]
    assert float(mean.total) == pytest.approx(-(4 * 0.5 + 6 * 2 + 7 * np.exp(-0.1) + 283), rel=1e-5)
