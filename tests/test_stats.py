"""Accuracy by hand: pass@k against enumeration, majorities and ties, intervals, paired differences."""

from __future__ import annotations

import json
from dataclasses import astuple
from itertools import combinations
from math import comb, nan, sqrt

import numpy as np
import pytest
from scipy.stats import bootstrap, nct, norm, t

from oarjax.credit.answer_text import extract_answer
from oarjax.grading.rewards import Sample, Unparseable, find_rewards
from oarjax.stats import (
    Interval,
    answer_numbers,
    bootstrap_interval,
    chi_square_tail,
    clustered_share_interval,
    detectable_effect,
    holm,
    jackknife_interval,
    majority_correct,
    mean_interval,
    mean_score,
    paired_difference,
    paired_p_value,
    pass_at_k,
    powers_up_to,
    share_interval,
    wilson_interval,
)


def scores(*rows):
    return np.asarray(rows, float)


def test_pass_at_k_by_hand():
    # Two of four right: 1 - C(2, k) / C(4, k) = 1/2, 5/6, 1, 1.
    found = [pass_at_k(scores([1, 0, 0, 1]), k=k)[0] for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(found, [1 / 2, 5 / 6, 1, 1], rtol=1e-12)


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 3), (5, 5), (1, 0), (1, 1)])
def test_pass_at_k_is_the_mean_over_all_ways_to_choose_k(n, c):
    row = [1.0] * c + [0.0] * (n - c)
    for k in range(1, n + 1):
        expected = np.mean([max(chosen) for chosen in combinations(row, k)])
        np.testing.assert_allclose(pass_at_k(scores(row), k=k), [expected], rtol=1e-12)


def test_pass_at_k_stands_many_samples():
    row = np.zeros((1, 5000))
    row[0, :7] = 1
    exact = 1 - comb(4993, 600) / comb(5000, 600)  # integers of any length
    np.testing.assert_allclose(pass_at_k(row, k=600), [exact], rtol=1e-10)


def test_pass_at_k_counts_only_what_was_graded():
    rows = scores([1, nan, 0, nan], [nan, nan, nan, 1], [nan, nan, nan, nan])
    np.testing.assert_allclose(pass_at_k(rows, k=1), [0.5, 1, nan])
    np.testing.assert_allclose(pass_at_k(rows, k=2), [1, nan, nan])


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_refuses_more_than_there_are(k):
    with pytest.raises(ValueError, match=r"expected k within 1\.\.2"):
        pass_at_k(scores([1, 0]), k=k)


def test_avg_is_pass_at_1_for_right_and_wrong():
    rows = np.random.default_rng(0).integers(0, 2, (20, 8)).astype(float)
    np.testing.assert_allclose(mean_score(rows), pass_at_k(rows, k=1))
    np.testing.assert_allclose(mean_score(scores([0.5, nan], [nan, nan])), [0.5, nan])


def test_the_majority_wins_and_the_first_of_equals():
    answers = answer_numbers([["7", "8", "8"], ["7", "8", None], ["8", "7", None], [None, None, None]])
    assert answers.tolist() == [[0, 1, 1], [0, 1, -1], [0, 1, -1], [-1, -1, -1]]
    right = scores([1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0])
    assert majority_correct(answers, right).tolist() == [0, 1, 0, 0]


def test_majority_of_what_was_not_graded():
    answers = answer_numbers([["7", "7", "8"], ["7", "7", "8"], [None, None, None]])
    right = scores([nan, 1, 0], [nan, nan, 0], [nan, nan, nan])
    np.testing.assert_array_equal(majority_correct(answers, right), [1, nan, nan])


