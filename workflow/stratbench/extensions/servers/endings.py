"""Classifies how a cell with parameter servers ended, and reads the errors of lost workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratbench.cell.run_folder import parse_rank
from stratbench.extensions.servers.cells import count_servers, read_servers
from stratbench.extensions.servers.node import has_joined
from stratbench.extensions.servers.wire.link import RunEnded, ServerLost
from stratbench.train.agent import Exits
from stratbench.train.ending import Ending, find_first_reason, make_ending_at_limit
from stratbench.train.job import Job


def classify_served_ending(
    job: Job, exits: Exits, workers: Mapping[int, Mapping[str, Any]]
) -> Ending:
    """Return how a cell with parameter servers ended.

    If a worker was lost, the servers have decided whether the cell fails.

    Args:
        job: Job of the cell.
        exits: Exits of the cell's processes, with reasons.
        workers: Results of the workers by rank.
    """
    servers = read_servers(job)
    if diverged := find_first_reason(workers, "diverged"):
        return Ending("diverged", diverged)
    lost = next((f["error"] for f in servers if f["error"]), None)
    if lost:
        own = [
            find_own_loss_reason(workers.get(w["worker"]))
            for f in servers
            for w in f.get("lost", ())
        ]
        return Ending("error", ": ".join([lost, *filter(None, own[:1])]))
    # The training does not begin before every worker has joined. So a worker's earlier error ends the cell.
    for rank, worker in workers.items():
        if worker["status"] == "error" and not has_joined(job, rank):
            return Ending("error", worker["reason"])
    if exits.timed_out or exits.has_hung:
        return make_ending_at_limit(job, exits)
    if len(servers) < count_servers(job.settings):
        dead = next(
            (p for p in exits.processes if parse_rank(p.name) is None and p.exit_code), None
        )
        return Ending("error", str(dead or "a parameter server left no statistics"))
    evaluates = not job.settings.steps  # a cell with a number of steps is not evaluated
    if not any(w["status"] == "ok" and (w["per_epoch"] or not evaluates) for w in workers.values()):
        return Ending("error", find_first_reason(workers, "error") or "no worker lived to evaluate")
    return Ending("ok", None)


def find_own_loss_reason(worker: Mapping[str, Any] | None) -> str | None:
    """Return a worker's error, unless the end of the servers caused the error.

    The result is None without such an error.
    """
    reason = worker is not None and worker["status"] == "error" and worker["reason"]
    return (
        reason
        if reason and not reason.startswith((RunEnded.__name__, ServerLost.__name__))
        else None
    )
