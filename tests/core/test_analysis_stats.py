"""Statistics on cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from stratbench.statistics import moderated
from stratbench.statistics.intervals import (
    IntervalEstimate,
    compute_median_and_spread,
    compute_paired_ratios,
)

#: The numeric check of the procedure: ten variances of 2 degrees of freedom each.
VARIANCES = np.array([0.5, 1, 1, 2, 2, 3, 4, 6, 9, 30]) * 1e-4


def intervals(numerators, denominators):
    """The ends of the intervals of ratios, shape [ratios, 2], from two arrays of shape [ratios, repeats]."""
    pairs = list(np.stack([numerators, denominators], axis=1))
    return np.array([ratio[1:] for ratio in compute_paired_ratios(pairs, [False] * len(pairs))])


def test_few_values_have_a_range_and_more_have_quartiles():
    assert compute_median_and_spread([5, 1, 4, 2, 3]) == (3, 2, 4, "quartiles")
    assert compute_median_and_spread([5, 1, 4, 2]) == (3, 1, 5, "range")
    assert compute_median_and_spread([7.5]) == (7.5, 7.5, 7.5, "range")


def test_moderated_t_of_the_worked_example():
    found = moderated.Differences(np.zeros(10), VARIANCES, np.full(10, 3))
    prior = moderated.estimate_common_variance_prior(VARIANCES, np.full(10, 2), np.full(10, True))
    assert np.isinf(prior.dof)
    assert prior.variance == pytest.approx(5.1245e-4, rel=1e-4)
    variance, dof = moderated.shrink_variances_by_kind(found, np.zeros(10, dtype=bool))
    assert dof[0] == 10
    assert variance[0] == pytest.approx(4.1996e-4, rel=1e-4)
    assert scipy.stats.t.isf(
        moderated.compute_alternatives_tail_probability(14), 10
    ) == pytest.approx(4.2896, abs=5e-5)
    half = moderated.compute_interval_half_widths(
        variance, dof, found.repeats, moderated.compute_alternatives_tail_probability(14)
    )
    assert half[0] == pytest.approx(0.05075, abs=5e-6)


def test_variances_that_scatter_more_than_chance_are_drawn_together_less():
    """Variances from an inverse chi-square prior of 6 degrees: that many are found again."""
    rng = np.random.default_rng(3)
    true = 2e-4 * 6 / rng.chisquare(6, (200, 400))
    found = true * rng.chisquare(4, true.shape) / 4
    prior = moderated.estimate_common_variance_prior(
        found, np.full(true.shape, 4), np.full(true.shape, True)
    )
    assert np.median(prior.dof) == pytest.approx(6, rel=0.1)
    assert np.median(prior.variance) == pytest.approx(2e-4, rel=0.05)


@pytest.mark.parametrize(("count", "dof"), [(5, 2.0), (9, 4.0), (10, 10.0)])
def test_few_variances_lend_little(count, dof):
    found = moderated.Differences(np.zeros(count), VARIANCES[:count], np.full(count, 3))
    assert moderated.shrink_variances_by_kind(found, np.zeros(count, dtype=bool))[1][0] == dof


def test_servers_scatter_by_themselves_where_there_are_enough_of_them():
    variances = np.concatenate([np.full(12, 1e-4), np.full(12, 9e-4), np.full(3, 9e-4)])
    found = moderated.Differences(np.zeros(27), variances, np.full(27, 3))
    served = np.repeat([False, True], [12, 15])
    apart, _ = moderated.shrink_variances_by_kind(found, served)
    assert apart[12] > 5 * apart[0]
    few, _ = moderated.shrink_variances_by_kind(
        moderated.Differences(*(part[:15] for part in found)), np.repeat([False, True], [12, 3])
    )
    assert few[12] < apart[12]  # three servers borrow from all


def test_one_repeat_has_no_interval():
    pairs = [np.array([[2.0], [1.0]]), np.array([[3.0], [1.0]])]
    assert compute_paired_ratios(pairs, [False, True]) == [
        IntervalEstimate(2.0),
        IntervalEstimate(pytest.approx(3.0)),
    ]


def test_a_constant_ratio_of_varying_pairs_has_an_interval_of_no_width():
    denominators = np.array([[1.0, 10.0, 100.0, 1000.0, 31.0]])
    np.testing.assert_allclose(intervals(3 * denominators, denominators), [[3.0, 3.0]])


def test_what_a_repeat_does_to_both_cancels_only_when_pairs_stay_together():
    rng = np.random.default_rng(1)
    common = rng.uniform(1, 10, (1, 10))
    numerators, denominators = 2 * common * rng.uniform(0.99, 1.01, (1, 10)), common
    (low, high), *_ = intervals(numerators, denominators)
    assert 1.97 < low < 2 < high < 2.03
    (low, high), *_ = intervals(rng.permuted(numerators, axis=1), denominators)
    assert high / low > 1.5


def test_an_interval_is_that_of_the_paired_t_test_on_logarithms():
    rng = np.random.default_rng(2)
    pairs = np.exp(rng.normal(0, 0.02, (2, 1, 4)))
    expected = scipy.stats.ttest_rel(*np.log(pairs[:, 0])).confidence_interval(0.95)
    np.testing.assert_allclose(np.log(intervals(*pairs))[0], expected)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_an_interval_holds_the_true_ratio_in_95_percent_of_cases(repeats):
    rng = np.random.default_rng(5)
    held = []
    for _ in range(60):  # studies of 40 ratios, whose noise differs
        sd = 0.02 * np.exp(rng.normal(0, 0.3, (2, 40, 1)))
        numerators, denominators = np.exp(rng.normal(0, 1, (2, 40, repeats)) * sd)
        low, high = intervals(1.5 * numerators, denominators).T
        held.append((low <= 1.5) & (high >= 1.5))
    assert 0.93 < np.mean(held) < 0.97


def test_ratios_of_unlike_repeats_share_their_variances_and_one_repeat_has_no_interval():
    rng = np.random.default_rng(1)
    noise = np.exp(0.02 * rng.normal(size=(8, 2, 4)))
    pairs = [*noise, noise[0, :, :2], np.array([[3.0], [2.0]])]
    *_, short, single = compute_paired_ratios(pairs, [False] * 10)
    assert single == IntervalEstimate(1.5)
    padded = np.full((10, 2, 4), np.nan)
    for row, pair in zip(padded, pairs, strict=True):
        row[:, : pair.shape[1]] = pair
    found = moderated.compute_paired_differences(*np.log(padded).swapaxes(0, 1))
    half = moderated.compute_interval_half_widths(
        *moderated.shrink_variances_by_kind(found, np.zeros(10, dtype=bool)), found.repeats, 0.025
    )
    assert short[1:] == pytest.approx(tuple(np.exp(found.mean[8] + np.array([-1, 1]) * half[8])))
    alone = compute_paired_ratios([pairs[8]], [False])[0]
    assert alone.value == short.value
    assert alone.high - alone.low > short.high - short.low, "the others tell of the noise, too"
    wider = compute_paired_ratios(pairs, [False] * 10, num_simultaneous=10)[8]
    assert wider.low < short.low < short.high < wider.high
    assert compute_paired_ratios([], []) == []


def test_an_estimate_is_written_with_its_interval_if_it_has_one():
    assert (
        IntervalEstimate(1.5, 1.25, 1.75).format_value_and_interval("{:.2f}".format)
        == "1.50 [1.25, 1.75]"
    )
    assert (
        IntervalEstimate(1.00004, 0.9, 1.1).format_value_and_interval(
            "{:.4f}".format, "{:.1f}".format
        )
        == "1.0000 [0.9, 1.1]"
    )
    assert IntervalEstimate(-0.5).format_value_and_interval("{:+.1f}".format) == "-0.5"


def test_an_interval_excludes_what_lies_outside_of_it_and_no_interval_excludes_nothing():
    assert IntervalEstimate(1.2, 1.1, 1.3).interval_excludes(1)
    assert IntervalEstimate(0.8, 0.7, 0.9).interval_excludes(1)
    assert not IntervalEstimate(1.2, 0.9, 1.3).interval_excludes(1)
    assert not IntervalEstimate(1.2).interval_excludes(1)
