"""Statistics on cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from stratbench.analysis.stats import median_and_quartiles, ratio_intervals


def test_median_and_quartiles_of_five():
    assert median_and_quartiles([5, 1, 4, 2, 3]) == (3, 2, 4)


def test_one_value_is_its_own_median_and_quartiles():
    assert median_and_quartiles([7.5]) == (7.5, 7.5, 7.5)


def test_one_repeat_has_no_interval():
    assert ratio_intervals([[2.0], [3.0]], [[1.0], [1.0]]) is None


def test_a_constant_ratio_of_varying_pairs_has_an_interval_of_no_width():
    denominators = np.array([[1.0, 10.0, 100.0, 1000.0, 31.0]])
    interval = ratio_intervals(3 * denominators, denominators)
    np.testing.assert_allclose(interval, [[3.0, 3.0]])


def test_what_a_repeat_does_to_both_cancels_only_when_pairs_stay_together():
    rng = np.random.default_rng(1)
    denominators = rng.lognormal(0, 1, size=(1, 20))
    numerators = 2 * denominators * rng.normal(1, 0.001, size=(1, 20))
    (low, high), *_ = ratio_intervals(numerators, denominators)
    assert high - low < 0.02
    (low, high), *_ = ratio_intervals(rng.permuted(numerators, axis=1), denominators)
    assert high - low > 0.5


def test_two_repeats_span_the_resamples_that_there_are():
    # The resamples of two pairs give the ratios 2/1, 4/1 and median(2, 4)/median(1, 1) = 3.
    np.testing.assert_allclose(ratio_intervals([[2.0, 4.0]], [[1.0, 1.0]]), [[2.0, 4.0]])


def test_every_ratio_of_a_batch_is_as_if_alone():
    rng = np.random.default_rng(2)
    numerators, denominators = rng.normal(10, 1, (2, 7, 5))
    together = ratio_intervals(numerators, denominators)
    alone = [
        ratio_intervals(n[None], d[None])[0] for n, d in zip(numerators, denominators, strict=True)
    ]
    np.testing.assert_allclose(together, alone)


@pytest.mark.parametrize(
    ("repeats", "ratios", "least", "most"),
    [(3, 2000, 0.74, 0.78), (5, 2000, 0.91, 0.95), (31, 200, 0.90, 0.99)],
)
def test_intervals_hold_the_true_ratio_as_often_as_the_docs_say(repeats, ratios, least, most):
    rng = np.random.default_rng(3)
    numerators, denominators = rng.normal([[[3.0]], [[2.0]]], 0.2, (2, ratios, repeats))
    low, high = ratio_intervals(numerators, denominators).T
    covered = np.mean((low <= 1.5) & (high >= 1.5))
    assert least < covered < most


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="equal shapes"):
        ratio_intervals([[1.0, 2.0]], [[1.0]])