def test_interval_by_hand():
    # Mean 2, deviation 1, t(0.975, 2) = 4.302653.
    found = mean_interval(np.asarray([1.0, 2, 3, nan]))
    half = 4.302653 / sqrt(3)
    np.testing.assert_allclose(astuple(found), (2, 2 - half, 2 + half, 3), rtol=1e-6)
    assert found.half == pytest.approx(half, rel=1e-6)
    normal = mean_interval(np.asarray([1.0, 2, 3]), quantile="normal")
    assert normal.half == pytest.approx(1.959964 / sqrt(3), rel=1e-6)
    np.testing.assert_equal(astuple(mean_interval(np.asarray([7.0]))), (7.0, nan, nan, 1))
    np.testing.assert_equal(astuple(mean_interval(np.asarray([nan]))), (nan, nan, nan, 0))
    np.testing.assert_equal(astuple(mean_interval(np.asarray([2.0, 2.0]))), (2.0, 2.0, 2.0, 2))


def test_shares_stay_within_0_and_1_and_have_a_width():
    found = share_interval(np.asarray([1.0] * 9 + [0]))
    assert found.mean == 0.9
    assert 0 < found.low < 0.9
    assert found.high == 1
    z2 = norm.ppf(0.975) ** 2
    np.testing.assert_allclose(astuple(share_interval(np.zeros(30))), (0, 0, z2 / (30 + z2), 30))
    np.testing.assert_allclose(astuple(share_interval(np.ones(30))), (1, 30 / (30 + z2), 1, 30))


def test_intervals_hold_the_truth_95_times_in_100():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        found = share_interval(rng.binomial(4, rng.beta(2, 2, 60)) / 4)
        hits += found.low <= 0.5 <= found.high
    assert 925 <= hits <= 975


def test_a_paired_difference_is_narrower_than_two_intervals():
    hard = np.random.default_rng(2).random(200)
    ours, theirs = np.clip(hard + 0.1, 0, 1), np.clip(hard, 0, 1)
    found = paired_difference(ours, theirs)
    assert 0 < found.low < found.mean < 0.1
    assert found.high - found.low < 0.02
    assert paired_difference(np.asarray([1.0, nan, 1]), np.asarray([0.0, 1, nan])).count == 1


def test_a_paired_difference_needs_the_same_problems(unchecked):
    with pytest.raises(ValueError, match="expected the same problems, got 2 and 3"):
        paired_difference(np.zeros(2), np.zeros(3))


def test_wilson_interval_by_hand():
    # p = 1/2, n = 4, z = 2: centre (1/2 + 1/2) / 2 = 1/2, half = 2 / 2 * sqrt(1/16 + 4/64) = sqrt(1/8)
    assert wilson_interval(0.5, 4, z=2.0) == pytest.approx((0.5 - sqrt(1 / 8), 0.5 + sqrt(1 / 8)))
    # p = 1, n = 4, z = 2: (1 + 4/8 ± 2 sqrt(4/64)) / 2 = 1/2 and 1
    assert wilson_interval(1.0, 4, z=2.0) == pytest.approx((0.5, 1.0))
    with pytest.raises(ValueError, match="count > 0"):
        wilson_interval(0.5, 0)


def test_clustered_shares_of_one_seed_are_wilsons_and_repeats_add_nothing():
    verdicts = scores([1], [0], [1], [1], [0])
    expected = (0.6, *wilson_interval(0.6, 5), 5)
    assert astuple(clustered_share_interval(verdicts)) == pytest.approx(expected)
    assert astuple(clustered_share_interval(np.repeat(verdicts, 4, axis=1))) == pytest.approx(expected)


def test_clustered_shares_count_no_more_than_the_scores_and_leave_ungraded_out():
    alternating = scores([1, 0], [0, 1], [1, 0])  # every problem 1/2: no spread between problems
    assert astuple(clustered_share_interval(alternating)) == pytest.approx((0.5, *wilson_interval(0.5, 6), 3))
    alike = np.array([[1.0, 0.0]] * 9 + [[1.0, 1.0]])  # their spread is that of 110 coin tosses; there were 20
    assert astuple(clustered_share_interval(alike)) == pytest.approx((0.55, *wilson_interval(0.55, 20), 10))
    with_gaps = clustered_share_interval(scores([1], [0], [nan]))
    assert astuple(with_gaps) == pytest.approx((0.5, *wilson_interval(0.5, 2), 2))
    assert astuple(clustered_share_interval(np.ones((9, 2)))) == pytest.approx((1, *wilson_interval(1.0, 9), 9))
    assert clustered_share_interval(scores([nan], [nan])).count == 0


