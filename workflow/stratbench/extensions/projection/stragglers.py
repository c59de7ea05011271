"""Computes the cost of waiting for the slowest of N workers, from the workers' own step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Minimum number of steps and of workers for a distribution of the workers' times.
MIN_STEPS, MIN_WORKERS = 20, 2
#: Number of levels, and of times per level, of the distribution with drawn levels.
LEVELS, VARYING = 64, 256


@dataclass(frozen=True)
class Stragglers:
    """Step times of workers without delays that all share, shape [workers, steps].

    `normalise_own_times` computes them. All are above zero, with a mean of about 1.
    """

    own_times: NDArray

    def compute_mean_slowest_factor(self, workers: int, spreads: float = 0.0) -> float:
        """Return the mean time of the slowest of `workers` workers, over the mean of all.

        Each worker has a step of any measured worker, with equal probability. The duration of slow periods
        does not change the mean step. The factor is raised by `spreads` standard deviations, in ln.
        """
        more = spreads * self._compute_log_slowest_sd(workers) if spreads else 0.0
        return math.exp(_compute_log_slowest_factor(self.own_times, workers) + more)

    def _compute_log_slowest_sd(self, workers: int) -> float:
        """Return the standard deviation of ln of the slowest worker's factor.

        A jackknife over workers gives one part. The other part is that the unmeasured workers may have
        other levels. Student's t widens it for few workers.
        """
        import numpy as np
        from scipy.special import ndtri, stdtrit

        n = len(self.own_times)
        without = [
            _compute_log_slowest_factor(np.delete(self.own_times, i, axis=0), workers)
            for i in range(n)
        ]
        jackknife = math.sqrt((n - 1) * float(np.var(without)))
        of_levels = self._compute_log_level_contribution(workers) / math.sqrt(n - 1)
        return float(stdtrit(n - 1, 0.9) / ndtri(0.9)) * math.hypot(jackknife, of_levels)

    def _compute_log_level_contribution(self, workers: int) -> float:
        """Return how much lasting speed differences of workers add to the slowest worker's ln factor."""
        import numpy as np
        from scipy.special import ndtri

        logs = np.log(self.own_times)
        levels = logs.mean(axis=1)
        varying = np.quantile(logs - levels[:, None], _compute_midpoints(VARYING))
        drawn = levels.std(ddof=1) * ndtri(_compute_midpoints(LEVELS))
        both = np.exp(varying + drawn[:, None])
        return _compute_log_slowest_factor(both, workers) - _compute_log_slowest_factor(
            np.exp(varying), workers
        )


def _compute_midpoints(n: int) -> NDArray:
    """Return the midpoints of n equal parts of the interval from 0 to 1."""
    import numpy as np

    return (np.arange(n) + 0.5) / n


def _compute_log_slowest_factor(times: NDArray, workers: int) -> float:
    """Return ln of the slowest of `workers` times drawn from `times`, on average.

    The maximum is relative to the mean of `times`.
    """
    import numpy as np

    ordered = np.sort(times, axis=None)
    share = np.linspace(0, 1, len(ordered) + 1)
    return math.log(float(ordered @ np.diff(share**workers)) / float(ordered.mean()))


def normalise_own_times(times: NDArray) -> NDArray:
    """Return step times, shape [workers, steps], without each step's delay common to all workers.

    The times are above zero, relative to their mean.

    A delay that all workers share makes none of them wait. ln of a time is the sum of the worker's level,
    the step's common part and the worker's own part. The covariance of workers is the variance of the
    common part. Its best linear prediction (Henderson 1975) is subtracted from each step. The rest is
    scaled to the variance of the own part.
    """
    import numpy as np

    logs = np.log(times)
    workers = len(logs)
    levels = logs.mean(axis=1, keepdims=True)
    varying = logs - levels
    common = varying.mean(axis=0)
    own_variance = max(varying.var() - common.var(), 0.0) * workers / (workers - 1)
    common_variance = varying.var() - own_variance
    if common_variance > 0:
        left = varying - common_variance / common.var() * common
        sd = left.std()
        times = np.exp(levels + (left * math.sqrt(own_variance) / sd if sd else left))
    return times / times.mean()


def fit_stragglers(records: Sequence[Mapping[str, Any]]) -> Stragglers | None:
    """Return the distribution of workers' times in one count's repeats, or None if too short."""
    import numpy as np

    factors = []
    for record in records:
        series = [w.get("own_ms") or [] for w in record["workers"]]
        steps = min(map(len, series), default=0)
        if len(series) < MIN_WORKERS or steps < MIN_STEPS:
            return None
        own = np.array([s[-steps:] for s in series])
        if not own.all():  # a time below the clock's resolution
            return None
        factors.append(normalise_own_times(own))
    steps = min((own.shape[1] for own in factors), default=0)
    return Stragglers(np.concatenate([own[:, -steps:] for own in factors])) if factors else None
