"""Handles a cell's pauses, which count towards no time limit and may spoil measurements."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratbench.telemetry.pauses import CAUSES, NEGLIGIBLE, PERIOD_S, PauseWatch, iter_worker_pauses
from stratbench.telemetry.timeline import PhaseInterval, read_phases
from stratbench.train.job import Job

#: Endings that a pause cannot have caused, because they were known at once.
_UNTOUCHED = ("oom", "unsupported")


#: Reads when workers of a node trained (`running.runner.Runner.read_training_phases`).
Trained = Callable[[Job, int], Iterable[PhaseInterval]]


def read_training_phases(job: Job, ranks: Iterable[int]) -> list[PhaseInterval]:
    """Read, from phase logs, the intervals in which the workers with these ranks trained."""
    return [p for p in read_phases(map(job.folder.get_phase_log_path, ranks)) if p.phase == "train"]


def is_deadline_over(deadline_s: float, watch: PauseWatch) -> bool:
    """Return whether a deadline on the clock `time.monotonic` has passed; pauses extend it."""
    if time.monotonic() <= deadline_s + watch.total_pause_s:
        return False
    watch.wait_for_latest_reading()  # a pause may have ended just now
    return time.monotonic() > deadline_s + watch.total_pause_s


def write_worker_pauses(
    job: Job, node: int, watch: PauseWatch, before: Sequence[dict[str, Any]] = ()
) -> None:
    """Write the pauses of a node's workers to the run folder, if there were any.

    Args:
        job: Job of the cell.
        node: Number of the node.
        watch: Watch that has detected the pauses.
        before: Pauses of earlier attempts.
    """
    pauses = [
        *before,
        *(
            {
                "begin_s": pause.begin_s - job.origin_s,
                "length_s": pause.length_s,
                "asleep_s": pause.asleep_s,
            }
            for pause in iter_worker_pauses(
                watch.pauses, job.folder.get_samples_path(node), job.origin_s
            )
        ),
    ]
    if pauses:
        job.folder.write_pauses(node, pauses)


def build_pauses_entry(job: Job, trained: Trained) -> list[dict[str, Any]]:
    """Return the record's entry `pauses`: the pauses of all nodes, sorted by begin."""
    entries = [
        {"node": int(node)}
        | pause
        | {"in_training": _is_in_training(pause, trained(job, int(node)))}
        for node, its in job.folder.read_pauses().items()
        for pause in its
    ]
    return sorted(entries, key=lambda entry: entry["begin_s"])


def _is_in_training(pause: dict[str, float], trained: Iterable[PhaseInterval]) -> bool:
    """Return whether a worker of the node was training when a pause began."""
    begin_s, counted_s = pause["begin_s"], pause["length_s"] - pause["asleep_s"]
    until_s = begin_s + max(counted_s, PERIOD_S)
    return any(p.start_s < until_s and p.end_s > begin_s for p in trained)


def invalidating_pauses_reason(job: Job, status: str, trained: Trained) -> str | None:
    """Return a text on pauses that invalidate a cell's measurements. None without such pauses.

    Args:
        job: Job of the cell.
        status: How the cell ended.
        trained: Returns the training intervals of a node's workers.
    """
    by_node: dict[int, float] = defaultdict(float)
    for entry in build_pauses_entry(job, trained):
        if entry["in_training"] or status == "error":
            by_node[entry["node"]] += entry["length_s"]
    paused_s = max(by_node.values(), default=0.0)
    spans = (min(p.end_s, job.elapsed_s) - p.start_s for p in read_training_phases(job, range(1)))
    enough_s = 0.0 if status == "error" else NEGLIGIBLE * sum(spans)
    if status in _UNTOUCHED or paused_s <= enough_s:
        return None
    return f"paused for {paused_s:.1f} s ({CAUSES})"
