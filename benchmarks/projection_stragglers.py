"""What resampling whole series of workers would say of the wait for the slowest, where the truth is known.

    PYTHONPATH=workflow python benchmarks/projection_stragglers.py [--jobs 200]

A job's workers compute a step in log-normal times with a coefficient of variation as in published traces
(quartiles .053, .087, .449), whose logarithms are correlated from step to step (0.7; published 0.64 to
0.74). A share of their variance is the worker's own and stays. Steps of all workers wait for the slowest.
From STEPS steps of 4 workers, the mean step on 8, 16 and 32 is projected: by nothing lost, by a + b/N
through 1, 2 and 4 of them, by single times drawn from all (i.i.d.), and by whole series drawn from all,
each begun at a step of its own. Prints the median error of each in percent, with its sign, and in brackets
that of absolute errors.
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

VARIATIONS = (0.053, 0.087, 0.449)
PERSISTENT = (0.0, 0.5, 0.9)
LAG, STEPS, MEASURED, TARGETS = 0.7, 300, 4, (8, 16, 32)
#: Drawn from the measured series for one projection.
RESAMPLED = 20


def times(workers: int, steps: int, variation: float, persistent: float, draw) -> NDArray:
    """Seconds of each worker's steps (workers x steps); 1 in the mean."""
    variance = math.log1p(variation**2)
    noise = draw.normal(size=(workers, steps))
    varying = np.empty_like(noise)
    varying[:, 0] = noise[:, 0]
    for i in range(1, steps):
        varying[:, i] = LAG * varying[:, i - 1] + math.sqrt(1 - LAG**2) * noise[:, i]
    own = draw.normal(size=(workers, 1))
    logs = math.sqrt(persistent) * own + math.sqrt(1 - persistent) * varying
    return np.exp(math.sqrt(variance) * logs - variance / 2)


def step_s(series: NDArray) -> float:
    return float(series.max(axis=0).mean())


def by_a_plus_b(series: NDArray, workers: int, _draw) -> float:
    points = [Measured(n, step_s(series[:n])) for n in (1, 2, 4)]
    return a_plus_b_over_n(points, "weak", workers)


def by_single_times(series: NDArray, workers: int, draw) -> float:
    return step_s(draw.choice(series.ravel(), size=(workers, RESAMPLED * series.shape[1])))


def by_whole_series(series: NDArray, workers: int, draw) -> float:
    steps = series.shape[1]
    said = []
    for _ in range(RESAMPLED):
        who, begins = draw.integers(len(series), size=workers), draw.integers(steps, size=workers)
        said.append(step_s(series[who[:, None], (begins[:, None] + np.arange(steps)) % steps]))
    return float(np.mean(said))


RULES: dict[str, Callable[..., float]] = {
    "nothing lost": lambda series, workers, draw: step_s(series),
    "a + b/N": by_a_plus_b,
    "i.i.d.": by_single_times,
    "whole series": by_whole_series,
}


def errors(variation: float, persistent: float, workers: int, jobs: int) -> dict[str, NDArray]:
    """Of each rule the errors in percent, job by job. The first of the measured workers stay."""
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    for job in range(jobs):
        draw = np.random.default_rng([job, workers])
        truth = times(workers, STEPS, variation, persistent, draw)
        for rule, projected in RULES.items():
            said = projected(truth[:MEASURED], workers, draw)
            found[rule].append(100 * (said / step_s(truth) - 1))
    return {rule: np.array(of_rule) for rule, of_rule in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200, help="simulated for each row (200)")
    jobs = parser.parse_args().jobs
    print("| variation | of which stays | workers | " + " | ".join(RULES) + " |")
    print("|---" * (3 + len(RULES)) + "|")
    for variation in VARIATIONS:
        for persistent in PERSISTENT:
            for workers in TARGETS:
                found = errors(variation, persistent, workers, jobs).values()
                cells = [f"{np.median(e):+.1f} ({np.median(abs(e)):.1f})" for e in found]
                row = [f"{variation:g}", f"{persistent:.0%}", str(workers), *cells]
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
