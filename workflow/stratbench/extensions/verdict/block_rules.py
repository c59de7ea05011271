"""Segments: the short trainings of a block, how long they are, and what they cost.

A block is one job in one allocation, in which every strategy of a model and worker count trains two
segments. Jobs, plans and verdicts agree on the rules here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Repeats of the full matrix that a verdict replaces; a leader's score is measured in no more.
MATRIX_REPEATS = 3
#: Segments are no shorter and no longer, in steps.
MIN_STEPS, MAX_STEPS = 50, 300
#: Steps discarded after the warm-up: at least so many (fp16's scaler restarts and skips), and this
#: share of the segment.
MIN_DISCARDED, SHARE_DISCARDED = 15, 0.2
#: Two segments disagree from this difference of their logarithms on, or from so many times the median
#: difference of the study.
MIN_DISAGREEMENT, DISAGREEMENT = 0.03, 5.9
#: By how much the logarithm of a full run's time may differ from that of its steps x step time.
MAX_OFF = 0.03
#: Assumed noise of a step's time before any measurement: its standard deviation over its mean, the
#: correlation of neighbours, and the standard deviation between two starts of a process.
STEP_NOISE = {"cuda": (0.05, 0.3, 0.008), "cpu": (0.3, 0.3, 0.05)}
#: Seconds to start a segment's processes from a fork server, where none was measured.
SEGMENT_START_S = {"cuda": 6.0, "cpu": 0.7}
#: Effort of a verdict in simulations: segments per strategy, and strategies per full cell for scores, of
#: which there is at least one.
SEGMENTS_PER_STRATEGY, STRATEGIES_PER_FULL_CELL = 7.5, 9


def segment_steps(
    start_s: float, step_s: float, step_cv: float, correlation: float, process_sd: float
) -> int:
    """Return the steps of a segment that are most informative per second of run time.

    A segment is long where a start is expensive, and short where starts differ more than steps do. The
    formula is sqrt(start_s / step_s * step_cv^2 (1 + r) / (1 - r) / process_sd^2), Kalibera and Jones 2013.
    The result is between MIN_STEPS and MAX_STEPS.

    Args:
        start_s: Seconds of a start.
        step_s: Seconds per step.
        step_cv: Standard deviation of a step's time over its mean.
        correlation: Correlation r of neighbouring steps.
        process_sd: Standard deviation between starts, of logarithms.
    """
    if not (start_s > 0 and step_s > 0 and process_sd > 0):
        return MIN_STEPS
    within = step_cv**2 * (1 + correlation) / (1 - correlation)
    best = math.sqrt(start_s / step_s * within) / process_sd
    return round(min(max(best, MIN_STEPS), MAX_STEPS))


def discarded_steps(steps: int) -> int:
    """Return the steps after the warm-up that a segment of `steps` timed ones leaves out."""
    return max(MIN_DISCARDED, math.ceil(SHARE_DISCARDED * steps))


def disagreement_limit(differences: Sequence[float]) -> float:
    """Return the difference from which on a third segment is run.

    Args:
        differences: Absolute differences between the logarithms of a strategy's two segments.
    """
    typical = statistics.median(differences) if differences else 0.0
    return max(MIN_DISAGREEMENT, DISAGREEMENT * typical)


def value_of_segments(logs: Sequence[float]) -> float:
    """Return a strategy's value in a block: the median of its segments' log step times.

    This is the mean of two segments. If these disagree and a third was run, it is the middle one.
    """
    return statistics.median(logs)


def segment_s(start_s: float, step_s: float, steps: int) -> float:
    """Return the seconds of one segment: its start, and its steps with the discarded ones.

    Args:
        start_s: Seconds of a start.
        step_s: Seconds per step.
        steps: Timed steps.
    """
    return start_s + (steps + discarded_steps(steps)) * step_s


def expected_cost(segments: Sequence[float], full_cells: Sequence[float]) -> tuple[float, float]:
    """Return the expected cost of a comparison's blocks, and of its full cells.

    Args:
        segments: Cost of a segment of each strategy, in any unit.
        full_cells: Cost of a full cell of each strategy, in the same unit.
    """
    trained = max(1.0, len(full_cells) / STRATEGIES_PER_FULL_CELL)
    return SEGMENTS_PER_STRATEGY * sum(segments), trained * sum(full_cells) / len(full_cells)
