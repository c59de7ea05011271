"""Computes how much longer the slowest of N workers takes, from workers' own step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Minimum number of steps, and of workers, from which a distribution of step times is computed.
MIN_STEPS, MIN_WORKERS = 20, 2
#: Number of quantiles by which the distributions of worker speeds, and of step times of one worker, are
#: represented.
LEVELS, VARYING = 64, 256


@dataclass(frozen=True)
class Stragglers:
    """Distribution of the step times of workers, some of which may be slow.

    Attributes:
        relative_step_times: Step times by `remove_common_delays`, shape [workers, steps]. All are above zero,
            and their mean is about 1.
    """

    relative_step_times: NDArray

    def compute_slowest_to_mean_time_ratio(self, workers: int, num_sd: float = 0.0) -> float:
        """Return the mean step time of the slowest worker, relative to that of all.

        Each of `workers` workers' step times is drawn from those of all measured workers. How long a worker
        stays slow does not matter for the mean. The result is raised by `num_sd` of its standard deviations,
        in ln.
        """
        raised_by = num_sd * self._compute_sd_of_ln_slowest_time(workers) if num_sd else 0.0
        return math.exp(
            _compute_ln_slowest_to_mean_ratio(self.relative_step_times, workers) + raised_by
        )

    def _compute_sd_of_ln_slowest_time(self, workers: int) -> float:
        """Return the standard deviation of ln of the slowest worker's relative step time.

        One part is by a jackknife over the measured workers. The other part is that unmeasured workers may be
        slower. For few measured workers, Student's t makes the result larger.
        """
        import numpy as np
        from scipy.special import ndtri, stdtrit

        n = len(self.relative_step_times)
        without = [
            _compute_ln_slowest_to_mean_ratio(
                np.delete(self.relative_step_times, i, axis=0), workers
            )
            for i in range(n)
        ]
        jackknife = math.sqrt((n - 1) * float(np.var(without)))
        of_levels = self._compute_ln_effect_of_worker_speeds(workers) / math.sqrt(n - 1)
        return float(stdtrit(n - 1, 0.9) / ndtri(0.9)) * math.hypot(jackknife, of_levels)

    def _compute_ln_effect_of_worker_speeds(self, workers: int) -> float:
        """Return how much lasting differences of speed add to ln of the slowest step time."""
        import numpy as np
        from scipy.special import ndtri

        logs = np.log(self.relative_step_times)
        levels = logs.mean(axis=1)
        varying = np.quantile(logs - levels[:, None], _compute_midpoints(VARYING))
        drawn = levels.std(ddof=1) * ndtri(_compute_midpoints(LEVELS))
        both = np.exp(varying + drawn[:, None])
        return _compute_ln_slowest_to_mean_ratio(both, workers) - _compute_ln_slowest_to_mean_ratio(
            np.exp(varying), workers
        )


def _compute_midpoints(num_parts: int) -> NDArray:
    """Return the midpoints of equal parts of the interval from 0 to 1."""
    import numpy as np

    return (np.arange(num_parts) + 0.5) / num_parts


def _compute_ln_slowest_to_mean_ratio(times: NDArray, workers: int) -> float:
    """Return ln of the expected maximum of `workers` times that are drawn from `times`.

    The maximum is relative to the mean of `times`.
    """
    import numpy as np

    ordered = np.sort(times, axis=None)
    share = np.linspace(0, 1, len(ordered) + 1)
    return math.log(float(ordered @ np.diff(share**workers)) / float(ordered.mean()))


def remove_common_delays(times: NDArray) -> NDArray:
    """Return step times without the delays that all workers have in the same step.

    The shape is [workers, steps], and the mean is about 1. A delay that all workers have makes none of them
    wait. ln of a time is the sum of the worker's level, the step's common part and the worker's own part. The
    covariance between workers is the variance of the common part. Its best linear prediction (Henderson 1975)
    is subtracted from each step. The rest is scaled to the variance of the own part.
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


def read_stragglers(records: Sequence[Mapping[str, Any]]) -> Stragglers | None:
    """Return the distribution of workers' step times in records of one worker count.

    None if the records have too few steps or workers, or no own times.
    """
    import numpy as np

    factors = []
    for record in records:
        series = [w.get("own_ms") or [] for w in record["workers"]]
        steps = min(map(len, series), default=0)
        if len(series) < MIN_WORKERS or steps < MIN_STEPS:
            return None
        own = np.array([s[-steps:] for s in series])
        if not own.all():  # a step time of 0, below the clock's resolution, has no logarithm
            return None
        factors.append(remove_common_delays(own))
    steps = min((own.shape[1] for own in factors), default=0)
    return Stragglers(np.concatenate([own[:, -steps:] for own in factors])) if factors else None
