"""Statistics for tables, figures and conclusions: medians, ranges, ratios and their intervals.

Times are compared by their logarithms, in pairs of equal repeats. Half a percent is then the same for steps
of any length, and a mean of logarithms is a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stratbench.statistics.moderated import (
    ALPHA,
    half_widths,
    moderated_variances,
    paired_differences,
)

#: The number of repeats from which quartiles are more than two of the values themselves.
QUARTILES_FROM = 5


class IntervalEstimate(NamedTuple):
    """A value with the ends of its interval; None if there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        """Return whether there is an interval and `value` is not in it."""
        return self.low is not None and not self.low <= value <= self.high

    def map_values(self, change: Callable[[float], float]) -> IntervalEstimate:
        """Return the estimate with an increasing function, such as exp, applied to value and ends."""
        return IntervalEstimate(*(None if x is None else change(x) for x in self))

    def text(self, shown: Callable[[float], str], end: Callable[[float], str] | None = None) -> str:
        """`1.23 [1.10, 1.31]`, or `1.23` without an interval, with numbers as `shown` writes them.

        `end`: what writes the ends of the interval, if it is something else.
        """
        if self.low is None:
            return shown(self.value)
        low, high = map(end or shown, self[1:])
        return f"{shown(self.value)} [{low}, {high}]"


def compute_median_and_spread(values: Sequence[float]) -> tuple[float, float, float, str]:
    """Return the median of `values`, the ends of their spread, and its kind.

    The kind is `quartiles` (first and third, with linear interpolation), or with fewer than QUARTILES_FROM
    values the `range`, from the lowest to the highest.
    """
    name = "quartiles" if len(values) >= QUARTILES_FROM else "range"
    at = [25, 50, 75] if name == "quartiles" else [0, 50, 100]
    low, median, high = np.percentile(np.asarray(values, dtype=float), at)
    return float(median), float(low), float(high), name


def mean_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the geometric mean of paired ratios; all values above 0."""
    ratios = np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float)
    return float(np.exp(np.mean(np.log(ratios))))


def paired_ratios(
    pairs: Sequence[np.ndarray], served: Sequence[bool], together: int = 1
) -> list[IntervalEstimate]:
    """Return the geometric mean ratio of each pair, with its 95 % moderated t interval.

    Column k of both rows comes from repeat k, so that effects of the repeat's seed cancel. A single repeat
    has no interval. The variances of all `pairs` are pooled as in `moderated_variances`.

    Args:
        pairs: Arrays of shape [2, repeats]: values, and those that they are divided by.
        served: Whether parameter servers take part, by pair.
        together: How many intervals hold simultaneously (Bonferroni). With 1 each holds by itself.
    """
    if not pairs:
        return []
    values = np.full((2, len(pairs), max(pair.shape[1] for pair in pairs)), np.nan)
    for i, pair in enumerate(pairs):
        values[:, i, : pair.shape[1]] = pair
    differences = paired_differences(*np.log(values))
    variance, dof = moderated_variances(differences, np.array(served))
    half = half_widths(variance, dof, differences.repeats, ALPHA / 2 / together)
    ends = np.exp(np.stack([differences.mean - half, differences.mean + half], axis=-1))
    return [
        IntervalEstimate(
            mean_ratio(*pair), *map(float, interval) if np.isfinite(interval[1]) else ()
        )
        for pair, interval in zip(pairs, ends, strict=True)
    ]
