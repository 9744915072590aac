"""Advantages of a group and the penalty of long completions: hand-worked cases and invariances."""

import itertools
import json
from functools import partial

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from oarjax.rl.advantages import (
    PastRewards,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    problem_advantages,
    zero_variance_groups,
)
from oarjax.step.history import RewardHistory

NAN = jnp.nan
REWARDS = jnp.array([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, NAN, 3.0, NAN])


@pytest.mark.parametrize(
    ("scale", "ddof", "first", "third"),
    [
        # group 1: mean .5, squares 4 * .25 = 1; std sqrt(1/3).   group 3: mean 2, squares 2; std sqrt(2/1)
        ("group", 1, 0.5 * 3**0.5, 2**-0.5),
        # std sqrt(1/4) = .5 and sqrt(2/2) = 1
        ("group", 0, 1.0, 1.0),
        # ten graded rewards, mean 1.4, squares 2 * .16 + 2 * 1.96 + 4 * .36 + .16 + 2.56 = 8.4; variance 8.4 / 9
        ("batch", 1, 0.5 / (8.4 / 9) ** 0.5, 1 / (8.4 / 9) ** 0.5),
        ("none", 1, 0.5, 1.0),
    ],
)
def test_group_advantages_hand_worked(scale, ddof, first, third):
    advantages = group_advantages(REWARDS, group_size=4, scale=scale, ddof=ddof, eps=0.0)
    expected = [first, -first, -first, first, 0, 0, 0, 0, -third, 0, third, 0]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_batch_advantages_hand_worked():
    """Four graded rewards of mean 1.5; the others of 0 have mean 2."""
    rewards = jnp.array([0.0, 1.0, NAN, 2.0, 3.0])
    of_all = batch_advantages(rewards, scale="none")
    np.testing.assert_allclose(of_all, [-1.5, -0.5, 0, 0.5, 1.5], rtol=1e-6)
    of_others = batch_advantages(rewards, leave_one_out=True, scale="none")
    np.testing.assert_allclose(of_others, [-2, -2 / 3, 0, 2 / 3, 2], rtol=1e-6)
    scaled = batch_advantages(rewards, eps=0.0)
    np.testing.assert_allclose(scaled, np.array([-1.5, -0.5, 0, 0.5, 1.5]) / (5 / 3) ** 0.5, rtol=1e-6)
    for equal in (jnp.full(3, 0.1), jnp.array([NAN, 2.0, NAN])):
        assert not batch_advantages(equal).any()
        assert not batch_advantages(equal, leave_one_out=True).any()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_gradient_of_a_batch_by_enumeration(n):
    """n draws of an action of probability p and reward 1: the true gradient by its logit is p (1 - p).

    Against the mean of the others the estimate is unbiased, against the mean of all it is short by 1 - 1/n, and divided
    by the std it is neither.
    """
    p, found = 0.3, {}
    settings = {"others": {"leave_one_out": True, "scale": "none"}, "all": {"scale": "none"}, "std": {"scale": "batch"}}
    for name, setting in settings.items():
        total = 0.0
        for actions in itertools.product((0.0, 1.0), repeat=n):
            chance = np.prod([p if action else 1 - p for action in actions])
            slopes = np.array(actions) - p  # of the log-probability by the logit
            total += chance * float(np.mean(slopes * np.asarray(batch_advantages(jnp.array(actions), **setting))))
        found[name] = total / (p * (1 - p))
    assert found["others"] == pytest.approx(1, rel=1e-5)
    assert found["all"] == pytest.approx(1 - 1 / n, rel=1e-5)
    assert abs(found["std"] - 1) > 0.05
    assert abs(found["std"] - (1 - 1 / n)) > 0.05


def past(seen, mean, std) -> PastRewards:
    return PastRewards(jnp.array(seen), jnp.array(mean), jnp.array(std))