# Bootstrap


def test_bootstrap_is_scipys():
    """The same draws and quantiles as SciPy's percentile bootstrap of that seed."""
    values = np.random.default_rng(0).normal(2.0, 1.0, 40)
    found = bootstrap_interval(values, resamples=500, seed=1)
    expected = bootstrap(
        (values,), np.mean, n_resamples=500, method="percentile", random_state=np.random.default_rng(1)
    ).confidence_interval
    np.testing.assert_allclose((found.low, found.high), (expected.low, expected.high), rtol=1e-12)
    assert (found.mean, found.count) == (pytest.approx(values.mean()), 40)
    assert bootstrap_interval(values, resamples=500, seed=2) != found


def test_bootstrap_intervals_cover_the_truth():
    """95% of intervals over 50 uniform draws hold the mean of .5; of 200, 10 misses are expected, 25 are too many."""
    draw = np.random.default_rng(3)
    found = [bootstrap_interval(draw.uniform(size=50), resamples=400, seed=0) for _ in range(200)]
    missed = sum(not f.low <= 0.5 <= f.high for f in found)
    assert 1 <= missed <= 25


def test_bootstrap_leaves_undefined_values_out_and_few_have_no_interval():
    assert bootstrap_interval(np.array([nan, 1.0, 3.0, np.inf]), resamples=50, seed=0).count == 2
    single = bootstrap_interval(np.array([nan, 2.0]), resamples=50, seed=0)
    np.testing.assert_equal(astuple(single), (2.0, nan, nan, 1))
    nothing = bootstrap_interval(np.array([nan]), resamples=50, seed=0)
    np.testing.assert_equal(astuple(nothing), (nan, nan, nan, 0))
    assert bootstrap_interval(np.ones(5), resamples=50, seed=0) == Interval(1.0, 1.0, 1.0, 5)


def test_bootstrap_draws_the_values_of_a_problem_together():
    """Groups of equal values: the interval is that of one value each, and wider than that of independent ones."""
    values, owners = np.random.default_rng(0).normal(2.0, 1.0, 40), np.repeat(np.arange(40), 8)
    grouped = bootstrap_interval(np.repeat(values, 8), resamples=2000, seed=1, problems=owners)
    alone = bootstrap_interval(values, resamples=2000, seed=1)
    np.testing.assert_allclose(astuple(grouped), astuple(alone))
    assert grouped.half > 2 * bootstrap_interval(np.repeat(values, 8), resamples=2000, seed=1).half
    rows = np.array([1.0, 1.0, 1.0, 0.0, nan])
    uneven = bootstrap_interval(rows, resamples=500, seed=0, problems=np.array([7, 7, 7, 3, 5]))
    assert astuple(uneven) == (0.75, 0.0, 1.0, 2)
    single = bootstrap_interval(np.array([1.0, 2.0]), resamples=50, seed=0, problems=np.zeros(2, int))
    np.testing.assert_equal(astuple(single), (1.5, nan, nan, 1))


