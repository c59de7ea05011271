"""Classifies how a cell with parameter servers ended, and reads the errors of lost workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratbench.cell.run_folder import parse_rank
from stratbench.extensions.servers.cells import count_servers, read_finished_server_statistics
from stratbench.extensions.servers.node import has_worker_joined
from stratbench.extensions.servers.wire.link import RunEnded, ServerLost
from stratbench.train.agent import Exits
from stratbench.train.ending import (
    CellEnding,
    find_first_reason_with_status,
    make_hang_or_limit_ending,
)
from stratbench.train.job import Job


def classify_server_cell_ending(
    job: Job, exits: Exits, workers: Mapping[int, Mapping[str, Any]]
) -> CellEnding:
    """Return how a cell with parameter servers ended.

    If a worker was lost, the servers have decided whether the cell fails.

    Args:
        job: Job of the cell.
        exits: Exits of the cell's processes, with reasons.
        workers: Results of the workers by rank.
    """
    servers = read_finished_server_statistics(job)
    if diverged := find_first_reason_with_status(workers, "diverged"):
        return CellEnding("diverged", diverged)
    lost = next((f["error"] for f in servers if f["error"]), None)
    if lost:
        own = [
            find_worker_caused_error(workers.get(w["worker"]))
            for f in servers
            for w in f.get("lost", ())
        ]
        return CellEnding("error", ": ".join([lost, *filter(None, own[:1])]))
    # The training begins only after every worker has joined. So an error before that ends the cell.
    for rank, worker in workers.items():
        if worker["status"] == "error" and not has_worker_joined(job, rank):
            return CellEnding("error", worker["reason"])
    if exits.reached_time_limit or exits.has_hung:
        return make_hang_or_limit_ending(job, exits)
    if len(servers) < count_servers(job.settings):
        dead = next(
            (p for p in exits.processes if parse_rank(p.name) is None and p.exit_code), None
        )
        return CellEnding("error", str(dead or "a parameter server left no statistics"))
    evaluates = not job.settings.steps  # a cell with a number of steps is not evaluated
    if not any(w["status"] == "ok" and (w["per_epoch"] or not evaluates) for w in workers.values()):
        return CellEnding(
            "error",
            find_first_reason_with_status(workers, "error") or "no worker lived to evaluate",
        )
    return CellEnding("ok", None)


def find_worker_caused_error(worker: Mapping[str, Any] | None) -> str | None:
    """Return a worker's error, unless the end of the servers caused the error.

    The result is None without such an error.
    """
    reason = worker is not None and worker["status"] == "error" and worker["reason"]
    return (
        reason
        if reason and not reason.startswith((RunEnded.__name__, ServerLost.__name__))
        else None
    )
