"""Statistics of two sets that share no repeats: Welch's t on logarithms.

Repeats from two places share nothing but a number, so they are not paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from stratbench.statistics.intervals import Estimate
from stratbench.statistics.moderated import ALPHA


def geometric_mean(times: Sequence[float]) -> float:
    """The geometric mean; of one value exactly that value."""
    return math.prod(t ** (1 / len(times)) for t in times)


def ratio_of_times(new: Sequence[float], old: Sequence[float]) -> Estimate:
    """The ratio of geometric means with its 95 % interval (Welch, 1947); values above 0.

    There is no interval if either side has fewer than two repeats, or if neither scatters.
    """
    logs = np.log(np.asarray(new, dtype=float)), np.log(np.asarray(old, dtype=float))
    found = _difference(*logs)
    return Estimate(*(None if x is None else math.exp(x) for x in found))


def difference_of_scores(new: Sequence[float], old: Sequence[float]) -> Estimate:
    """The difference of means, with its interval as in `ratio_of_times`."""
    return _difference(np.asarray(new, dtype=float), np.asarray(old, dtype=float))


def _difference(new: np.ndarray, old: np.ndarray) -> Estimate:
    mean = float(new.mean() - old.mean())
    if min(len(new), len(old)) < 2 or new.var() + old.var() == 0:
        return Estimate(mean)
    half = _half_width([_variance_of_mean(new), _variance_of_mean(old)], ALPHA / 2)
    return Estimate(mean, mean - half, mean + half)


def _variance_of_mean(values: np.ndarray) -> tuple[float, int]:
    """The variance of a mean of two values or more, with its degrees of freedom."""
    return float(values.var(ddof=1)) / len(values), len(values) - 1


def _half_width(parts: Sequence[tuple[float, int]], alpha: float) -> float:
    """What a sum of independent means is off by at most, on one side, but for a chance of `alpha`.

    `parts`: the variance of each mean and its degrees of freedom; of the sum they are Satterthwaite's
    (1946). The variances are not all 0.
    """
    total = sum(variance for variance, _ in parts)
    # Relative to the total, as squares of variances near 1e-160 would vanish.
    dof = 1 / sum((variance / total) ** 2 / n for variance, n in parts)
    return -float(stdtrit(dof, alpha)) * math.sqrt(total)


def mean_over_models(logs: Sequence[float]) -> Estimate:
    """The geometric mean of ratios, one logarithm for each model, with its t interval over models.

    The interval shows how much the ratio differs from model to model, so one model has none.
    """
    values = np.asarray(logs, dtype=float)
    mean = float(values.mean())
    if len(values) < 2 or values.var() == 0:
        return Estimate(math.exp(mean))
    half = _half_width([_variance_of_mean(values)], ALPHA / 2)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


class LostSpeed(NamedTuple):
    """The share by which something got slower, with one-sided bounds; None where nothing is known."""

    share: float | None
    at_least: float | None
    at_most: float | None


def slowdown_over_cells(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], alpha: float
) -> LostSpeed:
    """The mean slow-down over cells, each given as the (new, old) times of its repeats, all above 0.

    The true value lies beyond each bound with probability `alpha`. The cells are fixed, and noise comes
    from the repeats: the variance is the sum of theirs, with Satterthwaite's (1946) degrees of freedom.
    """
    logs = [tuple(np.log(np.asarray(side, dtype=float)) for side in pair) for pair in pairs]
    mean = float(np.mean([new.mean() - old.mean() for new, old in logs]))
    parts = [_variance_of_mean(side) for pair in logs for side in pair if len(side) > 1]
    if len(parts) < 2 * len(logs) or not any(variance for variance, _ in parts):
        return LostSpeed(math.expm1(mean), None, None)
    half = _half_width(parts, alpha) / len(logs)
    return LostSpeed(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))
