"""Measures how much a block depends on its predecessor, and widens intervals accordingly.

A neighbour's job or a hot GPU that lasts for several blocks makes these similar, and their variance too
small. Successive blocks then differ less than two random blocks do: von Neumann's ratio (1941) is below 1.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: Standard deviations below 1 that independent blocks reach in one comparison of five. Beyond it no
#: comparison ends early, and none drops a strategy.
SUSPECT = 0.8416
#: Standard deviations below 1 that independent blocks reach in one comparison of a hundred. Beyond it the
#: conclusion has a caveat.
CERTAIN = 2.3263
#: Amount by which the ratio is lowered because few blocks bias it; found by simulation.
LEAN = 0.1
#: Grid of correlations of successive blocks, for interpolation.
CORRELATIONS = np.linspace(0.0, 0.95, 39)


def compute_neumann_ratio(logs: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return von Neumann's ratio of successive blocks, and its distance below 1.

    The distance is in standard deviations. The ratio is half the mean square of successive differences over
    the variance: about 1 for independent blocks. It pools all strategies, after their means and the blocks'
    means are removed.

    Args:
        logs: Log step times, shape [..., strategies, blocks]; NaN where a block does not count.
        active: Strategies in the comparison, shape [..., strategies].

    Returns:
        Both of shape [...]; 1 and 0 with fewer than 3 blocks or 2 strategies.
    """
    is_present = np.isfinite(logs) & active[..., None]
    n, k = is_present.any(-2).sum(-1), active.sum(-1)
    blocks, strategies = np.maximum(n, 1)[..., None], np.maximum(k, 1)[..., None]
    rest = np.where(is_present, logs, 0.0)
    rest = np.where(is_present, rest - (rest.sum(-2) / strategies)[..., None, :], 0.0)
    rest = np.where(is_present, rest - (rest.sum(-1) / blocks)[..., None], 0.0)
    # A strategy that has come back leaves gaps between blocks: sorting moves the counting blocks together.
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


def compute_interval_widening(ratio: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Return the factor by which intervals of correlated blocks are wider, 1 for independent blocks.

    For a first-order autoregression it is the square root of the mean's true variance over the variance that
    independent blocks would have.
    """
    factor = np.ones(np.broadcast(ratio, blocks).shape)
    for n in (n for n in np.unique(blocks) if n >= 3):
        ratios, factors = _compute_autoregressive_interval_factors(int(n))
        factor = np.where(blocks == n, np.interp(LEAN - ratio, -ratios, factors), factor)
    return factor


@cache
def _compute_autoregressive_interval_factors(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return von Neumann's expected ratio and the interval factor of `n` blocks per correlation."""
    lags = np.arange(1, n)
    powers = CORRELATIONS[:, None] ** lags
    # Number of blocks times the variance of the mean, in units of the variance.
    inflated = 1 + 2 * ((1 - lags / n) * powers).sum(-1)
    expected = (n - inflated) / (n - 1)  # expected value of the variance with divisor n - 1
    return (1 - CORRELATIONS) / expected, np.sqrt(inflated / expected)
