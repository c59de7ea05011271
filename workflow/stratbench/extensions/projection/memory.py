"""Projects a worker's peak memory: the planned peak, corrected by errors on measured counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stratbench.extensions.plan.against_records import (
    compute_bytes_before_steps,
    get_measured_peak_bytes,
)
from stratbench.extensions.plan.check import rehearse_requests
from stratbench.extensions.plan.footprint.footprint import MemoryPeak
from stratbench.extensions.plan.footprint.traffic import PARTS
from stratbench.extensions.plan.needs import Subject, compute_subject_data_bytes


@dataclass(frozen=True)
class ProjectedPeak:
    """Bytes of a worker's memory at its peak, including the data set.

    The range is that of measured over planned peaks on the measured counts. It is no confidence interval.
    """

    low_bytes: float
    middle_bytes: float
    high_bytes: float


def project_peaks(
    wanted: Sequence[Subject],
    measured: Sequence[tuple[Subject, Sequence[Mapping[str, Any]]]],
    resident_threads: int,
    cache_folder: Path,
) -> list[ProjectedPeak | None]:
    """Return the projected peak memory of each wanted cell.

    The peak is None if it cannot be planned.

    Args:
        wanted: Cells to project.
        measured: Measured cells with their records.
        resident_threads: Threads that a GPU runs at once.
        cache_folder: Folder of the cache.
    """
    subjects = [*wanted, *(s for s, _ in measured)]
    _, dry_runs = rehearse_requests([s.request for s in subjects], cache_folder)

    def plan_peak(s: Subject) -> tuple[MemoryPeak, int] | None:
        footprint = dry_runs[s.request].footprint
        if footprint is None:
            return None
        fullest = footprint.find_fullest_rank(s.samples_per_step, resident_threads)
        peak, data = (
            fullest.compute_training_peak(s.samples_per_step, resident_threads),
            compute_subject_data_bytes(s),
        )
        parts = dict.fromkeys(PARTS, 0) | peak.parts_bytes | {"data": data}
        whole = MemoryPeak(peak.n_bytes + data, peak.phase, parts)
        return whole, compute_bytes_before_steps(fullest, whole)

    off = []
    for s, records in measured:
        if (made := plan_peak(s)) is None:
            continue
        peaks = [get_measured_peak_bytes(r["memory"], made[1]) for r in records]
        off += [p / made[0].n_bytes for p in peaks if p]
    predicted: list[ProjectedPeak | None] = []
    for s in wanted:
        made = plan_peak(s) if off else None
        predicted.append(
            made
            and ProjectedPeak(*(made[0].n_bytes * r for r in (min(off), median(off), max(off))))
        )
    return predicted
