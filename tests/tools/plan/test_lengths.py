"""Expected work under a distribution of lengths, by hand and against simulated rollouts."""

import numpy as np
import pytest

from oarjax.tools.plan.lengths import (
    empirical_survival,
    expected_decoding,
    lognormal_survival,
    mean_length,
    padding_share,
    sorted_lengths,
    unit_survival,
)


def power_of_two(n):
    return 1 << (n - 1).bit_length()


def test_lengths_that_are_all_alike():
    survival = empirical_survival([3, 3], limit=5)
    np.testing.assert_array_equal(survival, [1, 1, 1, 0, 0])
    assert mean_length(survival) == 3
    found = expected_decoding(survival, rows=4, segment=2, row_bucket=lambda n: n, slots_at=lambda t: t + 2)
    # Steps 0, 1 with 4 rows and 2 slots; step 2 with 4 rows and 4 slots.
    assert found == (3, 12, 4 * 2 * 2 + 4 * 4, 1.0)


def test_two_lengths_by_hand():
    # Length 1 or 2 with chance 1/2 each, two rows, a border after each step: 3/4 of the rollouts take a second step,
    # with one row (chance 1/2) or two (1/4).
    found = expected_decoding(
        empirical_survival([1, 2], limit=2), rows=2, segment=1, row_bucket=lambda n: n, slots_at=lambda t: 1
    )
    assert found.steps == pytest.approx(1.75)
    assert found.row_steps == pytest.approx(2 + 1 * 0.5 + 2 * 0.25)
    assert found.occupancy == pytest.approx(1)


def test_a_lognormal_has_its_mean_and_median():
    survival = lognormal_survival(mean=100, sigma=0.6, limit=5000)
    assert mean_length(survival) == pytest.approx(100.5, abs=0.1)  # rounded up
    median = int(np.searchsorted(1 - survival, 0.5))
    assert median == pytest.approx(100 * np.exp(-0.18), abs=1)
    assert mean_length(lognormal_survival(mean=100, sigma=0.6, limit=50)) < 50


def test_decoding_against_simulated_rollouts():
    rows, segment, limit = 16, 8, 96
    survival = lognormal_survival(mean=24, sigma=0.7, limit=limit)
    found = expected_decoding(
        survival, rows=rows, segment=segment, row_bucket=power_of_two, slots_at=lambda t: t + segment
    )
    rng = np.random.default_rng(0)
    steps, row_steps, slots = [], [], []
    for _ in range(4000):
        lengths = np.searchsorted(1 - survival, rng.random(rows), side="left").clip(1, limit)
        totals = [0, 0, 0]
        for start in range(0, limit, segment):
            left = int((lengths > start).sum())
            if not left:
                break
            n = min(segment, lengths.max() - start)
            totals[0] += n
            totals[1] += n * power_of_two(left)
            totals[2] += n * power_of_two(left) * (start + segment)
        steps.append(totals[0]), row_steps.append(totals[1]), slots.append(totals[2])
    assert found.steps == pytest.approx(np.mean(steps), rel=0.02)
    assert found.row_steps == pytest.approx(np.mean(row_steps), rel=0.02)
    assert found.slot_reads == pytest.approx(np.mean(slots), rel=0.03)


def test_sorted_microbatches_pad_less():
    survival = lognormal_survival(mean=400, sigma=0.6, limit=1024)
    alone = sorted_lengths(survival, rows=64, microbatch=64)
    cut = sorted_lengths(survival, rows=64, microbatch=8)
    assert len(cut) == 8
    assert cut == sorted(cut, reverse=True)
    assert cut[0] == alone[0]
    whole = padding_share(survival, alone, rows=64, microbatch=64)
    assert padding_share(survival, cut, rows=64, microbatch=8) < 0.4 * whole
    assert padding_share(empirical_survival([7], limit=9), [7, 7], rows=4, microbatch=2, prompt=5) == 0


def test_the_longest_of_units_against_draws():
    survival = empirical_survival([2, 3, 3, 7], limit=9)
    draws = np.sort(np.random.default_rng(0).choice([2, 3, 3, 7], size=(20_000, 6)), axis=1)
    for rows in (1, 2, 3, 6):
        longest = draws[:, rows - 1 :: rows]
        wanted = [(longest > t).mean() for t in range(9)]
        np.testing.assert_allclose(unit_survival(survival, group=6, rows=rows), wanted, rtol=0, atol=0.01)


@pytest.mark.parametrize("wrong", [lambda: empirical_survival([], limit=4), lambda: empirical_survival([0], limit=4)])
def test_no_lengths_are_refused(wrong):
    with pytest.raises(ValueError, match="lengths: expected completions of at least 1 token"):
        wrong()


def test_a_distribution_without_width_is_refused():
    with pytest.raises(ValueError, match="expected mean and sigma above 0"):
        lognormal_survival(mean=3, sigma=0, limit=4)
