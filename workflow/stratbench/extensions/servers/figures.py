"""Computes the record's values of a cell with parameter servers from results of workers and servers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stratbench.extensions.servers.cells import read_finished_server_statistics
from stratbench.extensions.servers.endings import find_worker_caused_error
from stratbench.extensions.servers.strategy import find_node_of_server
from stratbench.train.job import Job


def make_server_entry(job: Job) -> dict[str, Any] | None:
    """Return the record's section `server`: the statistics of all servers, without the times of steps.

    Each lost worker has the error that it reported. The result is None if no server left statistics.
    """
    servers = read_finished_server_statistics(job)
    if not servers:
        return None
    workers = job.folder.read_worker_results(job.world_size)
    reasons = {rank: find_worker_caused_error(worker) for rank, worker in workers.items()}
    entries = []
    for server in servers:
        lost = [entry | {"own_reason": reasons.get(entry["worker"])} for entry in server["lost"]]
        kept = {key: value for key, value in server.items() if key != "step_ends_s"}
        entries.append(kept | {"lost": lost})
    return {"servers": entries}


def compute_server_traffic(
    job: Job,
    workers: list[dict[str, Any]],
    servers: list[dict[str, Any]],
    run: dict[str, Any],
) -> dict[str, float]:
    """Return the bytes per second of the busiest server, and the traffic of links.

    Args:
        job: Job of the cell.
        workers: Results of the workers.
        servers: Statistics of the servers.
        run: Totals of the run.
    """
    figures = {}
    if train_time_s := run.get("train_time_s"):
        moved = [sum(w["bytes_in"] + w["bytes_out"] for w in s["workers"]) for s in servers]
        figures["busiest_server_bytes_per_s"] = max(moved) / train_time_s
    return figures | compute_node_link_traffic(job, workers)


def compute_node_link_traffic(job: Job, workers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the bytes that workers and servers exchange within nodes, and over the busiest link.

    The bytes within nodes are per step, and those of the link per global batch.

    Workers count these bytes. Lost workers are left out, because their counts are unknown.
    """
    sent, received, local = [0] * job.n_nodes, [0] * job.n_nodes, 0
    steps = 0
    for w in workers:
        if not w.get("communication"):
            continue
        steps += w["steps"]
        own = job.get_node_of_rank(w["rank"])
        for k, (out, back) in enumerate(w["communication"]["by_server_bytes"]):
            node = find_node_of_server(job.settings, k, job.n_nodes)
            if node == own:
                local += out + back
                continue
            for at, gone, come in ((own, out, back), (node, back, out)):
                sent[at] += gone
                received[at] += come
    # Each worker's step is one slice of a global batch, which has `job.world_size` slices.
    batches = steps / job.world_size
    return {
        "local_bytes_per_step": local / steps,
        "busiest_link_bytes_per_batch": max(*sent, *received) / batches,
    }


def compute_server_cell_totals(
    workers: list[dict[str, Any]],
    servers: list[dict[str, Any]],
    samples_per_step: int,
    per_epoch: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the training time, samples, updates and epochs that the servers counted.

    An epoch ends when as many tickets were completed as the epoch has; some may belong to the next epoch. The
    samples of a lost worker count if its tickets were completed. Some shards may have dropped a late push
    that others applied. So `samples_applied` is the mean over the shards.

    Args:
        workers: Results of the workers.
        servers: Statistics of the servers.
        samples_per_step: Samples of a ticket.
        per_epoch: Evaluation of each epoch; its training loss is added.
    """
    first = servers[0]
    pushes = statistics.fmean(sum(counts) for server in servers for counts in server["staleness"])
    ends = [e["end_s"] for e in sorted(first["epochs"], key=lambda e: e["epoch"])]
    tickets = first["tickets_settled"]
    for entry in per_epoch:
        losses = [w["losses"].get(str(entry["epoch"] - 1), {}) for w in workers]
        entry["train_loss"] = compute_mean_epoch_loss(losses)
    return {
        "train_time_s": max(server["train_time_s"] for server in servers),
        "samples_seen": tickets * samples_per_step,
        "samples_applied": round(samples_per_step * min(tickets, pushes)),
        "updates_applied": max(version for server in servers for version in server["updates"]),
        "epoch_times_s": [end - start for start, end in zip([0.0, *ends[:-1]], ends, strict=True)],
        "per_epoch": per_epoch,
    }


#: Sum of losses and sum of their weights in an epoch, by step. A sum that was not finite is None.
SummedLossesByStep = Mapping[str, tuple[float | None, float]]


def compute_mean_epoch_loss(worker_losses: Sequence[SummedLossesByStep]) -> float | None:
    """Return the mean training loss of an epoch over its steps.

    The result is None if a loss was not finite, or if no worker reported losses of this epoch.

    Args:
        worker_losses: An element per worker.
    """
    steps: dict[str, list[tuple[float | None, float]]] = {}
    for losses in worker_losses:
        for number, sums in losses.items():
            steps.setdefault(number, []).append(sums)
    if not steps or any(total is None for parts in steps.values() for total, _ in parts):
        return None
    means = []
    for parts in steps.values():
        weight = sum(w for _, w in parts)
        means.append(sum(t for t, _ in parts) / weight if weight else 0.0)
    return statistics.fmean(means)
