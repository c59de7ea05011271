"""Medians, quartiles and bootstrap intervals: every statistic that a table or a figure prints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

#: Resamples of one interval; the interval's ends then move by less than a hundredth of its width.
RESAMPLES = 5000
CONFIDENCE = 0.95


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile of `values`, with linear interpolation."""
    q1, median, q3 = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
    return float(median), float(q1), float(q3)


def ratio_of_medians(
    numerators: np.ndarray, denominators: np.ndarray, axis: int = -1
) -> np.ndarray:
    """median(numerators) / median(denominators) along `axis`."""
    return np.median(numerators, axis=axis) / np.median(denominators, axis=axis)


def ratio_intervals(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray | None:
    """Percentile-bootstrap 95 % intervals of ratios of medians, resampling pairs.

    Both arguments have shape [ratios, repeats]; column k of both comes from repeat k, so that what
    a repeat's seed does to both cancels. Returns shape [ratios, 2] (low, high), or None with fewer
    than two repeats. The same repeats always give the same interval. With few repeats it is too
    narrow, since it cannot leave the range of what was seen: of simulated ratios with
    normal noise it held the true one in 76 % of cases with 3 repeats and in 93 % with 5.
    """
    numerators, denominators = (np.asarray(a, dtype=float) for a in (numerators, denominators))
    if numerators.shape != denominators.shape or numerators.ndim != 2:
        raise ValueError(
            f"ratio_intervals: shapes {numerators.shape} and {denominators.shape}; "
            "expected two equal shapes [ratios, repeats]"
        )
    ratios, repeats = numerators.shape
    if repeats < 2:
        return None
    result = stats.bootstrap(
        (numerators, denominators),
        ratio_of_medians,
        n_resamples=RESAMPLES,
        batch=max(1, 2_000_000 // max(1, ratios * repeats)),
        paired=True,
        vectorized=True,
        axis=-1,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    interval = result.confidence_interval
    return np.stack([interval.low, interval.high], axis=-1)
