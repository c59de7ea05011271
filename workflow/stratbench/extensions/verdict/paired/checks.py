"""Checks of a conclusion: contradicting full runs, copied blocks, different devices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stratbench.extensions.verdict.block_rules import MAX_OFF
from stratbench.extensions.verdict.blocks import PairedBlock
from stratbench.extensions.verdict.paired.evidence import PairedComparison, PairedEvidence
from stratbench.statistics import moderated

#: A strategy's step in a block and in its own full run differ by no more than this factor.
MAX_APART = 3.0
#: Two measured blocks never have the same ratios to so many digits.
SAME = 1e-6


# ---------------------------------------------------------------- full runs


@dataclass(frozen=True)
class Moved:
    """Correction of a conclusion by contradicting full runs; logarithms."""

    at_most: float  # upper bound on how much faster than the leader something may be
    fastest: bool  # whether all alternatives are still slower
    nearest: str  # the alternative that may be the fastest


def off_from_steps(
    evidence: PairedEvidence, comparison: PairedComparison, blocks: Sequence[PairedBlock]
) -> dict[str, list[float]]:
    """Return the log ratio of each full run's time to its predicted time, by strategy.

    The prediction is its steps times the step time of `blocks`. It includes all runs that ended well.

    Args:
        evidence: Evidence of the verdict.
        comparison: The comparison.
        blocks: Its blocks.
    """
    deviations: dict[str, list[float]] = {}
    for strategy in comparison.strategies:
        known = [log for block in blocks if math.isfinite(log := block.value(strategy))]
        for run in evidence.runs_of(comparison, strategy):
            if known and run.step_log is not None:
                deviations.setdefault(strategy, []).append(run.step_log - statistics.fmean(known))
    return deviations


def moved_by(
    deviations: Mapping[str, Sequence[float]],
    leader: str,
    bounds: Mapping[str, float],
    blocks: int,
    level: tuple[float, int],
) -> Moved | None:
    """Return the correction of a conclusion by full runs.

    Return None if they agree with the blocks.

    An alternative's bound is lowered if the leader's full runs are slower than predicted by more than MAX_OFF
    beyond the alternative's. It is lowered by the difference, and by its possible chance part (95 %), since a
    full run has another allocation. An alternative's own deviation counts if it exceeds MAX_OFF. One without
    full runs takes that of the others, if they are slower.

    Args:
        deviations: Deviations from `off_from_steps`.
        leader: The leader.
        bounds: Lower bound of each alternative's log time over the leader's.
        blocks: Number of blocks.
        level: Result of `level_scatter`.
    """
    mean = {strategy: statistics.fmean(logs) for strategy, logs in deviations.items()}
    others = [log for strategy, logs in deviations.items() if strategy != leader for log in logs]
    like_others = max(0.0, beyond_chance(statistics.fmean(others))) if others else 0.0
    own, scatter, dof = mean.get(leader, 0.0), *level
    corrected = {}
    for strategy, bound in bounds.items():
        if leader not in mean and strategy not in mean:
            continue
        shift = own - (beyond_chance(mean[strategy]) if strategy in mean else like_others)
        if shift > MAX_OFF:
            runs = [len(deviations.get(leader, ())), len(deviations.get(strategy, others))]
            variance = scatter**2 * sum(1 / (n or blocks) for n in runs)
            by_chance = moderated.half_widths(
                np.array(variance), np.array(float(dof)), np.array(1), moderated.ALPHA
            )
            corrected[strategy] = bound - shift - float(by_chance)
    if not corrected:
        return None
    nearest = min(corrected, key=corrected.__getitem__)
    return Moved(max(0.0, -corrected[nearest]), corrected[nearest] > 0, nearest)


def beyond_chance(deviation: float) -> float:
    """Return the deviation of a full run, or 0 if allocations may explain it."""
    return deviation if abs(deviation) > MAX_OFF else 0.0


def check_scatter(runs: int, blocks: int, level: tuple[float, int]) -> float:
    """Return the standard deviation of the mean deviation of full runs, if both agree.

    Args:
        runs: Number of full runs.
        blocks: Number of blocks.
        level: Result of `level_scatter`.
    """
    return level[0] * math.sqrt(1 / runs + 1 / blocks)


def level_scatter(evidence: PairedEvidence) -> tuple[float, int]:
    """Return the between-allocation standard deviation of blocks, common to all strategies.

    It is of logarithms, pooled over the comparisons, with its degrees of freedom.
    """
    squares, dof = 0.0, 0
    for comparison in evidence.comparisons:
        blocks = evidence.blocks_of(comparison.place)
        logs = np.array(
            [[block.value(strategy) for strategy in comparison.strategies] for block in blocks]
        )
        if len(blocks) > 1 and (whole := np.isfinite(logs).all(0)).any():
            levels = logs[:, whole].mean(1)
            squares += float(((levels - levels.mean()) ** 2).sum())
            dof += len(blocks) - 1
    return (math.sqrt(squares / dof), dof) if dof else (0.0, 0)


def far_from_full_run(
    evidence: PairedEvidence, comparison: PairedComparison, block: PairedBlock
) -> Iterator[tuple[str, float]]:
    """Yield the strategies whose step in a block differs from their full run by MAX_APART, and how.

    Args:
        evidence: Evidence of the verdict.
        comparison: The comparison.
        block: One of its blocks.
    """
    for strategy in comparison.strategies:
        logs = [
            r.step_log for r in evidence.runs_of(comparison, strategy) if r.step_log is not None
        ]
        value = block.value(strategy)
        if logs and math.isfinite(value):
            apart = value - statistics.median(logs)
            if abs(apart) > math.log(MAX_APART):
                yield strategy, math.exp(apart)


# ---------------------------------------------------------------- blocks


def why_unusable(blocks: Sequence[PairedBlock]) -> Iterator[str]:
    """Yield why the blocks of a comparison allow no conclusion: copies, and mixed devices."""
    for one, other in combinations(blocks, 2):
        if is_copy(one, other):
            yield (
                f"the ratios of blocks {one.number} and {other.number} are equal to six digits, so that one "
                "is a copy: delete it, and it is measured again"
            )
            return
    kinds = sorted({block.device for block in blocks})
    names = sorted({", ".join(block.gpu_names) for block in blocks if block.gpu_names})
    for devices in (kinds, names):
        if len(devices) > 1:
            yield (
                f"its blocks ran on {' and on '.join(devices)}, whose times are not comparable: delete those "
                "of all but one, and they are measured again"
            )
            return


def is_copy(one: PairedBlock, other: PairedBlock) -> bool:
    """Return whether two blocks have the same ratios, of all or at least three strategies."""
    segments = [
        {(s.strategy, s.in_pass): math.log(s.mean_step_s) for s in block.segments if s.mean_step_s}
        for block in (one, other)
    ]
    strategies = {strategy for strategy, _ in segments[0]}
    values = [
        {strategy: v for strategy in strategies if math.isfinite(v := b.value(strategy))}
        for b in (one, other)
    ]
    return _same_ratios(*segments, least=4) or _same_ratios(*values, least=3)


def _same_ratios(one: Mapping, other: Mapping, least: int) -> bool:
    apart = [one[key] - other[key] for key in one.keys() & other.keys()]
    return len(apart) >= least and max(apart) - min(apart) < SAME
