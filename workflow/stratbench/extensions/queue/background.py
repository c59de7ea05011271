"""The jobs of others in a simulated queue: a Poisson stream of a given load."""

from __future__ import annotations

import math
import random

from stratbench.extensions.queue.simulator import Arrival

#: Shares of jobs by number of GPUs, about as the public traces of ITP clusters 03 and 06 have them together.
WIDTHS = {1: 0.40, 2: 0.15, 4: 0.20, 8: 0.20, 16: 0.05}
#: The wall times that people ask for, over what their jobs take; each a third of the jobs.
REQUEST_FACTORS = (1.5, 3.0, 10.0)
#: Lognormal durations: the median, the standard deviation of the logarithm, and the limits.
MEDIAN_S, SIGMA, MIN_S, MAX_S = 1800.0, 1.4, 60.0, 86400.0


def requested_s(duration_s: float, factor: float) -> float:
    """Return `factor` times the duration in whole minutes, at least one, as SLURM counts."""
    return max(1, math.ceil(duration_s * factor / 60)) * 60.0


def poisson(jobs: int, load: float, capacity: int, seed: int) -> list[Arrival]:
    """Return jobs that use, with exact wall times, a fraction `load` of `capacity` GPUs.

    Poisson arrivals, lognormal durations. Widths beyond the capacity are left out.

    Args:
        jobs: Number of jobs.
        load: Fraction of the capacity.
        capacity: GPUs of the cluster.
        seed: Seed of the random numbers.
    """
    rng = random.Random(seed)
    usable = {width: share for width, share in WIDTHS.items() if width <= capacity}
    bodies = []
    for _ in range(jobs):
        gpus = rng.choices(list(usable), list(usable.values()))[0]
        duration_s = rng.lognormvariate(math.log(MEDIAN_S), SIGMA)
        duration_s = min(MAX_S, max(MIN_S, duration_s))
        bodies.append((gpus, duration_s, requested_s(duration_s, rng.choice(REQUEST_FACTORS))))
    gaps = [rng.expovariate(1.0) for _ in range(jobs)]
    scale = sum(gpus * s for gpus, s, _ in bodies) / (load * capacity) / sum(gaps)
    arrivals, now_s = [], 0.0
    for gap, body in zip(gaps, bodies, strict=True):
        now_s += gap * scale
        arrivals.append(Arrival(now_s, *body))
    return arrivals
