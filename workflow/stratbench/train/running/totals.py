"""Computes a cell's total time, samples and epochs from the results of its workers."""

from __future__ import annotations

from typing import Any

from stratbench.strategies.mesh import Mesh


def summarize_collective_run(workers: list[dict[str, Any]], mesh: Mesh) -> dict[str, Any]:
    """Return the total time, samples and epochs of workers that take every step together.

    The time is that of the slowest worker. Workers that share a replica of the model compute on the same
    samples, which count once.
    """
    first = min(workers, key=lambda w: w["rank"])
    each = [w for w in workers if mesh.reports_replica_results(w["rank"])]
    updates = first["strategy"]["updates_applied"]
    return {
        "train_time_s": max(w["train_time_s"] for w in workers),
        "samples_seen": sum(w["samples"] for w in each),
        # All workers skip the same steps (fp16), so every worker has as many updates as the first.
        "samples_applied": sum(w["samples"] // max(1, w["steps"]) * updates for w in each),
        "updates_applied": updates,
        "epoch_times_s": first["epoch_times_s"],
        "per_epoch": first["per_epoch"],
    }
