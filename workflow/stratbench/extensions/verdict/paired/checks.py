"""Checks of a verdict's conclusion: full runs that contradict it, copied blocks, mixed devices."""

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

#: Largest credible factor between a strategy's step time in a block and in its own full run.
MAX_APART = 3.0
#: Two blocks whose log ratios differ by less than this are copies: measured blocks are never so equal.
MAX_COPY_DIFFERENCE = 1e-6


# ---------------------------------------------------------------- full runs


@dataclass(frozen=True)
class FullRunCorrection:
    """Correction of a conclusion that full runs contradict. Bounds are natural logarithms."""

    #: Upper bound on the log ratio by which any strategy may be faster than the leader.
    max_log_advantage: float
    is_fastest: bool  # whether all alternatives are still shown to be slower than the leader
    nearest_strategy: str  # the alternative with the lowest corrected bound


def compute_full_run_deviations(
    evidence: PairedEvidence, comparison: PairedComparison, blocks: Sequence[PairedBlock]
) -> dict[str, list[float]]:
    """Return the log ratio of each full run's time to its predicted time, by strategy.

    The prediction is the run's number of steps times the mean step time in `blocks`. Failed runs are left
    out.

    Args:
        evidence: Evidence of the verdict.
        comparison: The comparison.
        blocks: Blocks of the comparison.
    """
    deviations: dict[str, list[float]] = {}
    for strategy in comparison.strategies:
        known = [
            log for block in blocks if math.isfinite(log := block.compute_log_step_time(strategy))
        ]
        for run in evidence.list_full_runs(comparison, strategy):
            if known and run.log_step_time is not None:
                deviations.setdefault(strategy, []).append(
                    run.log_step_time - statistics.fmean(known)
                )
    return deviations


def correct_by_full_runs(
    deviations: Mapping[str, Sequence[float]],
    leader: str,
    bounds: Mapping[str, float],
    blocks: int,
    level: tuple[float, int],
) -> FullRunCorrection | None:
    """Return the correction of a conclusion if the leader's full runs contradict its blocks.

    Return None if full runs and blocks agree.

    An alternative's bound is lowered if the leader's full runs are slower than predicted by more than MAX_OFF
    beyond the alternative's. It is lowered by the difference, and by the half-width of its 95 % interval,
    since a full run has another allocation. An alternative's own deviation counts if it exceeds MAX_OFF. An
    alternative without full runs takes the mean deviation of the others if these are slower than predicted.

    Args:
        deviations: Deviations from `compute_full_run_deviations`.
        leader: The fastest strategy by the blocks.
        bounds: Lower bound of log(time / leader's time) of each alternative.
        blocks: Number of blocks.
        level: Result of `estimate_allocation_sd`.
    """
    mean = {strategy: statistics.fmean(logs) for strategy, logs in deviations.items()}
    others = [log for strategy, logs in deviations.items() if strategy != leader for log in logs]
    like_others = max(0.0, zero_small_deviation(statistics.fmean(others))) if others else 0.0
    own, scatter, dof = mean.get(leader, 0.0), *level
    corrected = {}
    for strategy, bound in bounds.items():
        if leader not in mean and strategy not in mean:
            continue
        shift = own - (zero_small_deviation(mean[strategy]) if strategy in mean else like_others)
        if shift > MAX_OFF:
            runs = [len(deviations.get(leader, ())), len(deviations.get(strategy, others))]
            variance = scatter**2 * sum(1 / (n or blocks) for n in runs)
            by_chance = moderated.compute_half_widths(
                np.array(variance), np.array(float(dof)), np.array(1), moderated.ALPHA
            )
            corrected[strategy] = bound - shift - float(by_chance)
    if not corrected:
        return None
    nearest = min(corrected, key=corrected.__getitem__)
    return FullRunCorrection(max(0.0, -corrected[nearest]), corrected[nearest] > 0, nearest)


