"""The cost of waiting for the slowest of N workers, from the workers' own step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Minimum steps and workers for a distribution of the workers' times.
MIN_STEPS, MIN_WORKERS = 20, 2
#: Levels and times of the distribution of workers whose levels are drawn.
LEVELS, VARYING = 64, 256


@dataclass(frozen=True)
class Stragglers:
    """Workers' own times (workers x steps, above zero), as `own_shares` of their job."""

    series: NDArray

    def slowest(self, workers: int, spreads: float = 0.0) -> float:
        """Return the mean factor of the slowest of `workers` workers over the mean computation.

        Each has a step of any measured worker, with equal probability: the duration of slow periods makes no
        difference to the mean step. `spreads` standard deviations are added, in ln.
        """
        more = spreads * self._log_sd(workers) if spreads else 0.0
        return math.exp(_log_slowest(self.series, workers) + more)

    def _log_sd(self, workers: int) -> float:
        """Return the standard deviation of that, by a jackknife over workers, and from their levels.

        Few measured workers matter as far as each has a level of its own: others may have other levels. A
        standard deviation of few values is widened as Student's t is.
        """
        import numpy as np
        from scipy.special import ndtri, stdtrit

        n = len(self.series)
        without = [_log_slowest(np.delete(self.series, i, axis=0), workers) for i in range(n)]
        jackknife = math.sqrt((n - 1) * float(np.var(without)))
        of_levels = self._log_of_levels(workers) / math.sqrt(n - 1)
        return float(stdtrit(n - 1, 0.9) / ndtri(0.9)) * math.hypot(jackknife, of_levels)

    def _log_of_levels(self, workers: int) -> float:
        """Return the contribution of log-normal levels to ln of the slowest."""
        import numpy as np
        from scipy.special import ndtri

        logs = np.log(self.series)
        levels = logs.mean(axis=1)
        varying = np.quantile(logs - levels[:, None], _middles(VARYING))
        drawn = levels.std(ddof=1) * ndtri(_middles(LEVELS))
        both = np.exp(varying + drawn[:, None])
        return _log_slowest(both, workers) - _log_slowest(np.exp(varying), workers)


def _middles(n: int) -> NDArray:
    """Return the middles of n equal parts of 0 to 1."""
    import numpy as np

    return (np.arange(n) + 0.5) / n


def _log_slowest(times: NDArray, workers: int) -> float:
    """Ln of the largest of `workers` times, each any of `times`, over their mean."""
    import numpy as np

    ordered = np.sort(times, axis=None)
    share = np.linspace(0, 1, len(ordered) + 1)
    return math.log(float(ordered @ np.diff(share**workers)) / float(ordered.mean()))


def own_shares(times: NDArray) -> NDArray:
    """Return times (workers x steps, above zero) over their mean, without a step's common part.

    A delay common to all makes none wait. ln of a time is the worker's level, the step's common part and the
    worker's own. The covariance of workers is the common part's variance, and its best linear prediction
    (Henderson 1975) is subtracted from each step. The rest is scaled to the own part's variance.
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


def stragglers_of(records: Sequence[Mapping[str, Any]]) -> Stragglers | None:
    """Return the stragglers of one count's repeats, or None without long enough series."""
    import numpy as np

    factors = []
    for record in records:
        series = [w.get("own_ms") or [] for w in record["workers"]]
        steps = min(map(len, series), default=0)
        if len(series) < MIN_WORKERS or steps < MIN_STEPS:
            return None
        own = np.array([s[-steps:] for s in series])
        if not own.all():  # below the clock's resolution
            return None
        factors.append(own_shares(own))
    steps = min((own.shape[1] for own in factors), default=0)
    return Stragglers(np.concatenate([own[:, -steps:] for own in factors])) if factors else None
