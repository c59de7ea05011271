"""Time, samples and epochs of a whole cell, from the results of its workers and servers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stratbench.strategies.mesh import Mesh


def collective_run(workers: list[dict[str, Any]], mesh: Mesh) -> dict[str, Any]:
    """Time, samples and epochs of workers that take every step together. The slowest one's time counts.

    Workers that share a copy of the network compute on the same samples, which count once.
    """
    first = min(workers, key=lambda w: w["rank"])
    each = [w for w in workers if mesh.speaks(w["rank"])]
    updates = first["strategy"]["updates_applied"]
    return {
        "train_time_s": max(w["train_time_s"] for w in workers),
        "samples_seen": sum(w["samples"] for w in each),
        # All take a step or all skip it.
        "samples_applied": sum(w["samples"] // max(1, w["steps"]) * updates for w in each),
        "updates_applied": updates,
        "epoch_times_s": first["epoch_times_s"],
        "per_epoch": first["per_epoch"],
    }


def served_run(
    workers: list[dict[str, Any]],
    servers: list[dict[str, Any]],
    samples_per_step: int,
    per_epoch: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the totals that the parameter servers saw, until the last applied push.

    An epoch ends when as many pushes as it has tickets were taken, some of them perhaps of the next epoch.
    The samples of a lost worker count if its pushes were taken. A late push may have been dropped by some
    shards and applied by others: `samples_applied` is the mean over the shards.

    Args:
        workers: Results of the workers.
        servers: Statistics of the servers.
        samples_per_step: Samples of a ticket.
        per_epoch: Evaluation of each epoch; its training loss is added.
    """
    first = servers[0]
    pushes = applied_pushes(servers)
    ends = [e["end_s"] for e in sorted(first["epochs"], key=lambda e: e["epoch"])]
    tickets = first["tickets_settled"]
    for entry in per_epoch:
        losses = [w["losses"].get(str(entry["epoch"] - 1), {}) for w in workers]
        entry["train_loss"] = mean_loss(losses)
    return {
        "train_time_s": max(server["train_time_s"] for server in servers),
        "samples_seen": tickets * samples_per_step,
        "samples_applied": round(samples_per_step * min(tickets, pushes)),
        "updates_applied": max(version for server in servers for version in server["updates"]),
        "epoch_times_s": [end - start for start, end in zip([0.0, *ends[:-1]], ends, strict=True)],
        "per_epoch": per_epoch,
    }


def mean_loss(losses: Sequence[Mapping[str, tuple[float | None, float]]]) -> float | None:
    """Return the mean training loss of an epoch, from each worker's report (`loop.Result.losses`).

    None if a loss was not finite, or if the workers that took the steps were lost before reporting.
    """
    steps: dict[str, list[tuple[float | None, float]]] = {}
    for each in losses:
        for number, sums in each.items():
            steps.setdefault(number, []).append(sums)
    if not steps or any(total is None for parts in steps.values() for total, _ in parts):
        return None
    means = []
    for parts in steps.values():
        weight = sum(w for _, w in parts)
        means.append(sum(t for t, _ in parts) / weight if weight else 0.0)
    return statistics.fmean(means)


def applied_pushes(servers: list[dict[str, Any]]) -> float:
    """Return the number of pushes applied to the weights of a shard, as the mean over all shards."""
    shards = [sum(counts) for server in servers for counts in server["staleness"]]
    return sum(shards) / len(shards)
