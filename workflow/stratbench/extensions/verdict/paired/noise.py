"""Estimates the noise of blocks, and the number of blocks that a conclusion needs.

The estimates are by the method of moments.

The log step time of a segment is modelled as a sum: strategy, allocation, strategy in this allocation, trend
over the block, start of the process, and variation within the segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stratbench.extensions.verdict.blocks import PairedBlock
from stratbench.extensions.verdict.paired import judging
from stratbench.statistics import moderated


@dataclass(frozen=True)
class Noise:
    """Standard deviations of log step times by source; None if unknown, 0 if the blocks show none."""

    #: Standard deviation between allocations that is the same for all strategies.
    allocation_sd: float | None
    #: Standard deviation between allocations that is different for each strategy.
    strategy_in_allocation_sd: float | None
    #: Standard deviation between two starts of a strategy's processes in one block.
    process_start_sd: float | None
    #: Standard deviation of the mean over a segment's steps, from the variation of these steps.
    step_mean_sd: float | None
    #: Standard deviation of a segment: `process_start_sd` and `step_mean_sd` together.
    segment_sd: float | None
    #: Standard deviation of the linear trend over a block, at the ends of the block.
    drift_sd: float | None
    #: Standard deviation of the log time ratio of two strategies in one block.
    log_ratio_sd: float | None
    #: Number of blocks from which the values were estimated.
    num_blocks: int
    #: Degrees of freedom of `log_ratio_sd`.
    log_ratio_dof: int

    def as_dict(self) -> dict[str, float | None]:
        """Return the values as verdict.json has them."""
        return {
            "allocation": self.allocation_sd,
            "strategy_in_allocation": self.strategy_in_allocation_sd,
            "process": self.process_start_sd,
            "within": self.step_mean_sd,
            "segment": self.segment_sd,
            "drift": self.drift_sd,
            "ratio": self.log_ratio_sd,
            "blocks": self.num_blocks,
            "dof": self.log_ratio_dof,
        }

    def count_blocks_for_margin(self, margin: float, num_rivals: int) -> int | None:
        """Return the number of blocks that a conclusion within `margin` needs.

        All strategies are assumed to be equally fast. The result is None if this takes more blocks than a
        verdict runs, or if the noise is unknown.
        """
        if self.log_ratio_sd is None:
            return None
        for n in (n for n in judging.LOOKS if n >= judging.MIN_BLOCKS):
            dof = np.array(3 * (n - 1) + 4)
            half = moderated.compute_interval_half_widths(
                np.array(self.log_ratio_sd**2),
                dof,
                np.array(n),
                moderated.compute_alternatives_tail_probability(num_rivals),
            )
            if half <= math.log1p(margin):
                return n
        return None


def estimate_block_noise(blocks: Iterable[PairedBlock]) -> Noise:
    """Return the noise of some blocks, pooled over their comparisons."""
    by_place: dict[object, list[PairedBlock]] = {}
    for block in blocks:
        by_place.setdefault(block.comparison_key, []).append(block)
    segment, trend, between, allocation = (
        _WeightedMean(),
        _WeightedMean(),
        _WeightedMean(),
        _WeightedMean(),
    )
    within = _WeightedMean()
    for compared in by_place.values():
        for block in compared:
            _add_noise_within_block(block, segment, trend)
            for s in block.segments:
                if s.status == "ok" and s.step_cv is not None:
                    within.add_value(
                        s.step_cv**2 * CORRELATED_VARIANCE_FACTOR / block.timed_steps_per_segment, 1
                    )
        _add_noise_between_blocks(compared, between, allocation)
    of_segment = segment.value
    interaction = None
    if between.value is not None and of_segment is not None:
        # A block's value is the mean of two segments, which has half the variance of one segment.
        interaction = max(0.0, between.value - of_segment / 2)
    process = None
    if of_segment is not None and within.value is not None:
        process = max(0.0, of_segment - within.value)
    return Noise(
        allocation_sd=_sqrt_or_none(allocation.value),
        strategy_in_allocation_sd=_sqrt_or_none(interaction),
        process_start_sd=_sqrt_or_none(process),
        step_mean_sd=_sqrt_or_none(within.value),
        segment_sd=_sqrt_or_none(of_segment),
        drift_sd=_sqrt_or_none(trend.value),
        log_ratio_sd=None if between.value is None else math.sqrt(2 * between.value),
        num_blocks=sum(map(len, by_place.values())),
        log_ratio_dof=round(between.weight),
    )


#: Variance of a mean of steps whose successive correlation is 0.3, over the variance for independent steps.
CORRELATED_VARIANCE_FACTOR = (1 + 0.3) / (1 - 0.3)


class _WeightedMean:
    """Weighted mean of estimated variances, to which values are added one by one."""

    def __init__(self) -> None:
        self.sum = self.weight = 0.0

    def add_value(self, value: float, weight: float) -> None:
        self.sum += weight * value
        self.weight += weight

    @property
    def value(self) -> float | None:
        """The weighted mean, or 0 if it is negative; None before the first value."""
        return max(0.0, self.sum / self.weight) if self.weight else None


def _sqrt_or_none(variance: float | None) -> float | None:
    return None if variance is None else math.sqrt(variance)


def _add_noise_within_block(
    block: PairedBlock, segment_variance: _WeightedMean, trend_variance: _WeightedMean
) -> None:
    """Add a block's differences between the two segments of each strategy to the noise estimates.

    A linear trend over the block is fitted to these differences.

    Args:
        block: The block.
        segment_variance: Estimate of the variance of a segment, to which a value is added.
        trend_variance: Estimate of the variance of the trend, to which a value is added.
    """
    rows = []
    for strategy in dict.fromkeys(s.strategy for s in block.segments):
        pair = block.list_counted_segments(strategy)
        if logs := block.list_segment_log_step_times(strategy):
            rows.append((pair[1].slot - pair[0].slot, logs[1] - logs[0]))
    if len(rows) < 2:
        return
    apart, difference = np.array(rows, dtype=float).T
    squares = float((apart**2).sum())
    slope = float((apart * difference).sum()) / squares
    variance = float(((difference - slope * apart) ** 2).sum()) / (len(rows) - 1) / 2
    segment_variance.add_value(variance, len(rows) - 1)
    half = apart.max() / 2
    trend_variance.add_value((slope**2 - 2 * variance / squares) * half**2, 1)


def _add_noise_between_blocks(
    blocks: list[PairedBlock], strategy_variance: _WeightedMean, allocation_variance: _WeightedMean
) -> None:
    """Update the noise estimates by a comparison's differences between its blocks.

    Only strategies that are in all blocks count.

    Args:
        blocks: Blocks of the comparison.
        strategy_variance: Estimate of the variance of a strategy between blocks, to which a value is added.
        allocation_variance: Estimate of the variance that all strategies share, to which a value is added.
    """
    strategies = [
        strategy
        for strategy in dict.fromkeys(s.strategy for s in blocks[0].segments)
        if all(block.list_segment_log_step_times(strategy) for block in blocks)
    ]
    n, k = len(blocks), len(strategies)
    if n < 2 or not k:
        return
    x = np.array(
        [[block.compute_log_step_time(strategy) for strategy in strategies] for block in blocks]
    )
    of_block = x.mean(1)
    if k > 1:
        rest = x - of_block[:, None] - x.mean(0) + x.mean()
        residual = float((rest**2).sum()) / ((n - 1) * (k - 1))
        strategy_variance.add_value(residual, (n - 1) * (k - 1))
        allocation_variance.add_value(float(of_block.var(ddof=1)) - residual / k, n - 1)
