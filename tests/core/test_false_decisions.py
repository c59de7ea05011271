"""How often the decision claims what is not so, simulated through its own functions.

The whole table is benchmarks/results/decision.md; here are its most telling rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import decision_simulation as simulated
from decision_simulation import NOISES, ahead_by, judged, normal, truths
from stratbench.analysis.decision import ranking
from stratbench.analysis.decision.candidate import Candidate
from stratbench.statistics import moderated

STUDIES = 1000


def drawn(truth, noise, k, repeats, models=1):
    """True log times, and those of the repeats, of STUDIES decisions."""
    rng = np.random.default_rng([models, k, repeats])
    true = truths(truth, (STUDIES // models, models, k), rng)
    return true, true[..., None] + NOISES[noise](rng, (*true.shape, repeats))


def rates(true, logs, **how):
    return {name: 100 * rate.mean() for name, rate in judged(true, logs, **how).items()}


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("noise", [*NOISES])
def test_few_decisions_among_equals_are_false(noise, models):
    """With the fastest chosen: an order of preference among equals errs less."""
    for k in (2, 3, 5, 11):
        served = np.arange(k) >= k // 2 if "servers" in noise else False
        for repeats in (2, 3, 10):
            found = rates(*drawn("all equal", noise, k, repeats, models), served=served)
            # 5 %, and two standard errors of so few studies.
            assert found["false"] <= 6.4, (k, repeats)
            assert found["held"] >= 90, (k, repeats)


@pytest.mark.parametrize("truth", ["two best equal", "rivals at the margin"])
def test_few_decisions_are_false_where_something_is_slower(truth):
    for k in (3, 8):
        assert rates(*drawn(truth, "10 %", k, 5))["false"] <= 5


def test_a_winner_by_10_percent_is_found_with_five_repeats():
    for models, k, least in ((1, 2, 80), (1, 3, 75), (1, 5, 40), (3, 5, 60), (3, 8, 45)):
        true = ahead_by(0.1, (STUDIES // models, models, k))
        rng = np.random.default_rng([models, k])
        logs = true[..., None] + normal(0.03)(rng, (*true.shape, 5))
        assert rates(true, logs)["found"] >= least, (models, k)


@pytest.mark.parametrize(("looks", "most"), [(moderated.REPEATED_LOOKS, 5), (1.0, 100)])
def test_looking_again_after_more_repeats_says_nothing_false(looks, most):
    """A decision after each of 2 to 10 repeats of equals, and that the correction is needed."""
    found = []
    for k in (2, 3, 8):
        true, logs = drawn("all equal", "10 %", k, 10)
        seen = [judged(true, logs[..., :n], looks)["false"] for n in (2, 3, 4, 5, 6, 8, 10)]
        found.append(100 * np.logical_or.reduce(seen).mean())
    assert max(found) <= most
    assert most < 100 or max(found) > 7


def test_an_uncorrected_interval_would_decide_falsely(monkeypatch):
    """The control: the simulation finds the error that the correction is there for."""
    monkeypatch.setattr(moderated, "compute_decision_tail_probability", lambda k, looks: 0.05)
    assert rates(*drawn("all equal", "3 %", 8, 5))["false"] > 20


@pytest.mark.parametrize(("sd", "share", "k"), [(0.01, 0.05, 3), (0.03, 0.1, 3), (0.02, 0.1, 8)])
def test_the_repeats_that_an_answer_asks_for_tell_a_rival_apart(sd, share, k):
    n = ranking.RankingNoise(sd, k, prior_dof_per_repeat=k - 2).compute_needed_repeats(share)
    true = ahead_by(share, (STUDIES, 1, k))
    true[..., 2:] = 1.0
    logs = true[..., None] + normal(sd)(np.random.default_rng(n), (*true.shape, n))
    assert 77 <= rates(true, logs)["found"] <= 99.5
    assert rates(true, logs[..., : max(2, n - 3)])["found"] < 80


def test_the_ranking_of_candidates_is_what_is_simulated():
    """Two models of one study, from times in seconds, against the arrays of the simulation."""
    rng = np.random.default_rng(3)
    true = ahead_by(0.06, (1, 2, 4))
    logs = true[..., None] + normal(0.02)(rng, (*true.shape, 4))
    comparisons = [
        [Candidate(str(i), i + 1, times=t, time_s=np.exp(np.log(t).mean()), has_planned_repeats=True)
         for i, t in enumerate(pd.Series(np.exp(one)) for one in of_model)]
        for of_model in logs[0]
    ]  # fmt: skip
    found = ranking.rank_candidates_by_model(comparisons, simulated.MARGIN)
    is_so = judged(true, logs, preference=np.arange(4.0))
    for model, r in enumerate(found):
        assert r.is_choice_clearly_fastest == is_so["winner"][0, model]
        assert {c.repeats for c in r.comparisons} == {4}
    comparisons[0][3].has_planned_repeats = False
    looser = ranking.rank_candidates_by_model(comparisons, simulated.MARGIN)
    widths = [
        np.log(r.comparisons[0].ratio.high / r.comparisons[0].ratio.low)
        for r in (found[0], looser[0])
    ]
    assert widths[1] > widths[0]


@pytest.mark.parametrize("classes", [4, 8])
def test_scores_that_are_good_enough_are_not_excluded(classes):
    """A loss of 0.9 of 1 point, sd 0.3."""
    rng = np.random.default_rng(classes)
    true = np.zeros((STUDIES, classes))
    true[:, 1:] = -0.9
    for repeats in (2, 3, 5):
        scores = true[..., None] + 0.3 * rng.normal(size=(*true.shape, repeats))
        found = simulated.scores_judged(true, scores)
        assert 100 * found["excluded"].mean() <= 5
        assert 100 * found["held"].mean() >= 94
