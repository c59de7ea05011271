"""Statistics of two sets without common repeats: Welch's t on logarithms.

Repeats from two sites have nothing but a number in common, so they are not paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.moderated import ALPHA


def geometric_mean(times: Sequence[float]) -> float:
    """Return the geometric mean; of one value exactly that value."""
    return math.prod(t ** (1 / len(times)) for t in times)


def ratio_of_times(new: Sequence[float], old: Sequence[float]) -> IntervalEstimate:
    """Return the ratio of geometric means with its 95 % interval (Welch, 1947).

    Values above 0.

    There is no interval if either side has fewer than two repeats, or if neither scatters.
    """
    logs = np.log(np.asarray(new, dtype=float)), np.log(np.asarray(old, dtype=float))
    return estimate_difference(*logs).map_values(math.exp)


def difference_of_scores(new: Sequence[float], old: Sequence[float]) -> IntervalEstimate:
    """Return the difference of means, with its interval as in `ratio_of_times`."""
    return estimate_difference(np.asarray(new, dtype=float), np.asarray(old, dtype=float))


def mean_of_logs(logs: Sequence[float]) -> IntervalEstimate:
    """Return the geometric mean of what has these logarithms, with its 95 % t interval.

    There is none of a single one, or where none differ. Of ratios by model it shows how far models differ.
    """
    values = np.asarray(logs, dtype=float)
    return estimate_interval(float(values.mean()), [values]).map_values(math.exp)


def slowdown_over_cells(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], alpha: float
) -> IntervalEstimate:
    """Return the mean slow-down over cells, as the relative increase in time.

    The true value is beyond each end of the interval with probability `alpha`. The cells are fixed, and noise
    comes from the repeats: the variance is the sum of theirs, with Satterthwaite's (1946) degrees of freedom.
    `pairs` has the (new, old) times of each cell's repeats, all above 0.
    """
    logs = [tuple(np.log(np.asarray(side, dtype=float)) for side in pair) for pair in pairs]
    mean = float(np.mean([new.mean() - old.mean() for new, old in logs]))
    sides = [side for pair in logs for side in pair]
    return estimate_interval(mean, sides, alpha, len(logs)).map_values(math.expm1)


def estimate_difference(new: np.ndarray, old: np.ndarray) -> IntervalEstimate:
    return estimate_interval(float(new.mean() - old.mean()), [new, old])


def estimate_interval(
    value: float, sides: Sequence[np.ndarray], alpha: float = ALPHA / 2, cells: int = 1
) -> IntervalEstimate:
    """Return `value` with its interval, which leaves out `alpha` on each side.

    It is a sum or a difference of their means, divided by `cells`. There is no interval if a side has fewer
    than two repeats, or if none scatters.
    """
    if min(map(len, sides)) < 2:
        return IntervalEstimate(value)
    parts = [(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in sides]
    if not any(variance for variance, _ in parts):
        return IntervalEstimate(value)
    half = compute_half_width(parts, alpha) / cells
    return IntervalEstimate(value, value - half, value + half)


def compute_half_width(parts: Sequence[tuple[float, int]], alpha: float) -> float:
    """Return the half-width of the interval of a sum of independent means.

    `parts`: the variance of each mean and its degrees of freedom; those of the sum are Satterthwaite's
    (1946). The variances are not all 0. `alpha` is the probability beyond one end.
    """
    from scipy.special import stdtrit  # takes 0.2 s, only needed with repeats

    total = sum(variance for variance, _ in parts)
    # Relative to the total, as squares of variances near 1e-160 would vanish.
    dof = 1 / sum((variance / total) ** 2 / n for variance, n in parts)
    return -float(stdtrit(dof, alpha)) * math.sqrt(total)
