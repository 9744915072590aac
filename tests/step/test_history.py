"""The rewards that a run remembers by problem."""

import json

import numpy as np
import pytest

from oarjax.step.history import RewardHistory


def test_mean_and_spread_are_those_of_all_earlier_rewards():
    history, draw = RewardHistory(), np.random.default_rng(0)
    seen = {problem: [] for problem in (4, 7)}
    for _ in range(5):
        rewards = draw.random((3, 2)).astype(np.float32)
        rewards[0, 1] = np.nan
        history.add(np.array([7, 4, 7]), rewards.reshape(-1))
        seen[7] += [*rewards[0, :1], *rewards[2]]
        seen[4] += [*rewards[1]]
    past = history.of(np.array([4, 4, 7, 9]))
    np.testing.assert_array_equal(past.seen, [True, True, True, False])
    np.testing.assert_allclose(past.mean, [np.mean(seen[4])] * 2 + [np.mean(seen[7]), 0], rtol=1e-6)
    np.testing.assert_allclose(past.std, [np.std(seen[4], ddof=1)] * 2 + [np.std(seen[7], ddof=1), 0], rtol=1e-6)


def test_equal_rewards_stay_exactly_their_mean():
    """So that a row with the same reward has an advantage of exactly 0."""
    history = RewardHistory(discount=0.7)
    for count in (1, 3, 7):
        history.add(np.array([0]), np.full(count, 0.1, np.float32))
        past = history.of(np.array([0]))
        assert (past.mean[0], past.std[0]) == (np.float32(0.1), 0)


def test_ungraded_problems_stay_unseen():
    history = RewardHistory()
    history.add(np.array([3]), np.array([np.nan]))
    assert not history.of(np.array([3])).seen.any()


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_a_history_that_went_through_a_file_goes_on_bit_for_bit(discount):
    draw, problems = np.random.default_rng(1), np.arange(6)
    whole, parts = RewardHistory(discount=discount), RewardHistory(discount=discount)
    for _ in range(9):
        rewards = draw.random(12).astype(np.float32)
        for history in (whole, parts):
            history.add(problems, rewards)
        saved, parts = json.dumps(parts.state()), RewardHistory(discount=discount)
        parts.restore(json.loads(saved))
    assert parts.state() == whole.state()
    for a, b in zip(whole.of(problems), parts.of(problems)):
        np.testing.assert_array_equal(a, b)
