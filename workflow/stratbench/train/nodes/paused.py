"""Handles pauses of a cell: they extend its time limit, and may invalidate its measurements."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratbench.telemetry.pauses import (
    NEGLIGIBLE_PAUSE_SHARE,
    PAUSE_CAUSES,
    PERIOD_S,
    PauseWatch,
    iter_worker_pauses,
)
from stratbench.telemetry.timeline import PhaseInterval, read_phase_intervals
from stratbench.train.job import Job

#: Statuses of a cell that pauses do not invalidate: no pause can cause such an ending.
_STATUSES_WITHOUT_PAUSE_EFFECT = ("oom", "unsupported")


#: Function of a job and a node. It returns the time intervals in which the node's workers trained, as
#: `Runner.read_training_phases` does.
PhaseReader = Callable[[Job, int], Iterable[PhaseInterval]]


def read_training_phases(job: Job, ranks: Iterable[int]) -> list[PhaseInterval]:
    """Return the time intervals in which these ranks trained, from the workers' phase logs."""
    return [
        p
        for p in read_phase_intervals(map(job.folder.get_phase_log_path, ranks))
        if p.phase == "train"
    ]


def is_deadline_over(deadline_s: float, watch: PauseWatch) -> bool:
    """Return whether a deadline, which pauses extend, has passed."""
    if time.monotonic() <= deadline_s + watch.total_pause_s:
        return False
    # A pause that has just ended must be included, since it extends the deadline.
    watch.wait_for_latest_reading()
    return time.monotonic() > deadline_s + watch.total_pause_s


def write_worker_pauses(
    job: Job, node: int, watch: PauseWatch, earlier_pauses: Sequence[dict[str, Any]] = ()
) -> None:
    """Write the pauses in which a node's workers were stopped to the run folder.

    Nothing is written without a pause.

    Args:
        job: Job of the cell.
        node: Number of the node.
        watch: Detector of the node's pauses.
        earlier_pauses: Pauses of earlier attempts.
    """
    pauses = [
        *earlier_pauses,
        *(
            {
                "begin_s": pause.begin_s - job.origin_s,
                "length_s": pause.length_s,
                "asleep_s": pause.asleep_s,
            }
            for pause in iter_worker_pauses(
                watch.pauses, job.folder.get_timeline_samples_path(node), job.origin_s
            )
        ),
    ]
    if pauses:
        job.folder.write_pauses_of_workers(node, pauses)


def build_pauses_entry(job: Job, read_node_phases: PhaseReader) -> list[dict[str, Any]]:
    """Return the entry `pauses` of the record: the pauses on all nodes, sorted by begin."""
    entries = [
        {"node": int(node)}
        | pause
        | {"in_training": _overlaps_training(pause, read_node_phases(job, int(node)))}
        for node, its in job.folder.read_pauses_of_workers().items()
        for pause in its
    ]
    return sorted(entries, key=lambda entry: entry["begin_s"])


def _overlaps_training(pause: dict[str, float], trained: Iterable[PhaseInterval]) -> bool:
    """Return whether a pause overlaps with the training of one of its node's workers."""
    begin_s, counted_s = pause["begin_s"], pause["length_s"] - pause["asleep_s"]
    until_s = begin_s + max(counted_s, PERIOD_S)
    return any(p.start_s < until_s and p.end_s > begin_s for p in trained)


def invalidating_pauses_reason(job: Job, status: str, read_node_phases: PhaseReader) -> str | None:
    """Return text on the pauses that invalidate a cell's measurements, or None if none do.

    Args:
        job: Job of the cell.
        status: Status of the cell, such as `ok`.
        read_node_phases: Function that returns the training intervals of a node's workers.
    """
    by_node: dict[int, float] = defaultdict(float)
    for entry in build_pauses_entry(job, read_node_phases):
        if entry["in_training"] or status == "error":
            by_node[entry["node"]] += entry["length_s"]
    paused_s = max(by_node.values(), default=0.0)
    spans = (min(p.end_s, job.elapsed_s) - p.start_s for p in read_training_phases(job, range(1)))
    enough_s = 0.0 if status == "error" else NEGLIGIBLE_PAUSE_SHARE * sum(spans)
    if status in _STATUSES_WITHOUT_PAUSE_EFFECT or paused_s <= enough_s:
        return None
    return f"paused for {paused_s:.1f} s ({PAUSE_CAUSES})"
