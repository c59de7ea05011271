"""Projected peak memory of a worker: the plan's, corrected by its error on measured counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stratbench.extensions.plan.against_records import bytes_before_steps, measured_peak_bytes
from stratbench.extensions.plan.check import rehearsals_of
from stratbench.extensions.plan.footprint.footprint import MemoryPeak
from stratbench.extensions.plan.footprint.traffic import PARTS
from stratbench.extensions.plan.needs import Subject, data_bytes_of


@dataclass(frozen=True)
class Peak:
    """Bytes of a worker at its peak, data set included, from `low` to `high`.

    The range is that of measured / planned on the measured counts; it holds no chance of its own.
    """

    low: float
    middle: float
    high: float


def peaks_at(
    wanted: Sequence[Subject],
    measured: Sequence[tuple[Subject, Sequence[Mapping[str, Any]]]],
    resident_threads: int,
    kept_in: Path,
) -> list[Peak | None]:
    """Return the peak of each wanted cell, or None if the plan has none.

    Args:
        wanted: Cells.
        measured: Measured cells with their records.
        resident_threads: Threads that a GPU runs at once.
        kept_in: Folder of the cache.
    """
    subjects = [*wanted, *(s for s, _ in measured)]
    _, rehearsals = rehearsals_of([s.request for s in subjects], kept_in)

    def planned(s: Subject) -> tuple[MemoryPeak, int] | None:
        footprint = rehearsals[s.request].footprint
        if footprint is None:
            return None
        fullest = footprint.fullest(s.samples_per_step, resident_threads)
        peak, data = fullest.training_peak(s.samples_per_step, resident_threads), data_bytes_of(s)
        parts = dict.fromkeys(PARTS, 0) | peak.parts_bytes | {"data": data}
        whole = MemoryPeak(peak.n_bytes + data, peak.phase, parts)
        return whole, bytes_before_steps(fullest, whole)

    off = []
    for s, records in measured:
        if (made := planned(s)) is None:
            continue
        peaks = [measured_peak_bytes(r["memory"], made[1]) for r in records]
        off += [p / made[0].n_bytes for p in peaks if p]
    predicted: list[Peak | None] = []
    for s in wanted:
        made = planned(s) if off else None
        predicted.append(
            made and Peak(*(made[0].n_bytes * r for r in (min(off), median(off), max(off))))
        )
    return predicted
