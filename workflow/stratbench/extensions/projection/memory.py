"""Projects a worker's peak memory: the planned peak, corrected by errors on measured cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from stratbench.extensions.plan.against_records import (
    compute_bytes_before_first_step,
    get_measured_peak_bytes,
)
from stratbench.extensions.plan.check import dry_run_requests
from stratbench.extensions.plan.footprint.footprint import MemoryPeak
from stratbench.extensions.plan.footprint.traffic import PARTS
from stratbench.extensions.plan.needs import CellToPlan, compute_data_bytes_on_device


@dataclass(frozen=True)
class ProjectedPeak:
    """Projected peak memory of a worker, including the data set, with a range.

    The range follows from the ratios of measured to planned peaks. It is no confidence interval.
    """

    low_bytes: float
    middle_bytes: float
    high_bytes: float


class PlannedPeak(NamedTuple):
    """Planned peak memory of a worker with the data set, and its bytes before the first step."""

    whole: MemoryPeak
    bytes_before_first_step: int


def project_peak_memory(
    wanted_cells: Sequence[CellToPlan],
    measured_cells: Sequence[tuple[CellToPlan, Sequence[Mapping[str, Any]]]],
    resident_threads: int,
    cache_folder: Path,
) -> list[ProjectedPeak | None]:
    """Return the projected peak memory of each wanted cell.

    It is None if the plan cannot predict a peak.

    Args:
        wanted_cells: Cells to project.
        measured_cells: Measured cells with their records.
        resident_threads: Number of threads that a GPU runs at the same time.
        cache_folder: Folder in which the plan stores predictions.
    """
    cells = [*wanted_cells, *(s for s, _ in measured_cells)]
    _, dry_runs = dry_run_requests([s.request for s in cells], cache_folder)

    def plan_peak_of_cell(planned_cell: CellToPlan) -> PlannedPeak | None:
        footprint = dry_runs[planned_cell.request].footprint
        if footprint is None:
            return None
        fullest = footprint.find_fullest_rank_footprint(
            planned_cell.samples_per_step, resident_threads
        )
        peak, data = (
            fullest.compute_training_peak(planned_cell.samples_per_step, resident_threads),
            compute_data_bytes_on_device(planned_cell),
        )
        parts = dict.fromkeys(PARTS, 0) | peak.parts_bytes | {"data": data}
        whole = MemoryPeak(peak.n_bytes + data, peak.phase, parts)
        return PlannedPeak(whole, compute_bytes_before_first_step(fullest, whole))

    off = []
    for s, records in measured_cells:
        if (planned := plan_peak_of_cell(s)) is None:
            continue
        peaks = [
            get_measured_peak_bytes(r["memory"], planned.bytes_before_first_step) for r in records
        ]
        off += [p / planned.whole.n_bytes for p in peaks if p]
    predicted: list[ProjectedPeak | None] = []
    for s in wanted_cells:
        planned = plan_peak_of_cell(s) if off else None
        predicted.append(
            planned
            and ProjectedPeak(
                *(planned.whole.n_bytes * r for r in (min(off), median(off), max(off)))
            )
        )
    return predicted
