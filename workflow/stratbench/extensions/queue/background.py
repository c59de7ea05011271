"""Makes synthetic jobs of other users for the simulator, which arrive as a Poisson process."""

from __future__ import annotations

import math
import random

from stratbench.extensions.queue.simulator import Arrival

#: Share of the jobs, by number of GPUs. The shares are similar to those in public traces of two clusters (ITP
#: 03, 06).
WIDTHS = {1: 0.40, 2: 0.15, 4: 0.20, 8: 0.20, 16: 0.05}
#: Ratios of requested to used wall time. Each ratio is that of a third of the jobs.
REQUEST_FACTORS = (1.5, 3.0, 10.0)
#: Lognormal durations of jobs: median in seconds, standard deviation of ln, minimum and maximum in seconds.
MEDIAN_S, SIGMA, MIN_S, MAX_S = 1800.0, 1.4, 60.0, 86400.0


def compute_requested_wall_time_s(duration_s: float, request_factor: float) -> float:
    """Return a job's requested wall time: a multiple of its duration, rounded up to minutes."""
    return max(1, math.ceil(duration_s * request_factor / 60)) * 60.0


def make_poisson_arrivals(num_jobs: int, load: float, capacity: int, seed: int) -> list[Arrival]:
    """Make synthetic jobs that on average use a share `load` of the cluster's GPUs.

    They arrive as a Poisson process, and have lognormal durations. No job is larger than the cluster.

    Args:
        num_jobs: Number of jobs.
        load: Mean share of the GPUs that the jobs use.
        capacity: Number of GPUs of the cluster.
        seed: Seed of the random numbers.
    """
    rng = random.Random(seed)
    usable = {width: share for width, share in WIDTHS.items() if width <= capacity}
    bodies = []
    for _ in range(num_jobs):
        gpus = rng.choices(list(usable), list(usable.values()))[0]
        duration_s = rng.lognormvariate(math.log(MEDIAN_S), SIGMA)
        duration_s = min(MAX_S, max(MIN_S, duration_s))
        bodies.append(
            (
                gpus,
                duration_s,
                compute_requested_wall_time_s(duration_s, rng.choice(REQUEST_FACTORS)),
            )
        )
    gaps = [rng.expovariate(1.0) for _ in range(num_jobs)]
    scale = sum(gpus * s for gpus, s, _ in bodies) / (load * capacity) / sum(gaps)
    arrivals, now_s = [], 0.0
    for gap, body in zip(gaps, bodies, strict=True):
        now_s += gap * scale
        arrivals.append(Arrival(now_s, *body))
    return arrivals
