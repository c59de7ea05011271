"""Estimates a verdict's cost relative to the full matrix, and which cells are too costly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stratbench.cell.text.words import format_hours
from stratbench.extensions.plan.quantities import group_cells_by
from stratbench.extensions.plan.schedule import Plan, Planned
from stratbench.extensions.verdict.block_rules import (
    MATRIX_REPEATS,
    SEGMENT_START_S,
    STEP_NOISE,
    choose_segment_steps,
    estimate_block_and_full_cell_costs,
    estimate_segment_seconds,
)

#: Largest share of the full matrix's cost that a verdict should take.
AIM = 0.10


@dataclass(frozen=True)
class VerdictCost:
    """Costs of a verdict and of the full matrix, in worker-seconds.

    `start_share` is the share of a segment that the start of its processes takes.
    """

    blocks_s: float
    full_runs_s: float
    matrix_s: float
    start_share: float

    @property
    def verdict_s(self) -> float:
        """Cost of the verdict: its blocks, and full runs for scores, in worker-seconds."""
        return self.blocks_s + self.full_runs_s

    @property
    def share_of_matrix(self) -> float:
        """Cost of the verdict as a share of the full matrix."""
        return self.verdict_s / self.matrix_s


def estimate_verdict_cost(comparison: list[Planned], slow: bool) -> VerdictCost:
    """Return the cost of a verdict on one comparison.

    With `slow`, it is at the upper end of the predicted times, else at the lower end.
    """
    gpus = comparison[0].cell.gpus
    segments, cells, starts = [], [], []
    for c in comparison:
        train_s, total_s = ([*span][slow] for span in (c.fit.train_span, c.fit.total_span))
        device = "cpu" if c.fit.device == "CPU" else "cuda"
        step_s, start_s = train_s / c.subject.steps, SEGMENT_START_S[device]
        steps = choose_segment_steps(start_s, step_s, *STEP_NOISE[device])
        segments.append(gpus * estimate_segment_seconds(start_s, step_s, steps))
        cells.append(gpus * total_s)
        starts.append(gpus * start_s)
    times_s, trained_s = estimate_block_and_full_cell_costs(segments, cells)
    return VerdictCost(times_s, trained_s, MATRIX_REPEATS * sum(cells), sum(starts) / sum(segments))


def estimate_verdict_costs(
    plan: Plan,
) -> dict[tuple[str, str, int], tuple[VerdictCost, VerdictCost]]:
    """Return the lowest and the highest cost of each comparison with predicted times."""
    known = [
        c
        for c in plan.cells
        if c.cell.repeat == 0 and c.fit is not None and c.fit.total_span and c.fit.train_span
        and c.state not in ("unsupported", "infeasible")
    ]  # fmt: skip
    comparisons = group_cells_by(known, "experiment", "model", "gpus")
    return {
        key: (
            estimate_verdict_cost(comparison, slow=False),
            estimate_verdict_cost(comparison, slow=True),
        )
        for key, comparison in comparisons.items()
        if len(comparison) > 1
    }


def iter_cost_sentences(plan: Plan) -> Iterator[str]:
    """Yield sentences on what `snakemake verdict` costs relative to the full matrix."""
    by_comparison = estimate_verdict_costs(plan)
    if not by_comparison:
        yield "Unknown: no model and number of workers has two strategies with predicted times."
        return
    ends = [[pair[slow] for pair in by_comparison.values()] for slow in (0, 1)]
    hours = [sum(c.verdict_s for c in costs) / 3600 for costs in ends]
    shares = sorted(
        sum(c.verdict_s for c in costs) / sum(c.matrix_s for c in costs) for costs in ends
    )
    yield (
        f"About {format_hours(hours[0])} to {format_hours(hours[1])} worker-hours, {shares[0]:.0%} to "
        f"{shares[1]:.0%} of the full matrix of {MATRIX_REPEATS} repeats (full runs for scores included; up "
        "to twice as much on nodes that others use, too)."
    )
    dear = {
        key: min(pair, key=lambda c: c.share_of_matrix)
        for key, pair in by_comparison.items()
        if min(c.share_of_matrix for c in pair) > AIM
    }
    short = {key: cost for key, cost in dear.items() if cost.blocks_s > cost.full_runs_s}
    if short:
        experiment, model, gpus = max(short, key=lambda key: short[key].share_of_matrix)
        worst = short[experiment, model, gpus]
        yield (
            f"A tenth is out of reach for {len(short)} of {len(by_comparison)} models and worker counts: "
            f"their cells are too short. {experiment}, {model} on {gpus} would cost at least "
            f"{worst.share_of_matrix:.0%}, since {worst.start_share:.0%} of a segment is the start of its "
            "processes. Train these cells in full instead, or for longer."
        )
    if len(dear) > len(short):
        yield (
            f"{len(dear) - len(short)} of {len(by_comparison)} models and worker counts cost more than a "
            "tenth because few strategies compete: the full run for scores is a large part of so small a "
            "matrix."
        )
