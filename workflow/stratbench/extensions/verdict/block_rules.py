"""Rules on segments, the short trainings of a block: their length and their cost.

A block is one job in one allocation, in which every strategy of a model and worker count trains two
segments. The jobs, the plan and the verdict all use these rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Repeats of the full matrix that a verdict replaces, and the most full runs for one leader's score.
MATRIX_REPEATS = 3
#: Fewest and most timed steps of a segment.
MIN_STEPS, MAX_STEPS = 50, 300
#: Steps discarded after the warm-up: a least number, since fp16's loss scaler restarts and skips steps, and
#: a least share of the segment.
MIN_DISCARDED, SHARE_DISCARDED = 15, 0.2
#: Two segments of a strategy disagree if their log times differ by more than MIN_DISAGREEMENT and by more
#: than DISAGREEMENT times the study's median difference.
MIN_DISAGREEMENT, DISAGREEMENT = 0.03, 5.9
#: Largest difference of a full run's log time from the log of its number of steps times the step time.
MAX_OFF = 0.03
#: Assumed noise of step times before any measurement, per device: relative standard deviation of a step,
#: correlation of successive steps, and relative standard deviation between two starts of a process.
STEP_NOISE = {"cuda": (0.05, 0.3, 0.008), "cpu": (0.3, 0.3, 0.05)}
#: Assumed seconds to start a segment's processes from a fork server, until they are measured.
SEGMENT_START_S = {"cuda": 6.0, "cpu": 0.7}
#: Effort of a verdict, from simulations: segments per strategy, and strategies per full cell that is trained
#: for its score.
SEGMENTS_PER_STRATEGY, STRATEGIES_PER_FULL_CELL = 7.5, 9


def choose_segment_steps(
    start_s: float, step_s: float, step_cv: float, correlation: float, process_sd: float
) -> int:
    """Return how many steps per segment are most informative per second of run time.

    A segment is long where a start is expensive, and short where starts differ more than steps do. The
    formula is sqrt(start_s / step_s * step_cv^2 (1 + r) / (1 - r) / process_sd^2), Kalibera and Jones 2013.
    The result is between MIN_STEPS and MAX_STEPS.

    Args:
        start_s: Seconds to start the processes.
        step_s: Seconds per step.
        step_cv: Standard deviation of a step's time over its mean.
        correlation: Correlation r of successive steps.
        process_sd: Standard deviation of log step times between starts.
    """
    if not (start_s > 0 and step_s > 0 and process_sd > 0):
        return MIN_STEPS
    within = step_cv**2 * (1 + correlation) / (1 - correlation)
    best = math.sqrt(start_s / step_s * within) / process_sd
    return round(min(max(best, MIN_STEPS), MAX_STEPS))


def count_discarded_steps(steps: int) -> int:
    """Return how many steps after the warm-up are discarded before `steps` timed ones."""
    return max(MIN_DISCARDED, math.ceil(SHARE_DISCARDED * steps))


def compute_disagreement_limit(differences: Sequence[float]) -> float:
    """Return the difference between two segments above which a strategy runs a third segment.

    Args:
        differences: Absolute differences between the logarithms of a strategy's two segments.
    """
    typical = statistics.median(differences) if differences else 0.0
    return max(MIN_DISAGREEMENT, DISAGREEMENT * typical)


def compute_block_value(logs: Sequence[float]) -> float:
    """Return a strategy's log step time in a block: the median over its segments' `logs`.

    With two segments this is their mean. With a third one, run if the two disagree, it is the middle one.
    """
    return statistics.median(logs)


def estimate_segment_seconds(start_s: float, step_s: float, steps: int) -> float:
    """Return the seconds of one segment: its start, its discarded steps and its timed steps.

    Args:
        start_s: Seconds to start the processes.
        step_s: Seconds per step.
        steps: Number of timed steps.
    """
    return start_s + (steps + count_discarded_steps(steps)) * step_s


def estimate_block_and_full_cell_costs(
    segments: Sequence[float], full_cells: Sequence[float]
) -> tuple[float, float]:
    """Return the expected costs of a verdict by blocks and by full cells.

    The verdict is on one comparison.

    Args:
        segments: Cost of a segment of each strategy, in any unit.
        full_cells: Cost of a full cell of each strategy, in the same unit.
    """
    trained = max(1.0, len(full_cells) / STRATEGIES_PER_FULL_CELL)
    return SEGMENTS_PER_STRATEGY * sum(segments), trained * sum(full_cells) / len(full_cells)
