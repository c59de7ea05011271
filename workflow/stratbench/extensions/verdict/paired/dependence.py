"""Measures how much a block depends on the block before it, and widens intervals accordingly.

A disturbance that lasts for several blocks, such as a hot GPU, makes these blocks too similar. Their variance
is then too small. Successive blocks then differ less than two random blocks: von Neumann's ratio (1941) is
below 1.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: Distance of von Neumann's ratio below 1, in standard deviations, beyond which a comparison does not end
#: early and drops no strategy. Independent blocks exceed it by chance in one comparison of five.
SUSPECT_SDS = 0.8416
#: Distance of von Neumann's ratio below 1, in standard deviations, beyond which the blocks count as
#: dependent, a reason to doubt the conclusion. Independent blocks exceed it by chance in one comparison of a
#: hundred.
CERTAIN_SDS = 2.3263
#: Bias of von Neumann's ratio for few blocks, found by simulation. It is subtracted from the ratio.
NEUMANN_RATIO_BIAS = 0.1
#: Correlations of successive blocks at which the widening of intervals is computed; others are interpolated.
CORRELATIONS = np.linspace(0.0, 0.95, 39)


def compute_neumann_ratio_and_distance(
    log_times: np.ndarray, is_active: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return von Neumann's ratio of the blocks, and its distance below 1 in standard deviations.

    The ratio is half the mean square of the differences between successive blocks, divided by the variance of
    the blocks. It is about 1 for independent blocks. All strategies are pooled. The means of each strategy
    and of each block are subtracted first.

    Args:
        log_times: Log step times, shape [..., strategies, blocks]; NaN where a block does not count.
        is_active: Mask of the strategies in the comparison, shape [..., strategies].

    Returns:
        The ratio and the distance, each of shape [...]. They are 1 and 0 if there are fewer than 3 blocks or
        2 strategies.
    """
    is_present = np.isfinite(log_times) & is_active[..., None]
    n, k = is_present.any(-2).sum(-1), is_active.sum(-1)
    blocks, strategies = np.maximum(n, 1)[..., None], np.maximum(k, 1)[..., None]
    rest = np.where(is_present, log_times, 0.0)
    rest = np.where(is_present, rest - (rest.sum(-2) / strategies)[..., None, :], 0.0)
    rest = np.where(is_present, rest - (rest.sum(-1) / blocks)[..., None], 0.0)
    # Blocks without all strategies do not count. Sorting removes these gaps between the blocks that count.
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


def compute_interval_widening_factor(
    neumann_ratio: np.ndarray, num_blocks: np.ndarray
) -> np.ndarray:
    """Return the factor by which correlated blocks widen an interval; 1 for independent blocks.

    The blocks are modelled as a first-order autoregression. The factor is the square root of a quotient: the
    true variance of the blocks' mean, divided by the variance that is computed as for independent blocks.

    Args:
        neumann_ratio: Von Neumann's ratio of each comparison.
        num_blocks: Number of blocks of each comparison.
    """
    factor = np.ones(np.broadcast(neumann_ratio, num_blocks).shape)
    for n in (n for n in np.unique(num_blocks) if n >= 3):
        ratios, factors = _compute_neumann_ratios_and_widenings(int(n))
        factor = np.where(
            num_blocks == n, np.interp(NEUMANN_RATIO_BIAS - neumann_ratio, -ratios, factors), factor
        )
    return factor


@cache
def _compute_neumann_ratios_and_widenings(num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected von Neumann's ratio and the widening factor, for each of CORRELATIONS.

    Args:
        num_blocks: Number of blocks.
    """
    lags = np.arange(1, num_blocks)
    powers = CORRELATIONS[:, None] ** lags
    # True variance of the mean, divided by that of the mean of as many independent blocks.
    inflated = 1 + 2 * ((1 - lags / num_blocks) * powers).sum(-1)
    # Expected sample variance (divisor: number of blocks minus 1), divided by the true variance.
    expected = (num_blocks - inflated) / (num_blocks - 1)
    return (1 - CORRELATIONS) / expected, np.sqrt(inflated / expected)