def zero_small_deviation(deviation: float) -> float:
    """Return a full run's deviation, or 0 if differences between allocations may explain it."""
    return deviation if abs(deviation) > MAX_OFF else 0.0


def compute_full_run_check_sd(runs: int, blocks: int, level: tuple[float, int]) -> float:
    """Return the standard deviation of full runs' mean deviation from blocks, by chance alone.

    Args:
        runs: Number of full runs.
        blocks: Number of blocks.
        level: Result of `estimate_allocation_sd`.
    """
    return level[0] * math.sqrt(1 / runs + 1 / blocks)


def estimate_allocation_sd(evidence: PairedEvidence) -> tuple[float, int]:
    """Return the between-allocation standard deviation of blocks, and its degrees of freedom.

    All strategies share it. It is that of log step times, pooled over the comparisons.
    """
    squares, dof = 0.0, 0
    for comparison in evidence.comparisons:
        blocks = evidence.list_blocks(comparison.comparison_key)
        logs = np.array(
            [
                [block.compute_log_step_time(strategy) for strategy in comparison.strategies]
                for block in blocks
            ]
        )
        if len(blocks) > 1 and (whole := np.isfinite(logs).all(0)).any():
            levels = logs[:, whole].mean(1)
            squares += float(((levels - levels.mean()) ** 2).sum())
            dof += len(blocks) - 1
    return (math.sqrt(squares / dof), dof) if dof else (0.0, 0)


def iter_contradicting_strategies(
    evidence: PairedEvidence, comparison: PairedComparison, block: PairedBlock
) -> Iterator[tuple[str, float]]:
    """Yield each strategy whose block contradicts its full run by over MAX_APART, with the factor.

    Args:
        evidence: Evidence of the verdict.
        comparison: The comparison.
        block: A block of the comparison.
    """
    for strategy in comparison.strategies:
        logs = [
            r.log_step_time
            for r in evidence.list_full_runs(comparison, strategy)
            if r.log_step_time is not None
        ]
        value = block.compute_log_step_time(strategy)
        if logs and math.isfinite(value):
            apart = value - statistics.median(logs)
            if abs(apart) > math.log(MAX_APART):
                yield strategy, math.exp(apart)


# ---------------------------------------------------------------- blocks


def iter_unusable_reasons(blocks: Sequence[PairedBlock]) -> Iterator[str]:
    """Yield reasons why a comparison's blocks allow no conclusion, such as copied blocks."""
    for one, other in combinations(blocks, 2):
        if is_copy(one, other):
            yield (
                f"the ratios of blocks {one.block_number} and {other.block_number} are equal to six digits, "
                "so that one block is a copy of the other: delete it, and it is measured again"
            )
            return
    kinds = sorted({block.device for block in blocks})
    names = sorted({", ".join(block.gpu_names) for block in blocks if block.gpu_names})
    for devices in (kinds, names):
        if len(devices) > 1:
            yield (
                f"its blocks ran on {' and on '.join(devices)}, whose times are not comparable: delete the "
                "blocks of all devices but one, and they are measured again"
            )
            return


def is_copy(one: PairedBlock, other: PairedBlock) -> bool:
    """Return whether one of two blocks must be a copy of the other.

    Copies have equal time ratios.
    """
    segments = [
        {
            (s.strategy, s.pass_name): math.log(s.mean_step_s)
            for s in block.segments
            if s.mean_step_s
        }
        for block in (one, other)
    ]
    strategies = {strategy for strategy, _ in segments[0]}
    values = [
        {
            strategy: v
            for strategy in strategies
            if math.isfinite(v := b.compute_log_step_time(strategy))
        }
        for b in (one, other)
    ]
    return _have_same_ratios(*segments, least=4) or _have_same_ratios(*values, least=3)


def _have_same_ratios(one: Mapping, other: Mapping, least: int) -> bool:
    apart = [one[key] - other[key] for key in one.keys() & other.keys()]
    return len(apart) >= least and max(apart) - min(apart) < MAX_COPY_DIFFERENCE
