import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.rl.advantages import zero_variance_groups
from oarjax.step.metrics import rollout_metrics
from oarjax.types import Grades, Rollout


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