def test_problem_advantages_hand_worked():
    """Baselines .5, .25 and, for the two that were never seen, the batch's mean 1 of the four graded rewards."""
    rewards = jnp.array([1.0, 0.25, 2.0, 0.75, NAN])
    before = past([True, True, False, False, True], [0.5, 0.25, 0.0, 0.0, 0.5], [0.5, 0.0, 0.0, 0.0, 0.5])
    np.testing.assert_allclose(problem_advantages(rewards, before, scale="none"), [0.5, 0, 1, -0.25, 0], rtol=1e-6)
    size = ((0.25 + 1 + 0.0625) / 3) ** 0.5
    by_batch = problem_advantages(rewards, before, eps=0.0)
    np.testing.assert_allclose(by_batch, np.array([0.5, 0, 1, -0.25, 0]) / size, rtol=1e-6)
    by_problem = problem_advantages(rewards, before, scale="problem", eps=0.0)
    np.testing.assert_allclose(by_problem, [1, 0, 1 / size, -0.25 / size, 0], rtol=1e-6)
    others = problem_advantages(rewards, before, leave_one_out=True, scale="none")
    np.testing.assert_allclose(others, [0.5, 0, 4 / 3, -1 / 3, 0], rtol=1e-6)


@pytest.mark.parametrize("scale", ["batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_problem_that_was_never_seen_has_the_batchs_advantages(scale, leave_one_out):
    rewards = jnp.array([0.0, 1.0, NAN, 2.0, 3.0])
    of_batch = batch_advantages(rewards, leave_one_out=leave_one_out, scale=scale)
    for before in (None, past([False] * 5, [0.0] * 5, [0.0] * 5)):
        ours = problem_advantages(rewards, before, leave_one_out=leave_one_out, scale=scale)
        np.testing.assert_allclose(ours, of_batch, rtol=1e-6)


def test_an_older_baseline_is_unbiased_by_enumeration():
    """Three draws of an action of probability .3 and reward 1, against any past: the gradient is exact."""
    p, total = 0.3, 0.0
    before = past([True] * 3, [0.9, 0.0, 0.2], [0.1] * 3)
    for actions in itertools.product((0.0, 1.0), repeat=3):
        chance = np.prod([p if action else 1 - p for action in actions])
        advantages = np.asarray(problem_advantages(jnp.array(actions), before, scale="none"))
        total += chance * float(np.mean((np.array(actions) - p) * advantages))
    assert total == pytest.approx(p * (1 - p), rel=1e-5)


@pytest.fixture
def published(data):
    """Load what published code gives: verl's two REINFORCE++, and the tracker of SPO with a constant discount.

    verl's functions ran on a row's reward at its last token, with gamma 1. Of SPO's trainer the lines that hold alpha,
    beta and the advantages ran by themselves. Not in ``advantage.method: problem``: its prior from samples of the start
    policy (a history can be restored to one), its discount by the KL since a problem's last visit, its sampling of
    prompts by sqrt(p (1 - p)), and the mean that its normalisation subtracts.
    """
    return json.loads((data / "advantages" / "verl.json").read_text())


@pytest.mark.parametrize("rows", ["level", "ragged"])
def test_a_batch_is_reinforce_plus_plus_that_counts_a_row_once_per_token(published, rows):
    case = published["reinforce_plus_plus"][rows]
    lengths, rewards = np.array(case["lengths"]), np.array(case["rewards"], np.float32)
    first = np.cumsum(lengths) - lengths
    by_token = batch_advantages(jnp.repeat(jnp.array(rewards), lengths), eps=0.0)
    np.testing.assert_allclose(by_token[first], case["whitened"], rtol=1e-5)
    by_row = np.asarray(batch_advantages(jnp.array(rewards), ddof=0, eps=0.0)) * np.sqrt(1 - 1 / lengths.sum())
    assert np.allclose(by_row, case["whitened"], rtol=1e-5) == (rows == "level")


@pytest.mark.parametrize("rows", ["level", "ragged"])
def test_rloo_over_the_batchs_std_is_reinforce_plus_plus_baseline(published, rows):
    """G / (G - 1) of the mean of the others cancels. Again verl counts tokens, so ragged rows differ."""
    case = published["reinforce_plus_plus"][rows]
    lengths, rewards = np.array(case["lengths"]), jnp.array(case["rewards"])
    first = np.cumsum(lengths) - lengths
    others = leave_one_out_advantages(rewards, group_size=case["group_size"])
    by_token = batch_advantages(jnp.repeat(others, lengths), eps=0.0)
    np.testing.assert_allclose(by_token[first], case["baseline"], rtol=1e-5)
    ours = leave_one_out_advantages(rewards, group_size=case["group_size"], scale="batch", ddof=0, eps=0.0)
    by_row = np.asarray(ours) * np.sqrt(1 - 1 / lengths.sum())
    assert np.allclose(by_row, case["baseline"], rtol=1e-5) == (rows == "level")


def test_a_problems_past_is_the_tracker_of_spo_from_its_prior_on(published):
    spo = published["spo"]
    history = RewardHistory(discount=spo["discount"])
    history.restore({problem: [a + b, a / (a + b), 0] for problem, (a, b) in spo["prior"].items()})
    for step in spo["iterations"]:
        problems, rewards = np.array(step["problems"]), np.array(step["rewards"], np.float32)
        known = history.of(problems)
        np.testing.assert_allclose(known.mean, step["baselines"], rtol=1e-6)
        ours = np.asarray(problem_advantages(jnp.array(rewards), known, scale="none"))
        centred = (ours - ours.mean()) / ours.std(ddof=1)
        np.testing.assert_allclose(centred, step["normalised"], rtol=1e-5)
        history.add(problems, rewards)


def test_eps_is_added_to_the_std():
    # std of (0, 1) with ddof 0 is .5: .5 / (.5 + .25)
    advantages = group_advantages(jnp.array([0.0, 1.0]), group_size=2, ddof=0, eps=0.25)
    np.testing.assert_allclose(advantages, [-2 / 3, 2 / 3], rtol=1e-6)


def test_zero_variance_groups():
    # mixed, equal, one graded, none graded, equal among the graded
    rewards = jnp.array([0.0, 1.0, 0.5, 0.5, 1.0, NAN, NAN, NAN])
    np.testing.assert_array_equal(zero_variance_groups(rewards, group_size=2), [False, True, True, True])
    rewards = jnp.array([0.3, NAN, 0.3, 0.3, 0.2, NAN])
    np.testing.assert_array_equal(zero_variance_groups(rewards, group_size=3), [True, False])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    # the float32 mean of seven rewards of .1 is not .1, and eps may be 0
    rewards = jnp.concatenate([jnp.full(7, 0.1), jnp.arange(7.0)])
    assert (group_advantages(rewards, group_size=7, scale=scale, eps=0.0)[:7] == 0).all()


def test_all_rewards_missing():
    assert (group_advantages(jnp.full(4, NAN), group_size=2, scale="batch") == 0).all()


@settings(max_examples=15, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, np.nan]), min_size=12, max_size=12),
    scale=st.sampled_from(["group", "batch", "none"]),
    seed=st.integers(0, 99),
)
def test_advantages_follow_their_rows(rewards, scale, seed):
    """Centred in each group; permuting groups, or rows inside them, permutes the result; a shift changes nothing."""
    rng, rewards = np.random.default_rng(seed), np.asarray(rewards, np.float32)
    advantages = np.asarray(group_advantages(jnp.asarray(rewards), group_size=4, scale=scale))
    assert np.isfinite(advantages).all()
    np.testing.assert_allclose(advantages.reshape(3, 4).sum(1), 0, atol=1e-5)
    order = np.concatenate([g * 4 + rng.permutation(4) for g in rng.permutation(3)])
    for other in (rewards, rewards + 8):
        moved = group_advantages(jnp.asarray(other[order]), group_size=4, scale=scale)
        np.testing.assert_allclose(moved, advantages[order], atol=1e-5)


def test_ragged_groups_are_refused():
    with pytest.raises(
        ValueError, match=r"^group_advantages: rewards: 7 rows are not whole groups of 4; pad the last group with NaN"
    ):
        group_advantages(jnp.zeros(7), group_size=4)


def test_overlong_penalty_hand_worked():
    # limit 100, window 20: nothing up to 80, 90 is half way, all of it at 100
    lengths = jnp.array([10, 80, 85, 90, 100, 120])
    penalty = partial(overlong_penalty, max_length=100, penalty=2.0)
    np.testing.assert_allclose(penalty(lengths, window=20), [0, 0, 0.5, 1, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(penalty(lengths, window=0), [0, 0, 0, 0, 0, 2])
    with pytest.raises(ValueError, match=r"window must be in 0 \.\. max_length = 100 tokens, got 101"):
        penalty(lengths, window=101)


def test_an_unknown_scale_is_named():
    with pytest.raises(ValueError, match="scale must be group, batch or none, got 'nonsense'"):
        group_advantages(REWARDS, group_size=4, scale="nonsense")  # pyright: ignore[reportArgumentType]
