"""Blocks that depend on their predecessor: how much, and the widening of intervals.

A neighbour's job or a hot card that lasts for several blocks makes them similar, and their variance too
small. Successive blocks then differ less than any two do: von Neumann's ratio (1941) is below 1.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: By chance alone the ratio is this low in one comparison of five: no comparison ends early, nor drops a
#: strategy, below.
SUSPECT = 0.8416
#: And in one of a hundred: a comparison that ends with so low a ratio has a caveat.
CERTAIN = 2.3263
#: Amount by which a ratio is lowered, since it is estimated from a few blocks. By simulation.
LEAN = 0.1
#: Correlations of neighbouring blocks on a grid.
CORRELATIONS = np.linspace(0.0, 0.95, 39)


def neumann_ratio(logs: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return von Neumann's ratio of blocks, and its standard deviations below 1.

    It is half the mean square of successive differences over the variance: about 1 for independent blocks. It
    is over all strategies together, without the means of blocks and strategies. `logs`, shape [...,
    strategies, blocks]: NaN where a block does not count; `active`, shape [..., strategies]. Both results
    have shape [...]; they are 1 and 0 with fewer than 3 blocks or 2 strategies.
    """
    is_present = np.isfinite(logs) & active[..., None]
    n, k = is_present.any(-2).sum(-1), active.sum(-1)
    blocks, strategies = np.maximum(n, 1)[..., None], np.maximum(k, 1)[..., None]
    rest = np.where(is_present, logs, 0.0)
    rest = np.where(is_present, rest - (rest.sum(-2) / strategies)[..., None, :], 0.0)
    rest = np.where(is_present, rest - (rest.sum(-1) / blocks)[..., None], 0.0)
    # Blocks that do not count are between others if a strategy has come back: those that count are joined.
    order = np.argsort(~is_present.any(-2), axis=-1, kind="stable")[..., None, :]
    rest = np.take_along_axis(rest, np.broadcast_to(order, rest.shape), -1)
    both = np.arange(rest.shape[-1] - 1) < (n - 1)[..., None, None]
    steps = np.where(both, np.diff(rest, axis=-1), 0.0)
    squares = (rest**2).sum((-1, -2))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = (steps**2).sum((-1, -2)) / 2 / squares
        scatter = np.sqrt((n - 2) / (n**2 - 1) / (k - 1))
        z = (1 - ratio) / scatter
    enough = (n >= 3) & (k >= 2) & (squares > 0)
    return np.where(enough, ratio, 1.0), np.where(enough, z, 0.0)


def widening(ratio: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Return the factor for intervals of correlated blocks, 1 for independent ones.

    For an autoregression of first order it is the root of the true variance of their mean over the expected
    one.
    """
    factor = np.ones(np.broadcast(ratio, blocks).shape)
    for n in (n for n in np.unique(blocks) if n >= 3):
        ratios, factors = _autoregressive(int(n))
        factor = np.where(blocks == n, np.interp(LEAN - ratio, -ratios, factors), factor)
    return factor


@cache
def _autoregressive(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected ratio of `n` blocks, and the factor, for each of CORRELATIONS."""
    lags = np.arange(1, n)
    powers = CORRELATIONS[:, None] ** lags
    inflated = 1 + 2 * ((1 - lags / n) * powers).sum(-1)  # n times the variance of the mean
    expected = (n - inflated) / (n - 1)  # of the variance, divisor n - 1
    return (1 - CORRELATIONS) / expected, np.sqrt(inflated / expected)
