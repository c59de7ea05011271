"""What workers' own times say of the wait for the slowest, where the truth is known.

    PYTHONPATH=workflow python benchmarks/projection_stragglers.py [--jobs 200]

A job's workers compute a step in log-normal times with a coefficient of variation as in published traces
(quartiles .053, .087, .449), whose logarithms are correlated from step to step (0.7; published 0.64 to
0.74). A share of their variance is the worker's own and stays. In the last rows each step also has a factor
that all workers have in common, log-normal. Steps of all workers wait for the slowest.
From STEPS steps of 4 workers, the mean step on 8, 16 and 32 is projected: by nothing lost, by a + b/N
through 1, 2 and 4 of them, and by their own times, any of which the others may take. Prints the median error
of each in percent, with its sign, and in brackets that of absolute errors; then in how many jobs of 100 the
step is in the interval of 80 % that the own times give, and how far that reaches, in percent.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

from stratbench.plan.projection.naive import Measured, a_plus_b_over_n
from stratbench.plan.projection.project import LEAST_SD
from stratbench.plan.projection.stragglers import Stragglers, own_shares

VARIATIONS = (0.053, 0.087, 0.449)
PERSISTENT = (0.0, 0.5, 0.9)
COMMON = (0.1, 0.3)  # variation of what a step's workers have in common
LAG, STEPS, MEASURED, TARGETS = 0.7, 300, 4, (8, 16, 32)
NORMAL_90 = 1.2816  # the quantile at which 80 of 100 lie between it and its negative


def times(
    workers: int, steps: int, variation: float, persistent: float, draw, common: float = 0.0
) -> NDArray:
    """Seconds of each worker's steps (workers x steps); 1 in the mean."""
    variance = math.log1p(variation**2)
    noise = draw.normal(size=(workers, steps))
    varying = np.empty_like(noise)
    varying[:, 0] = noise[:, 0]
    for i in range(1, steps):
        varying[:, i] = LAG * varying[:, i - 1] + math.sqrt(1 - LAG**2) * noise[:, i]
    own = draw.normal(size=(workers, 1))
    logs = math.sqrt(persistent) * own + math.sqrt(1 - persistent) * varying
    alone = np.exp(math.sqrt(variance) * logs - variance / 2)
    if not common:
        return alone
    shared = math.log1p(common**2)
    return alone * np.exp(math.sqrt(shared) * draw.normal(size=steps) - shared / 2)


def step_s(series: NDArray) -> float:
    return float(series.max(axis=0).mean())


def by_a_plus_b(series: NDArray, workers: int) -> float:
    points = [Measured(n, step_s(series[:n])) for n in (1, 2, 4)]
    return a_plus_b_over_n(points, "weak", workers)


def by_own_times(series: NDArray, workers: int) -> float:
    own = Stragglers(own_shares(series))
    return step_s(series) * own.slowest(workers) / own.slowest(MEASURED)


def reach(series: NDArray, workers: int) -> float:
    """How far the interval goes, in ln."""
    own = Stragglers(own_shares(series))
    return NORMAL_90 * math.hypot(
        math.log(own.slowest(workers, 1.0) / own.slowest(workers)), LEAST_SD
    )


RULES: dict[str, Callable[..., float]] = {
    "nothing lost": lambda series, workers: step_s(series),
    "a + b/N": by_a_plus_b,
    "own times": by_own_times,
}


def errors(
    variation: float, persistent: float, common: float, workers: int, jobs: int
) -> tuple[dict[str, NDArray], NDArray]:
    """Of each rule the errors in percent, job by job, and the intervals' reach, in ln.

    The first of the measured workers stay.
    """
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    reaches = []
    for job in range(jobs):
        draw = np.random.default_rng([job, workers])
        truth = times(workers, STEPS, variation, persistent, draw, common)
        for rule, projected in RULES.items():
            said = projected(truth[:MEASURED], workers)
            found[rule].append(100 * (said / step_s(truth) - 1))
        reaches.append(reach(truth[:MEASURED], workers))
    return {rule: np.array(of_rule) for rule, of_rule in found.items()}, np.array(reaches)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200, help="simulated for each row (200)")
    jobs = parser.parse_args().jobs
    titles = [
        "variation",
        "of which stays",
        "in common",
        "workers",
        *RULES,
        "in the interval, %",
        "its reach, %",
    ]
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    cases = [(variation, stays, 0.0) for variation in VARIATIONS for stays in PERSISTENT]
    cases += [(variation, 0.0, common) for common in COMMON for variation in VARIATIONS]
    for variation, stays, common in cases:
        for workers in TARGETS:
            found, reaches = errors(variation, stays, common, workers, jobs)
            cells = [f"{np.median(e):+.1f} ({np.median(abs(e)):.1f})" for e in found.values()]
            within = abs(np.log1p(found["own times"] / 100)) < reaches
            row = [f"{variation:g}", f"{stays:.0%}", f"{common:g}", str(workers), *cells]
            row += [f"{100 * within.mean():.0f}", f"{100 * np.median(reaches):.0f}"]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
