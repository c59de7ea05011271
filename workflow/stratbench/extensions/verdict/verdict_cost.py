"""Estimates the cost of a verdict relative to training all cells, and finds too costly comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stratbench.cell.text.words import format_hours
from stratbench.extensions.plan.quantities import group_cells_by
from stratbench.extensions.plan.schedule import Plan, PlannedCell
from stratbench.extensions.verdict.block_rules import (
    MATRIX_REPEATS,
    SEGMENT_START_S,
    STEP_NOISE,
    choose_segment_steps,
    estimate_block_and_full_cell_costs,
    estimate_segment_seconds,
)

#: Largest cost of a verdict that is worth it, as a share of the cost of the full matrix.
MAX_WORTHWHILE_COST_SHARE = 0.10


@dataclass(frozen=True)
class VerdictCost:
    """Costs of a verdict and of the full matrix, in worker-seconds.

    The full matrix is a training of each cell with MATRIX_REPEATS repeats.

    Attributes:
        blocks_worker_s: Worker-seconds of the verdict's blocks.
        full_runs_worker_s: Worker-seconds of the verdict's full runs.
        full_matrix_worker_s: Worker-seconds of the full matrix.
        segment_start_share: Share of a segment that the start of its processes takes.
    """

    blocks_worker_s: float
    full_runs_worker_s: float
    full_matrix_worker_s: float
    segment_start_share: float

    @property
    def verdict_worker_s(self) -> float:
        """Cost of the verdict in worker-seconds: its blocks and its full runs."""
        return self.blocks_worker_s + self.full_runs_worker_s

    @property
    def share_of_full_matrix_cost(self) -> float:
        """Cost of the verdict as a share of the full matrix."""
        return self.verdict_worker_s / self.full_matrix_worker_s


def estimate_comparison_cost(comparison: list[PlannedCell], use_longest_times: bool) -> VerdictCost:
    """Return the cost of a verdict on one comparison.

    Args:
        comparison: Planned cells of the comparison.
        use_longest_times: Whether to use the upper ends of the predicted times, and not the lower ends.
    """
    gpus = comparison[0].cell.gpus
    segments, cells, starts = [], [], []
    for c in comparison:
        spans = (c.fit.train_span, c.fit.total_span)
        train_s, total_s = ([*span][use_longest_times] for span in spans)
        device = "cpu" if c.fit.device == "CPU" else "cuda"
        step_s, start_s = train_s / c.subject.steps, SEGMENT_START_S[device]
        steps = choose_segment_steps(start_s, step_s, *STEP_NOISE[device])
        segments.append(gpus * estimate_segment_seconds(start_s, step_s, steps))
        cells.append(gpus * total_s)
        starts.append(gpus * start_s)
    times_s, trained_s = estimate_block_and_full_cell_costs(segments, cells)
    return VerdictCost(times_s, trained_s, MATRIX_REPEATS * sum(cells), sum(starts) / sum(segments))


def estimate_min_and_max_cost_by_comparison(
    plan: Plan,
) -> dict[tuple[str, str, int], tuple[VerdictCost, VerdictCost]]:
    """Return the lowest and highest cost per comparison, by experiment, model and worker count."""
    known = [
        c
        for c in plan.cells
        if c.cell.repeat == 0 and c.fit is not None and c.fit.total_span and c.fit.train_span
        and c.state not in ("unsupported", "infeasible")
    ]  # fmt: skip
    comparisons = group_cells_by(known, "experiment", "model", "gpus")
    return {
        key: (
            estimate_comparison_cost(comparison, use_longest_times=False),
            estimate_comparison_cost(comparison, use_longest_times=True),
        )
        for key, comparison in comparisons.items()
        if len(comparison) > 1
    }


def iter_verdict_cost_sentences(plan: Plan) -> Iterator[str]:
    """Yield sentences on the cost of a verdict relative to the full matrix."""
    by_comparison = estimate_min_and_max_cost_by_comparison(plan)
    if not by_comparison:
        yield "Unknown: no model and number of workers has two strategies with predicted times."
        return
    ends = [[pair[slow] for pair in by_comparison.values()] for slow in (0, 1)]
    hours = [sum(c.verdict_worker_s for c in costs) / 3600 for costs in ends]
    shares = sorted(
        sum(c.verdict_worker_s for c in costs) / sum(c.full_matrix_worker_s for c in costs)
        for costs in ends
    )
    yield (
        f"About {format_hours(hours[0])} to {format_hours(hours[1])} worker-hours, {shares[0]:.0%} to "
        f"{shares[1]:.0%} of the full matrix of {MATRIX_REPEATS} repeats (full runs for scores included; up "
        "to twice as much on nodes that others use, too)."
    )
    dear = {
        key: min(pair, key=lambda c: c.share_of_full_matrix_cost)
        for key, pair in by_comparison.items()
        if min(c.share_of_full_matrix_cost for c in pair) > MAX_WORTHWHILE_COST_SHARE
    }
    short = {
        key: cost for key, cost in dear.items() if cost.blocks_worker_s > cost.full_runs_worker_s
    }
    if short:
        experiment, model, gpus = max(short, key=lambda key: short[key].share_of_full_matrix_cost)
        worst = short[experiment, model, gpus]
        yield (
            f"For {len(short)} of {len(by_comparison)} models and worker counts, a verdict costs more than a "
            f"tenth of the full matrix, because their cells are too short. {experiment}, {model} on {gpus} "
            f"would cost at least {worst.share_of_full_matrix_cost:.0%}, since "
            f"{worst.segment_start_share:.0%} of a segment is the start of its processes. Train these "
            "cells in full instead, or for longer."
        )
    if len(dear) > len(short):
        yield (
            f"For {len(dear) - len(short)} of {len(by_comparison)} models and worker counts, a verdict costs "
            "more than a tenth of the full matrix, because few strategies are compared. The full run for "
            "scores is a large part of so small a matrix."
        )
