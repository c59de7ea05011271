"""The simulation of `tune`: what it draws, and that sieve and race find what is fastest."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

STATISTICS = Path(__file__).parents[3] / "benchmarks" / "statistics"


@pytest.fixture(scope="module")
def simulation():
    """The script; its name is that of a package of the product, so that it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("tune_simulation", STATISTICS / "tune.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STATISTICS))
        patch.setitem(__import__("sys").modules, "tune_simulation", module)
        spec.loader.exec_module(module)
        yield module


def test_effects_are_those_of_pairs_in_public_sweeps(simulation):
    effects = simulation.read_effects()
    assert set(simulation.NEED_LEFT) <= set(effects)
    # A larger micro-batch is faster, and the plan says so.
    assert np.median([e.measured for e in effects["micro-batch"]]) < 0
    assert np.median([e.planned for e in effects["micro-batch"]]) < 0


def test_tune_ends_nearer_to_the_fastest_than_a_search_at_random_or_the_plan(simulation):
    effects, noise = simulation.read_effects(), simulation.PROFILES["dedicated"]
    regrets: dict[str, list[float]] = {"tune": [], "random": [], "plan": []}
    shares = []
    for number in range(8):
        rng = np.random.default_rng([number, 48])
        truth = simulation.draw(rng, effects)
        ours = simulation.tune(rng, truth, noise, math.inf)
        shares.append(ours.gpu_seconds / simulation.once_s(truth))
        by_chance = simulation.random_search(rng, truth, noise, ours.gpu_seconds / 4)
        regrets["tune"].append(truth.regret(ours.choice))
        regrets["random"].append(truth.regret(by_chance.choice))
        regrets["plan"].append(truth.regret(simulation.plan_alone(truth).choice))
    assert max(regrets["tune"]) <= simulation.NEAR
    assert max(regrets["tune"]) < max(regrets["random"])
    assert max(regrets["tune"]) < max(regrets["plan"])
    assert 0.001 < np.mean(shares) < 0.15


def test_the_sieve_measures_less_and_what_it_loses_is_counted(simulation):
    effects, noise = simulation.read_effects(), simulation.PROFILES["dedicated"]
    rng = np.random.default_rng([3, 48])
    truth = simulation.draw(rng, effects)
    with_sieve = simulation.tune(rng, truth, noise)
    without = simulation.tune(rng, truth, noise, math.inf)
    assert 0 < with_sieve.measured < without.measured
    assert with_sieve.gpu_seconds < without.gpu_seconds
    cells = list(simulation.figures([(truth, with_sieve)]))
    assert cells[0] in ("0", "100")
    assert int(cells[-1]) == with_sieve.measured
