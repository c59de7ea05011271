"""Statistics of two result sets without common repeats: Welch's t on logarithms.

Repeats of two sites share only their number, so they are not paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.moderated import ALPHA


def compute_geometric_mean(times: Sequence[float]) -> float:
    """Return the geometric mean of times. For a single time it is exactly that time."""
    return math.prod(t ** (1 / len(times)) for t in times)


def compute_time_ratio(new: Sequence[float], old: Sequence[float]) -> IntervalEstimate:
    """Return the ratio of the geometric means of times, with its 95 % interval (Welch 1947).

    All values must be above 0. There is no interval if either side has fewer than two repeats, or if both
    have no variance.
    """
    logs = np.log(np.asarray(new, dtype=float)), np.log(np.asarray(old, dtype=float))
    return estimate_difference(*logs).map_values(math.exp)


def compute_score_difference(new: Sequence[float], old: Sequence[float]) -> IntervalEstimate:
    """Return the difference of mean scores with its 95 % interval (Welch 1947)."""
    return estimate_difference(np.asarray(new, dtype=float), np.asarray(old, dtype=float))


def compute_mean_of_logs(logs: Sequence[float]) -> IntervalEstimate:
    """Return the geometric mean of values, given their logarithms, with its 95 % t interval.

    There is no interval for a single value or for equal values. For one ratio per model, the interval shows
    how far models differ.
    """
    values = np.asarray(logs, dtype=float)
    return estimate_interval(float(values.mean()), [values]).map_values(math.exp)


def compute_mean_slowdown(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], alpha: float
) -> IntervalEstimate:
    """Return the mean slowdown over cells, as the relative increase in time, with its interval.

    The cells are fixed and the noise comes from the repeats: the variance is the sum of the cells' variances,
    with Satterthwaite's (1946) degrees of freedom.

    Args:
        pairs: The (new, old) times of each cell's repeats, all above 0.
        alpha: Probability of a true value beyond each end of the interval.
    """
    logs = [tuple(np.log(np.asarray(side, dtype=float)) for side in pair) for pair in pairs]
    mean = float(np.mean([new.mean() - old.mean() for new, old in logs]))
    sides = [side for pair in logs for side in pair]
    return estimate_interval(mean, sides, alpha, len(logs)).map_values(math.expm1)


def estimate_difference(new: np.ndarray, old: np.ndarray) -> IntervalEstimate:
    """Return the difference of two means with its 95 % interval."""
    return estimate_interval(float(new.mean() - old.mean()), [new, old])


def estimate_interval(
    value: float, sides: Sequence[np.ndarray], alpha: float = ALPHA / 2, cells: int = 1
) -> IntervalEstimate:
    """Return an estimate with a t interval that follows from the variances of its samples.

    There is no interval if a side has fewer than two repeats, or if no side has a variance.

    Args:
        value: The estimate: a sum or difference of the sides' means, divided by `cells`.
        sides: Samples whose means the estimate combines.
        alpha: Probability beyond each end of the interval.
        cells: Number of cells.
    """
    if min(map(len, sides)) < 2:
        return IntervalEstimate(value)
    parts = [(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in sides]
    if not any(variance for variance, _ in parts):
        return IntervalEstimate(value)
    half = compute_half_width(parts, alpha) / cells
    return IntervalEstimate(value, value - half, value + half)


def compute_half_width(parts: Sequence[tuple[float, int]], alpha: float) -> float:
    """Return the half-width of the t interval of a sum of independent means.

    The sum has Satterthwaite's (1946) degrees of freedom.

    Args:
        parts: The variance and the degrees of freedom of each mean; not all variances are 0.
        alpha: Probability beyond each end.
    """
    from scipy.special import stdtrit  # the import of scipy takes 0.2 s

    total = sum(variance for variance, _ in parts)
    # Without the division by `total`, squares of variances near 1e-160 would underflow.
    dof = 1 / sum((variance / total) ** 2 / n for variance, n in parts)
    return -float(stdtrit(dof, alpha)) * math.sqrt(total)