def test_ks_that_are_shown():
    assert [powers_up_to(k) for k in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_labelled_outputs(data):
    """Outputs with hand-set labels: extraction and reward give the labels, and the figures follow from them."""
    lines = (data / "grading" / "labelled_outputs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    (math_reward,) = find_rewards(["math"])
    found, labels, answers = [], [], []
    for row in rows:
        given = [extract_answer(text, style="boxed") for text in row["outputs"]]
        samples = [Sample(row["question"], text, row["answer"], extracted=a) for text, a in zip(row["outputs"], given)]
        found.append([math_reward(sample) for sample in samples])
        labels.append(row["correct"])
        answers.append(given)
    assert found == labels
    right = scores(*labels)
    np.testing.assert_allclose(pass_at_k(right, k=1).mean(), (3 / 4 + 1 / 4 + 0 + 2 / 4) / 4)
    np.testing.assert_allclose(pass_at_k(right, k=2).mean(), (1 + 1 / 2 + 0 + 5 / 6) / 4)
    np.testing.assert_allclose(majority_correct(answer_numbers(answers), right), [1, 0, 0, 1])


def test_real_labelled_outputs(shared):
    """Eight outputs a problem with published labels: the figures from our grading are those from the labels."""
    lines = (shared / "data" / "math_model_outputs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:12]
    (math_reward,) = find_rewards(["math"])

    def score(row, text):
        try:
            found = extract_answer(text, style="boxed")
            return math_reward(Sample(row["question"], text, row["gt"], extracted=found))
        except Unparseable as error:
            return 0.0 if error.which == "answer" else nan

    ours = scores(*[[score(row, text) for text in row["outputs"]] for row in rows])
    theirs = scores(*[[float(s) for s in row["score"]] for row in rows])
    known = np.isfinite(ours).all(1)
    assert known.sum() >= 11  # one reference is a time of the day
    for k in powers_up_to(ours.shape[1]):
        np.testing.assert_allclose(pass_at_k(ours, k=k)[known], pass_at_k(theirs, k=k)[known])


def test_p_values_by_hand():
    # Differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.464 on 2 degrees of freedom, P(|T| > t) = 1 - t / sqrt(t^2 + 2).
    found = paired_p_value(np.array([1.0, 3.0, 5.0]), np.array([0.0, 1.0, 2.0]))
    assert found == pytest.approx(1 - sqrt(12 / 14))
    assert np.isnan(paired_p_value(np.array([1.0]), np.array([0.0])))
    assert np.isnan(paired_p_value(np.array([1.0, 2.0]), np.array([0.0, 1.0])))  # no spread


def test_holm_by_hand():
    # Sorted .01 x 4, .02 x 3, .03 x 2, .5 x 1, none below one before it.
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    found = holm([nan, 0.02])
    assert np.isnan(found[0])
    assert found[1] == pytest.approx(0.04)  # a comparison that is missing was still planned


def test_jackknife_of_a_mean_is_students_interval():
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0])
    left_out = np.array([np.delete(values, i).mean() for i in range(5)])
    found, wanted = jackknife_interval(values.mean(), left_out), mean_interval(values)
    assert (found.mean, found.count) == (4, 5)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert np.isnan(jackknife_interval(4.0, np.array([1.0, np.nan, 2.0])).low)
    assert np.isnan(jackknife_interval(np.nan, left_out).low)


@pytest.mark.parametrize(("square", "freedom", "chance"), [(44.985, 31, 0.05), (61.098, 31, 0.001), (30.336, 31, 0.5)])
def test_chi_square_tail_is_that_of_a_table(square, freedom, chance):
    assert chi_square_tail(square, freedom=freedom) == pytest.approx(chance, rel=1e-3)


@pytest.mark.parametrize("count", [6, 24])
@pytest.mark.parametrize("power", [0.8, 0.95])
def test_the_test_finds_a_detectable_effect_as_often_as_said(count, power):
    """By the noncentral t distribution, which the sum of two quantiles approximates."""
    effect = detectable_effect(2.0, count, power=power)
    beyond = t.ppf(0.975, count - 1)
    found = nct.sf(beyond, count - 1, effect / 2.0 * sqrt(count))
    assert found == pytest.approx(power, abs=0.02)
    assert np.isnan(detectable_effect(2.0, 1))
