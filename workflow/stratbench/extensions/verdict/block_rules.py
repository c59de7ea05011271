"""Rules on the length and the cost of segments, the short trainings of a block.

A block is one job in one allocation. In a block, every strategy of a model and worker count trains two
segments. The jobs, the plan and the verdict all use these rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Number of repeats per cell in the full matrix, the study that a verdict replaces. Each strategy also has at
#: most this number of full runs.
MATRIX_REPEATS = 3
#: Fewest and most timed steps of a segment.
MIN_STEPS, MAX_STEPS = 50, 300
#: Steps that are discarded before the timed ones: at least MIN_DISCARDED, and SHARE_DISCARDED of the timed
#: steps. Some of a segment's first steps are skipped by the loss scaler of fp16.
MIN_DISCARDED, SHARE_DISCARDED = 15, 0.2
#: Two segments of a strategy disagree if their log times differ by more than both limits: MIN_DISAGREEMENT,
#: and DISAGREEMENT times the study's median difference.
MIN_DISAGREEMENT, DISAGREEMENT = 0.03, 5.9
#: Largest allowed |log(measured / predicted time)| of a full run. Its predicted time is its number of steps
#: times the step time in the blocks.
MAX_LOG_DEVIATION = 0.03
#: Assumed noise of step times by kind of device. The three numbers are the relative standard deviation of a
#: step, the correlation of successive steps, and the relative standard deviation between starts of a process.
STEP_NOISE = {"cuda": (0.05, 0.3, 0.008), "cpu": (0.3, 0.3, 0.05)}
#: Assumed seconds to start a segment's processes from a fork server, by kind of device.
SEGMENT_START_S = {"cuda": 6.0, "cpu": 0.7}
#: Expected effort of a verdict, from simulations: segments per strategy, and the number of strategies for
#: which one full run is requested.
SEGMENTS_PER_STRATEGY, STRATEGIES_PER_FULL_CELL = 7.5, 9


def choose_segment_steps(
    start_s: float, step_s: float, step_cv: float, correlation: float, process_sd: float
) -> int:
    """Return the number of timed steps per segment that measures most per second.

    With this number, the error of the mean step time is smallest for a given run time.
    A segment is long if a start takes long, and short if starts differ more than steps do. The formula is
    sqrt(start_s / step_s * step_cv^2 (1 + r) / (1 - r) / process_sd^2), by Kalibera and Jones (2013). The
    result is between MIN_STEPS and MAX_STEPS.

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


def count_discarded_steps(timed_steps: int) -> int:
    """Return the number of steps after the warm-up that are discarded before `timed_steps` timed steps."""
    return max(MIN_DISCARDED, math.ceil(SHARE_DISCARDED * timed_steps))


def compute_segment_disagreement_limit(log_differences: Sequence[float]) -> float:
    """Return how much a strategy's two segments may differ without a third segment.

    The difference is the absolute log ratio of their step times.

    Args:
        log_differences: Absolute log time ratio of the two segments of each strategy and block.
    """
    typical = statistics.median(log_differences) if log_differences else 0.0
    return max(MIN_DISAGREEMENT, DISAGREEMENT * typical)


def compute_block_log_step_time(segment_logs: Sequence[float]) -> float:
    """Return a strategy's log step time in a block: the median over its segments.

    The median of two segments is their mean.

    Args:
        segment_logs: Logarithm of the mean step time of each segment.
    """
    return statistics.median(segment_logs)


def estimate_segment_seconds(start_s: float, step_s: float, timed_steps: int) -> float:
    """Return the seconds of one segment: its start, its discarded steps and its timed steps.

    Args:
        start_s: Seconds to start the processes.
        step_s: Seconds per step.
        timed_steps: Number of timed steps.
    """
    return start_s + (timed_steps + count_discarded_steps(timed_steps)) * step_s


def estimate_block_and_full_cell_costs(
    segment_costs: Sequence[float], full_run_costs: Sequence[float]
) -> tuple[float, float]:
    """Return the expected cost of a comparison's blocks, and that of its full runs.

    Args:
        segment_costs: Cost of a segment of each strategy, in any unit.
        full_run_costs: Cost of a full run of each strategy, in the same unit.
    """
    full_runs = max(1.0, len(full_run_costs) / STRATEGIES_PER_FULL_CELL)
    mean_cost = sum(full_run_costs) / len(full_run_costs)
    return SEGMENTS_PER_STRATEGY * sum(segment_costs), full_runs * mean_cost
