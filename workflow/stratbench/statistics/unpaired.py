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


def compute_time_ratio(new_times: Sequence[float], old_times: Sequence[float]) -> IntervalEstimate:
    """Return the ratio of the geometric means of times.

    It has a 95 % interval (Welch 1947). All values must be above 0. There is no interval if
    either side has fewer than two repeats, or if both have no variance.
    """
    logs = np.log(np.asarray(new_times, dtype=float)), np.log(np.asarray(old_times, dtype=float))
    return estimate_difference_of_means(*logs).map_value_and_ends(math.exp)


def compute_score_difference(
    new_scores: Sequence[float], old_scores: Sequence[float]
) -> IntervalEstimate:
    """Return the difference of mean scores with its 95 % interval (Welch 1947)."""
    return estimate_difference_of_means(
        np.asarray(new_scores, dtype=float), np.asarray(old_scores, dtype=float)
    )


def compute_geometric_mean_with_interval(logs: Sequence[float]) -> IntervalEstimate:
    """Return the geometric mean of values, given their logarithms, with its 95 % t interval.

    There is no interval for a single value or for equal values. For one ratio per model, the interval shows
    how far models differ.
    """
    values = np.asarray(logs, dtype=float)
    return estimate_t_interval(float(values.mean()), [values]).map_value_and_ends(math.exp)


def compute_mean_slowdown(
    new_and_old_times: Sequence[tuple[Sequence[float], Sequence[float]]], alpha: float
) -> IntervalEstimate:
    """Return the mean slowdown over cells, as the relative increase in time, with its interval.

    The cells are fixed and the noise comes from the repeats: the variance is the sum of the cells' variances,
    with Satterthwaite's (1946) degrees of freedom.

    Args:
        new_and_old_times: The (new, old) times of each cell's repeats, all above 0.
        alpha: Probability of a true value beyond each end of the interval.
    """
    logs = [
        tuple(np.log(np.asarray(side, dtype=float)) for side in pair) for pair in new_and_old_times
    ]
    mean = float(np.mean([new.mean() - old.mean() for new, old in logs]))
    sides = [side for pair in logs for side in pair]
    return estimate_t_interval(mean, sides, alpha, len(logs)).map_value_and_ends(math.expm1)


def estimate_difference_of_means(
    new_values: np.ndarray, old_values: np.ndarray
) -> IntervalEstimate:
    """Return the difference of two means with its 95 % interval."""
    return estimate_t_interval(
        float(new_values.mean() - old_values.mean()), [new_values, old_values]
    )


def estimate_t_interval(
    estimate: float, samples: Sequence[np.ndarray], alpha: float = ALPHA / 2, num_cells: int = 1
) -> IntervalEstimate:
    """Return an estimate with a t interval that follows from the variances of its samples.

    There is no interval if a sample has fewer than two repeats, or if no sample has a variance.

    Args:
        estimate: The estimate: a sum or difference of the samples' means, divided by `num_cells`.
        samples: Samples whose means the estimate combines.
        alpha: Probability beyond each end of the interval.
        num_cells: Number of cells.
    """
    if min(map(len, samples)) < 2:
        return IntervalEstimate(estimate)
    parts = [(float(one.var(ddof=1)) / len(one), len(one) - 1) for one in samples]
    if not any(variance for variance, _ in parts):
        return IntervalEstimate(estimate)
    half = compute_satterthwaite_half_width(parts, alpha) / num_cells
    return IntervalEstimate(estimate, estimate - half, estimate + half)


def compute_satterthwaite_half_width(
    variances_and_dof: Sequence[tuple[float, int]], alpha: float
) -> float:
    """Return the half-width of the t interval of a sum of independent means.

    The sum has Satterthwaite's (1946) degrees of freedom.

    Args:
        variances_and_dof: The variance and the degrees of freedom of each mean; not all variances are 0.
        alpha: Probability beyond each end.
    """
    from scipy.special import stdtrit  # the import of scipy takes 0.2 s

    total = sum(variance for variance, _ in variances_and_dof)
    # The division by `total` comes first, since squares of variances near 1e-160 would underflow.
    dof = 1 / sum((variance / total) ** 2 / n for variance, n in variances_and_dof)
    return -float(stdtrit(dof, alpha)) * math.sqrt(total)
