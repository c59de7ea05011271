"""Consequences of a cell's pauses: they count towards no limit, and may spoil its measurements."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from stratbench.telemetry.pauses import CAUSES, NEGLIGIBLE, PERIOD_S, PauseWatch, pauses_of_workers
from stratbench.telemetry.timeline import Interval, read_phases
from stratbench.train.job import Job

#: A pause says nothing against these endings: they were known at once.
_UNTOUCHED = ("oom", "refused")


def keep_pauses(job: Job, node: int, watch: PauseWatch) -> None:
    """Keep the pauses of a node's workers in the run folder; no file where there was none."""
    kept = [
        {
            "begin_s": pause.begin_s - job.origin_s,
            "length_s": pause.length_s,
            "asleep_s": pause.asleep_s,
        }
        for pause in pauses_of_workers(watch.pauses, job.folder.samples(node), job.origin_s)
    ]
    if kept:
        job.folder.write_pauses(node, kept)


def pauses_entry(job: Job) -> list[dict[str, Any]]:
    """The record's `pauses`: those of all nodes, by their begin."""
    entries = [
        {"node": int(node)} | pause | {"in_training": _is_in_training(job, int(node), pause)}
        for node, its in job.folder.read_pauses().items()
        for pause in its
    ]
    return sorted(entries, key=lambda entry: entry["begin_s"])


def _is_in_training(job: Job, node: int, pause: dict[str, float]) -> bool:
    """Whether a worker of the node was training as the pause began; times are those of the node's clock."""
    begin_s, counted_s = pause["begin_s"], pause["length_s"] - pause["asleep_s"]
    until_s = begin_s + max(counted_s, PERIOD_S)
    ranks = range(1) if job.is_command else job.ranks_of(node)
    return any(p.start_s < until_s and p.end_s > begin_s for p in _trained(job, ranks))


def _trained(job: Job, ranks: range) -> list[Interval]:
    logs = (job.folder.phases(rank) for rank in ranks)
    return [phase for phase in read_phases(logs) if phase.phase == "train"]


def spoiled_by_pauses(job: Job, status: str) -> str | None:
    """How long pauses were that spoiled a cell which ended with `status`, in words; None: none did."""
    by_node: dict[int, float] = defaultdict(float)
    for entry in pauses_entry(job):
        if entry["in_training"] or status == "error":
            by_node[entry["node"]] += entry["length_s"]
    paused_s = max(by_node.values(), default=0.0)
    spans = (min(p.end_s, job.elapsed_s) - p.start_s for p in _trained(job, range(1)))
    enough_s = 0.0 if status == "error" else NEGLIGIBLE * sum(spans)
    if status in _UNTOUCHED or paused_s <= enough_s:
        return None
    return f"paused for {paused_s:.1f} s ({CAUSES})"
