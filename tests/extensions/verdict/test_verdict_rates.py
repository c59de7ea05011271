"""How often the verdict claims what is not so, simulated through its own functions with fixed seeds.

`benchmarks/statistics/verdict.py` makes the longer table that docs/validation/verdict.md states.
"""

from __future__ import annotations

import numpy as np
import pytest

import verdict_simulation as simulated
from stratbench.extensions.verdict.paired import judging


def rates(
    truth: str, k: int, noise: simulated.Noise, studies: int = 90, scatter=0.3, comparisons=9, **how
):
    rng = np.random.default_rng([k, studies, comparisons])
    s = simulated.studies(rng, studies, k, truth, comparisons, scatter)
    return simulated.rates(s, simulated.run(rng, s, noise, **how))


CASES = [
    (truth, k) for truth in ("all equal", "two best equal", "at the margin") for k in (2, 4, 15)
]


@pytest.mark.slow
@pytest.mark.parametrize("percent", [1, 3, 30])
@pytest.mark.parametrize(("truth", "k"), CASES)
def test_few_claims_are_wrong_and_all_intervals_hold_together(truth, k, percent):
    found = rates(truth, k, simulated.normal_noise(percent))
    assert found["wrong"] <= 5
    assert found["covered"] >= 94


@pytest.mark.slow
@pytest.mark.parametrize("comparisons", [1, 3])
@pytest.mark.parametrize(("truth", "k"), CASES)
def test_a_study_of_few_comparisons_errs_no_more(truth, k, comparisons):
    """There are fewer variances to learn from."""
    found = rates(
        truth, k, simulated.normal_noise(3), studies=900 // comparisons, comparisons=comparisons
    )
    assert found["wrong"] <= 5
    assert found["covered"] >= 94


@pytest.mark.parametrize(("truth", "k"), CASES)
def test_strategies_that_scatter_very_differently_do_no_harm(truth, k):
    found = rates(truth, k, simulated.normal_noise(1), scatter=0.7)
    assert found["wrong"] <= 5
    assert found["covered"] >= 94


@pytest.mark.parametrize("profile", simulated.PROFILES)
@pytest.mark.parametrize("k", [7, 15])
def test_bursts_and_drift_do_no_harm(profile, k):
    found = rates("realistic", k, simulated.PROFILES[profile], studies=60)
    assert found["wrong"] <= 5
    assert found["covered"] >= 94


def test_on_dedicated_nodes_fifteen_strategies_are_decided_at_a_tenth_of_the_cost():
    found = rates("realistic", 15, simulated.PROFILES["dedicated"])
    assert found["claims"] >= 95
    assert found["blocks"] <= 4
    assert found["cost"] <= 10


def test_control_looks_without_correction_err_too_often():
    with simulated.uncorrected():
        found = rates("all equal", 2, simulated.normal_noise(3), studies=200)
    assert found["wrong"] > 5


def test_control_segments_as_units_err_too_often():
    """Two segments of one allocation are no two measurements of a strategy."""
    noise = simulated.Noise(0.04, 0.02, 0.004, 0.004)
    assert rates("all equal", 2, noise)["wrong"] <= 5
    assert rates("all equal", 2, noise, segments_as_units=True)["wrong"] > 5


def test_control_a_screen_that_knows_no_noise_errs_too_often():
    """On a busy machine one block says next to nothing: a strategy 1.5 times as slow in it may be the
    fastest.
    """
    noise = simulated.normal_noise(30)
    assert rates("two best equal", 4, noise)["wrong"] <= 5
    with simulated.screening_whatever_the_noise():
        assert rates("two best equal", 4, noise, studies=200)["wrong"] > 5


def test_control_intervals_of_a_leader_known_before_hold_too_seldom():
    """The blocks that the intervals are made of have chosen the leader."""
    with simulated.intervals_of_a_leader_known_before():
        found = rates("all equal", 15, simulated.normal_noise(3), studies=400, comparisons=1)
    assert found["covered"] < 94


def test_control_one_node_is_no_population():
    """Nodes that order strategies differently: blocks on one of them say nothing of the others."""
    noise = simulated.normal_noise(1)._replace(strategy_in_allocation=0.015)
    assert rates("two best equal", 4, noise)["wrong"] <= 5
    assert rates("two best equal", 4, noise, one_node=True)["wrong"] > 5


def test_two_variants_that_are_the_same_are_told_apart_in_few_studies():
    """An A/A study: `fastest` would be wrong."""
    found = rates("all equal", 2, simulated.PROFILES["shared"], studies=300)
    assert found["fastest"] <= 5


def test_the_check_figures_of_the_procedure():
    """The first of ten variances with three blocks, as the verdict uses it; one of 0 teaches nothing."""
    variances = np.array([0.5, 1, 1, 2, 2, 3, 4, 6, 9, 30]) * 1e-4
    logs = np.zeros((1, 15, 3))
    for strategy, variance in enumerate(np.append(variances, np.zeros(4)), 1):
        logs[0, strategy] = 1.0 + np.sqrt(variance) * np.array([-1, 0, 1])
    there = np.ones((1, 15), dtype=bool)
    look = judging.judge_comparisons(
        logs,
        there,
        there,
        ~there,
        np.array([15]),
        np.array([True]),
        0.03,
        np.inf,
        np.arange(3)[None],
    )
    np.testing.assert_allclose(look.mean[0, 1] - look.bound[0, 1], 0.05075, atol=5e-6)
