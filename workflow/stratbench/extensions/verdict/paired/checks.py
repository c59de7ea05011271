"""Checks of a verdict's conclusion: full runs that contradict it, copied blocks, mixed devices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stratbench.extensions.verdict.block_rules import MAX_LOG_DEVIATION
from stratbench.extensions.verdict.blocks import PairedBlock
from stratbench.extensions.verdict.paired.evidence import (
    PairedComparison,
    PairedEvidence,
    SdEstimate,
)
from stratbench.statistics import moderated

#: Largest credible ratio of a strategy's step times in a block and in its own full run.
MAX_STEP_TIME_RATIO = 3.0
#: Two blocks are copies if their log time ratios differ by less. Measured ratios are never so equal.
MAX_COPY_DIFFERENCE = 1e-6


@dataclass(frozen=True)
class FullRunCorrection:
    """Corrected conclusion of a comparison whose full runs contradict its blocks."""

    #: How much faster than the leader an alternative may be at most: the largest upper bound on
    #: log(leader's time / alternative's time), over all alternatives.
    max_log_advantage_over_leader: float
    #: Whether every alternative is still shown to be slower than the leader.
    is_leader_fastest: bool
    #: Alternative with the lowest corrected bound.
    nearest_rival: str


def compute_full_run_deviations(
    evidence: PairedEvidence, comparison: PairedComparison, blocks: Sequence[PairedBlock]
) -> dict[str, list[float]]:
    """Return log(measured / predicted time) of each full run, by strategy.

    The predicted time is the run's number of steps times the mean step time in `blocks`. Failed runs are left
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


def correct_conclusion_by_full_runs(
    deviations: Mapping[str, Sequence[float]],
    leader: str,
    bounds: Mapping[str, float],
    num_blocks: int,
    allocation_noise: SdEstimate,
) -> FullRunCorrection | None:
    """Return the corrected conclusion if the leader's full runs contradict its blocks, else None.

    A block times the strategies in short runs, and a full run is a whole training. A deviation is
    log(measured / predicted time) of a full run. If the leader's deviation exceeds an alternative's by more
    than MAX_LOG_DEVIATION, the alternative's bound is lowered by this difference. The bound is also lowered
    by the half-width of the difference's 95 % interval, because a full run has another allocation. An
    alternative's own deviation counts only if it exceeds MAX_LOG_DEVIATION. An alternative without full runs
    gets the mean deviation of all alternatives, if this mean is positive.

    Args:
        deviations: Deviations from `compute_full_run_deviations`, by strategy.
        leader: The fastest strategy in the blocks.
        bounds: Lower bound of log(time / leader's time), by alternative.
        num_blocks: Number of blocks.
        allocation_noise: Result of `estimate_allocation_sd`.
    """
    mean = {strategy: statistics.fmean(logs) for strategy, logs in deviations.items()}
    others = [log for strategy, logs in deviations.items() if strategy != leader for log in logs]
    like_others = max(0.0, zero_small_deviation(statistics.fmean(others))) if others else 0.0
    own, scatter, dof = mean.get(leader, 0.0), *allocation_noise
    corrected = {}
    for strategy, bound in bounds.items():
        if leader not in mean and strategy not in mean:
            continue
        shift = own - (zero_small_deviation(mean[strategy]) if strategy in mean else like_others)
        if shift > MAX_LOG_DEVIATION:
            runs = [len(deviations.get(leader, ())), len(deviations.get(strategy, others))]
            variance = scatter**2 * sum(1 / (n or num_blocks) for n in runs)
            by_chance = moderated.compute_interval_half_widths(
                np.array(variance), np.array(float(dof)), np.array(1), moderated.ALPHA
            )
            corrected[strategy] = bound - shift - float(by_chance)
    if not corrected:
        return None
    nearest = min(corrected, key=corrected.__getitem__)
    return FullRunCorrection(max(0.0, -corrected[nearest]), corrected[nearest] > 0, nearest)


def zero_small_deviation(deviation: float) -> float:
    """Return a full run's log deviation. Return 0 if its absolute value is at most MAX_LOG_DEVIATION."""
    return deviation if abs(deviation) > MAX_LOG_DEVIATION else 0.0


def estimate_full_run_deviation_sd(
    num_full_runs: int, num_blocks: int, allocation_noise: SdEstimate
) -> float:
    """Return the standard deviation of the full runs' mean log deviation from the blocks.

    Only the noise between allocations is included.

    Args:
        num_full_runs: Number of full runs.
        num_blocks: Number of blocks.
        allocation_noise: Result of `estimate_allocation_sd`.
    """
    return allocation_noise.sd * math.sqrt(1 / num_full_runs + 1 / num_blocks)


def estimate_allocation_sd(evidence: PairedEvidence) -> SdEstimate:
    """Return the standard deviation of log step times between allocations, and its degrees of freedom.

    A block runs in one allocation. The deviation of an allocation is the same for all strategies. It is
    pooled over the comparisons.
    """
    squares, dof = 0.0, 0
    for comparison in evidence.comparisons:
        blocks = evidence.list_blocks_of_comparison(comparison.comparison_key)
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
    return SdEstimate(math.sqrt(squares / dof), dof) if dof else SdEstimate(0.0, 0)


def iter_strategies_contradicting_full_runs(
    evidence: PairedEvidence, comparison: PairedComparison, block: PairedBlock
) -> Iterator[tuple[str, float]]:
    """Yield each strategy whose step time in a block contradicts its full run.

    Each strategy comes with its step time in the block divided by that in its full runs. The two contradict
    each other if this ratio, or its inverse, exceeds MAX_STEP_TIME_RATIO.

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
            if abs(apart) > math.log(MAX_STEP_TIME_RATIO):
                yield strategy, math.exp(apart)


def iter_reasons_for_unusable_blocks(blocks: Sequence[PairedBlock]) -> Iterator[str]:
    """Yield the reasons why a comparison's blocks allow no conclusion, such as a copy."""
    for one, other in combinations(blocks, 2):
        if is_copied_block(one, other):
            yield (
                f"the ratios of blocks {one.block_number} and {other.block_number} are equal to six digits, "
                "so that one block is a copy of the other: delete it, and it is measured again"
            )
            return
    kinds = sorted({block.device_kind for block in blocks})
    names = sorted({", ".join(block.gpu_names) for block in blocks if block.gpu_names})
    for devices in (kinds, names):
        if len(devices) > 1:
            yield (
                f"its blocks ran on {' and on '.join(devices)}, whose times are not comparable: delete the "
                "blocks of all devices but one, and they are measured again"
            )
            return


def is_copied_block(one: PairedBlock, other: PairedBlock) -> bool:
    """Return whether two blocks are copies: their time ratios are equal."""
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
    return _has_same_ratios(*segments, min_common_keys=4) or _has_same_ratios(
        *values, min_common_keys=3
    )


def _has_same_ratios(
    one_log_times: Mapping, other_log_times: Mapping, min_common_keys: int
) -> bool:
    common_keys = one_log_times.keys() & other_log_times.keys()
    apart = [one_log_times[key] - other_log_times[key] for key in common_keys]
    return len(apart) >= min_common_keys and max(apart) - min(apart) < MAX_COPY_DIFFERENCE
