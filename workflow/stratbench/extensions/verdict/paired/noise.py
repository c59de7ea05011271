"""Noise of a cluster's own blocks, by the method of moments, and the blocks it requires.

The model of a segment's log time: strategy + allocation + strategy x allocation + trend over the block +
start of the process + within the segment. All values are standard deviations on the log scale.
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
    """Variance components as standard deviations: None if unknown, 0 if the blocks show none."""

    allocation: float | None
    strategy_in_allocation: float | None
    process: float | None
    within: float | None
    #: Standard deviation of a single segment: process and within together.
    segment: float | None
    #: Standard deviation of the trend, at the ends of a block.
    drift: float | None
    #: Standard deviation of the paired ratio of two strategies in one block.
    ratio: float | None
    blocks: int
    #: Degrees of freedom of `ratio`.
    dof: int

    def blocks_for(self, margin: float, rivals: int) -> int | None:
        """Return the blocks until equally fast strategies are within `margin`.

        None if that takes more than a verdict has, or if the noise is unknown.
        """
        if self.ratio is None:
            return None
        for n in (n for n in judging.LOOKS if n >= judging.MIN_BLOCKS):
            dof = np.array(3 * (n - 1) + 4)
            half = moderated.half_widths(
                np.array(self.ratio**2), dof, np.array(n), moderated.tail_of(rivals)
            )
            if half <= math.log1p(margin):
                return n
        return None


def noise_of(blocks: Iterable[PairedBlock]) -> Noise:
    """Return the components of noise, pooled over the comparisons of `blocks`."""
    by_place: dict[object, list[PairedBlock]] = {}
    for block in blocks:
        by_place.setdefault(block.place, []).append(block)
    segment, trend, between, allocation = _Mean(), _Mean(), _Mean(), _Mean()
    within = _Mean()
    for compared in by_place.values():
        for block in compared:
            _add_differences(block, segment, trend)
            for s in block.segments:
                if s.status == "ok" and s.step_cv is not None:
                    within.add(s.step_cv**2 * CORRELATED / block.steps, 1)
        _add_blocks(compared, between, allocation)
    of_segment = segment.value
    # A mean of two segments has half the variance of one.
    interaction = None
    if between.value is not None and of_segment is not None:
        interaction = max(0.0, between.value - of_segment / 2)
    process = None
    if of_segment is not None and within.value is not None:
        process = max(0.0, of_segment - within.value)
    return Noise(
        allocation=_root(allocation.value),
        strategy_in_allocation=_root(interaction),
        process=_root(process),
        within=_root(within.value),
        segment=_root(of_segment),
        drift=_root(trend.value),
        ratio=None if between.value is None else math.sqrt(2 * between.value),
        blocks=sum(map(len, by_place.values())),
        dof=round(between.weight),
    )


#: Variance of a mean of steps whose neighbours correlate by 0.3, over that of independent steps.
CORRELATED = (1 + 0.3) / (1 - 0.3)


class _Mean:
    """A weighted mean of estimated variances."""

    def __init__(self) -> None:
        self.sum = self.weight = 0.0

    def add(self, value: float, weight: float) -> None:
        self.sum += weight * value
        self.weight += weight

    @property
    def value(self) -> float | None:
        """The mean, not below 0, or None without any."""
        return max(0.0, self.sum / self.weight) if self.weight else None


def _root(variance: float | None) -> float | None:
    return None if variance is None else math.sqrt(variance)


def _add_differences(block: PairedBlock, segment: _Mean, trend: _Mean) -> None:
    """Add a block's mirror: mirror minus first pass is the trend times the slots between."""
    rows = []
    for strategy in dict.fromkeys(s.strategy for s in block.segments):
        pair = block.of(strategy)
        if logs := block.logs(strategy):
            rows.append((pair[1].slot - pair[0].slot, logs[1] - logs[0]))
    if len(rows) < 2:
        return
    apart, difference = np.array(rows, dtype=float).T
    squares = float((apart**2).sum())
    slope = float((apart * difference).sum()) / squares
    variance = float(((difference - slope * apart) ** 2).sum()) / (len(rows) - 1) / 2
    segment.add(variance, len(rows) - 1)
    half = apart.max() / 2
    trend.add((slope**2 - 2 * variance / squares) * half**2, 1)


def _add_blocks(blocks: list[PairedBlock], between: _Mean, allocation: _Mean) -> None:
    """Add several blocks of a comparison, for the strategies in all of them."""
    strategies = [
        strategy
        for strategy in dict.fromkeys(s.strategy for s in blocks[0].segments)
        if all(block.logs(strategy) for block in blocks)
    ]
    n, k = len(blocks), len(strategies)
    if n < 2 or not k:
        return
    x = np.array([[block.value(strategy) for strategy in strategies] for block in blocks])
    of_block = x.mean(1)
    if k > 1:
        rest = x - of_block[:, None] - x.mean(0) + x.mean()
        residual = float((rest**2).sum()) / ((n - 1) * (k - 1))
        between.add(residual, (n - 1) * (k - 1))
        allocation.add(float(of_block.var(ddof=1)) - residual / k, n - 1)
