"""Statistics for tables, figures and conclusions: medians, ranges, ratios and their intervals.

Times are compared by their logarithms, paired by repeat. A relative difference then has the same size for
steps of any length, and a mean difference of logarithms is a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stratbench.statistics.moderated import (
    ALPHA,
    compute_interval_half_widths,
    compute_paired_differences,
    shrink_variances_by_kind,
)

#: Minimum number of repeats for which tables show quartiles instead of the range.
QUARTILES_FROM = 5


class IntervalEstimate(NamedTuple):
    """A value and the ends of its confidence interval, which are None without an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def interval_excludes(self, value: float) -> bool:
        """Return whether there is an interval, and it does not contain `value`."""
        return self.low is not None and not self.low <= value <= self.high

    def map_value_and_ends(self, increasing_function: Callable[[float], float]) -> IntervalEstimate:
        """Return the estimate after applying an increasing function, such as exp, to value and ends."""
        return IntervalEstimate(*(None if x is None else increasing_function(x) for x in self))

    def format_value_and_interval(
        self,
        format_value: Callable[[float], str],
        format_end: Callable[[float], str] | None = None,
    ) -> str:
        """Return the estimate as text: `1.23 [1.10, 1.31]`, or `1.23` without an interval.

        Args:
            format_value: Formats the value.
            format_end: Formats the ends of the interval; `format_value` if None.
        """
        if self.low is None:
            return format_value(self.value)
        low, high = map(format_end or format_value, self[1:])
        return f"{format_value(self.value)} [{low}, {high}]"


class MedianAndSpread(NamedTuple):
    """A median with the low and high end of its spread, which is a range or quartiles."""

    median: float
    low: float
    high: float
    kind: str


def compute_median_and_spread(values: Sequence[float]) -> MedianAndSpread:
    """Return the median of values, both ends of their spread, and its kind.

    The kind is `quartiles` (first and third, with linear interpolation), or `range` (minimum and maximum)
    for fewer than QUARTILES_FROM values.
    """
    name = "quartiles" if len(values) >= QUARTILES_FROM else "range"
    at = [25, 50, 75] if name == "quartiles" else [0, 50, 100]
    low, median, high = np.percentile(np.asarray(values, dtype=float), at)
    return MedianAndSpread(float(median), float(low), float(high), name)


def compute_geometric_mean_ratio(
    numerators: Sequence[float], denominators: Sequence[float]
) -> float:
    """Return the geometric mean of the ratios of paired values, which must be above 0."""
    ratios = np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float)
    return float(np.exp(np.mean(np.log(ratios))))


def compute_paired_ratios(
    pairs: Sequence[np.ndarray], has_servers: Sequence[bool], num_simultaneous: int = 1
) -> list[IntervalEstimate]:
    """Return each pair's geometric mean ratio over repeats, with its 95 % moderated t interval.

    Column k of both rows comes from repeat k, so effects of the repeat's seed cancel. A single repeat
    has no interval. The variances of all `pairs` are pooled as in `shrink_variances_by_kind`.

    Args:
        pairs: Arrays of shape [2, repeats]: numerators and denominators.
        has_servers: Whether parameter servers take part, by pair.
        num_simultaneous: Number of intervals that hold together (Bonferroni); 1 for pointwise intervals.
    """
    if not pairs:
        return []
    values = np.full((2, len(pairs), max(pair.shape[1] for pair in pairs)), np.nan)
    for i, pair in enumerate(pairs):
        values[:, i, : pair.shape[1]] = pair
    differences = compute_paired_differences(*np.log(values))
    variance, dof = shrink_variances_by_kind(differences, np.array(has_servers))
    half = compute_interval_half_widths(
        variance, dof, differences.repeats, ALPHA / 2 / num_simultaneous
    )
    ends = np.exp(np.stack([differences.mean - half, differences.mean + half], axis=-1))
    return [
        IntervalEstimate(
            compute_geometric_mean_ratio(*pair),
            *map(float, interval) if np.isfinite(interval[1]) else (),
        )
        for pair, interval in zip(pairs, ends, strict=True)
    ]
