"""Turns what a cell's processes left in the run folder into its end, its record and its timeline."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from stratbench import __version__
from stratbench.cell.record import Record
from stratbench.strategies import strategy_class, traits_of
from stratbench.telemetry.git import git_state
from stratbench.telemetry.timeline import merge_timeline
from stratbench.train import efficiency
from stratbench.train.agent import End, joined
from stratbench.train.job import Job
from stratbench.workload import models, prepared

REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: a record's status, or `error`; and why, when it is not `ok`."""

    status: str
    reason: str | None


def classify(job: Job, end: End) -> Outcome:
    """Tell results (ok, oom, timeout, diverged) from errors.

    A cause wins over its consequences: when one worker is out of memory or killed, its peers fail too,
    for want of a partner. A worker's own report wins over the deadline.
    """
    if job.has_servers:
        return classify_served(job, end)
    workers = job.folder.read_workers(job.world_size)
    by_status = {
        status: [w for w in workers.values() if w["status"] == status]
        for status in ("oom", "error", "diverged")
    }
    if by_status["oom"]:
        return Outcome("oom", by_status["oom"][0]["reason"])
    if host_out_of_memory(end):
        return Outcome("oom", "the kernel killed a worker because the host had no memory left")
    killed = [p for p in end.processes if p.exit_code is not None and p.exit_code < 0]
    if killed:
        return Outcome("error", str(killed[0]))
    if by_status["error"]:
        return Outcome("error", by_status["error"][0]["reason"])
    if end.timed_out:
        return Outcome("timeout", f"the cell's limit of {job.time_limit_s:g} s was reached")
    lost = [p for p in end.processes if p.exit_code not in (0, None)]
    if lost:
        return Outcome("error", str(lost[0]))
    if len(workers) < job.world_size:
        missing = sorted(set(range(job.world_size)) - set(workers))
        return Outcome("error", f"ranks {missing} ended without a result")
    if by_status["diverged"]:
        return Outcome("diverged", by_status["diverged"][0]["reason"])
    return Outcome("ok", None)


def classify_served(job: Job, end: End) -> Outcome:
    """The same for a cell with parameter servers, which decide whether a lost worker matters."""
    workers = job.folder.read_workers(job.world_size)
    servers = server_files(job)
    for status in ("oom", "diverged"):
        found = next((w for w in workers.values() if w["status"] == status), None)
        if status == "oom" and found is None and host_out_of_memory(end):
            return Outcome("oom", "the kernel killed a process because the host had no memory left")
        if found is not None:
            return Outcome(status, found["reason"])
    lost = next((f["error"] for f in servers if f["error"]), None)
    if lost:
        return Outcome("error", lost)
    # Without one that they never had, the servers begin nothing.
    for rank, worker in workers.items():
        if worker["status"] == "error" and not joined(job, rank):
            return Outcome("error", worker["reason"])
    if end.timed_out:
        return Outcome("timeout", f"the cell's limit of {job.time_limit_s:g} s was reached")
    if len(servers) < job.settings.options["servers"]:
        dead = next((p for p in end.processes if p.name.startswith("server") and p.exit_code), None)
        return Outcome("error", str(dead or "a parameter server left no statistics"))
    if not any(w["status"] == "ok" and w["per_epoch"] for w in workers.values()):
        failed = next((w for w in workers.values() if w["status"] == "error"), None)
        return Outcome("error", failed["reason"] if failed else "no worker lived to evaluate")
    return Outcome("ok", None)


def server_files(job: Job) -> list[dict[str, Any]]:
    """The statistics of the parameter servers that reached their end; empty for a collective."""
    return job.folder.read_servers(job.settings.options["servers"]) if job.has_servers else []


def host_out_of_memory(end: End) -> bool:
    """Whether a process was killed by SIGKILL and the control group counts out-of-memory kills."""
    killed = any(p.exit_code == -9 for p in end.processes)
    return killed and oom_kills() > OOM_KILLS_AT_START


def oom_kills() -> int:
    """Out-of-memory kills in this process's control group (version 2); 0 where that cannot be read."""
    try:
        group = (
            Path("/proc/self/cgroup")
            .read_text(encoding="utf-8")
            .splitlines()[0]
            .rpartition("::")[2]
        )
        events = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events").read_text(
            encoding="utf-8"
        )
    except (OSError, IndexError):
        return 0
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))


OOM_KILLS_AT_START = oom_kills()


def record(job: Job, outcome: Outcome) -> Record:
    """The record of a cell that ended with a result."""
    s = job.settings
    whole = [w for w in job.folder.read_workers(job.world_size).values() if "phases_s" in w]
    servers = server_files(job)
    first = next((w for w in whole if w["per_epoch"]), whole[0] if whole else {})
    meta = prepared.verified_meta(job.data_dir)
    finished = outcome.status in ("ok", "diverged") and whole
    cls = strategy_class(s.strategy)
    samples_per_step = cls.samples_per_step(s)
    run = {}
    if finished:
        run = served_run(whole, servers, samples_per_step) if servers else collective_run(whole)
    train_time_s, applied = run.get("train_time_s"), run.get("samples_applied")
    per_epoch = run.get("per_epoch") or job.folder.read_epochs()
    accuracies = [e["accuracy"] for e in per_epoch]
    reported = first.get("strategy", {})
    communication = efficiency.communication(whole, servers, run)
    return {
        "schema_version": 1,
        "cell": job.cell.as_dict(),
        "status": outcome.status,
        "reason": outcome.reason,
        "settings": asdict(s),
        "strategy": {
            "name": s.strategy,
            "kind": cls.kind,
            "options": s.options,
            "traits": asdict(traits_of(s.strategy, s.options, s.gpus)),
            "wrap_groups": first.get("wrap_groups", []),
            "details": reported.get("details", {}),
        },
        "model": first.get("model") or unbuilt_model(job, meta["classes"]),
        "data": {
            "name": job.cell.dataset,
            "sha256": meta["sha256"],
            "train_samples": meta["train_samples"],
            "test_samples": meta["test_samples"],
            "synthetic": meta["name"] == "synthetic" or meta["spec"] is not None,
        },
        "batch": {
            "global_batch": s.global_batch,
            "per_worker_batch": s.per_worker_batch,
            "samples_per_step": samples_per_step,
            "steps_per_epoch": meta["train_samples"] // s.global_batch,
            "samples_seen": run.get("samples_seen"),
            "samples_applied": applied,
            "updates_applied": run.get("updates_applied"),
        },
        "time": {
            "train_time_s": train_time_s,
            "epoch_times_s": run.get("epoch_times_s", []),
            "start_skew_ms": start_skew_ms(whole),
            "step_ms": step_distribution([t for w in whole for t in w["step_ms"]]),
            "breakdown_ms": efficiency.breakdown(whole, communication),
            "breakdown_note": cls.breakdown_note,
            "throughput_samples_per_s": applied / train_time_s if train_time_s else None,
            "setup_s": setup_s(first),
            "data_s": phase_s(whole, "data_s"),
            "warmup_s": phase_s(whole, "warmup_s"),
            "eval_s": phase_s(whole, "eval_s"),
            "total_s": job.elapsed_s,
            "time_limit_s": job.time_limit_s,
        },
        "compute": efficiency.compute(job, whole, run),
        "communication": communication,
        "energy": efficiency.energy(job, whole, run),
        "memory": worst_memory(whole),
        "accuracy": {
            "final": accuracies[-1] if accuracies and outcome.status == "ok" else None,
            "best": max(accuracies, default=None),
            "per_epoch": per_epoch,
            "evaluated_on": reported.get("evaluated_on"),
        },
        "server": {"servers": servers} if servers else None,
        "workers": [
            {
                "rank": w["rank"],
                "steps": w["steps"],
                "samples": w["samples"],
                "train_time_s": w["train_time_s"],
                "epoch_starts_s": w["epoch_starts_s"],
                "memory": w["memory"],
                "provenance": w["provenance"],
            }
            for w in whole
        ],
        "profile": efficiency.profile(job),
        "provenance": provenance(job),
    }


def collective_run(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Time, samples and epochs of workers that take every step together; the slowest one's time."""
    first = min(workers, key=lambda w: w["rank"])
    updates = first["strategy"]["updates_applied"]
    return {
        "train_time_s": max(w["train_time_s"] for w in workers),
        "samples_seen": sum(w["samples"] for w in workers),
        # All take a step or all skip it.
        "samples_applied": sum(w["samples"] // max(1, w["steps"]) * updates for w in workers),
        "updates_applied": updates,
        "epoch_times_s": first["epoch_times_s"],
        "per_epoch": first["per_epoch"],
    }


def start_skew_ms(workers: list[dict[str, Any]]) -> list[float] | None:
    """From the first worker's start of an epoch to the last one's, in ms, for each start of the clock.

    Only workers on one node have a clock in common; of several nodes, the largest difference within
    one. None where no two workers share a node.
    """
    nodes: dict[str, list[list[float]]] = {}
    for w in workers:
        nodes.setdefault(w["provenance"]["host"]["name"], []).append(w["epoch_starts_s"])
    by_epoch = [zip(*starts, strict=False) for starts in nodes.values() if len(starts) > 1]
    skews_ms = [[1e3 * (max(s) - min(s)) for s in epochs] for epochs in by_epoch]
    return [max(each) for each in zip(*skews_ms, strict=False)] if skews_ms else None


def served_run(
    workers: list[dict[str, Any]], servers: list[dict[str, Any]], samples_per_step: int
) -> dict[str, Any]:
    """The same as the parameter servers saw it: from the first ticket to the last applied push.

    An epoch ends with its last ticket, while others are at the next already. A lost worker's samples
    count as far as its pushes were taken. A push that came too late may have been dropped by some
    shards and applied by others: `samples_applied` is the mean over the shards.
    """
    first = servers[0]
    ends = [e["end_s"] for e in sorted(first["epochs"], key=lambda e: e["epoch"])]
    per_epoch = next((w["per_epoch"] for w in workers if w["per_epoch"]), [])
    for entry in per_epoch:
        parts = [w["losses"].get(str(entry["epoch"] - 1), (0.0, 0)) for w in workers]
        if all(total is not None for total, _ in parts):
            entry["train_loss"] = sum(t for t, _ in parts) / max(1, sum(n for _, n in parts))
    return {
        "train_time_s": max(server["train_time_s"] for server in servers),
        "samples_seen": first["tickets_settled"] * samples_per_step,
        "samples_applied": round(samples_per_step * applied_pushes(servers)),
        "updates_applied": max(version for server in servers for version in server["updates"]),
        "epoch_times_s": [end - start for start, end in zip([0.0, *ends[:-1]], ends, strict=True)],
        "per_epoch": per_epoch,
    }


def applied_pushes(servers: list[dict[str, Any]]) -> float:
    """How many pushes entered the weights of a shard, as the mean over all shards of all servers."""
    shards = [sum(counts) for server in servers for counts in server["staleness"]]
    return sum(shards) / len(shards)


def unbuilt_model(job: Job, classes: int) -> dict[str, Any]:
    """What can be said of a model that no worker lived to describe."""
    return {
        "parameters": None,
        "initial_weights_sha256": None,
        "input_shape": list(models.input_shape(job.settings.model, job.data_shape)),
        "classes": classes,
        "batchnorm": None,
        "dropout": None,
    }


def step_distribution(step_ms: list[float]) -> dict[str, float] | None:
    """Percentiles of the step times of all workers together, in ms."""
    if not step_ms:
        return None
    x = np.asarray(step_ms)
    low, p10, p50, p90, p99, high = np.percentile(x, [0, 10, 50, 90, 99, 100]).tolist()
    return {
        "count": len(x), "mean": float(x.mean()), "std": float(x.std()), "min": low, "p10": p10,
        "p50": p50, "p90": p90, "p99": p99, "max": high,
    }  # fmt: skip


def setup_s(worker: dict[str, Any]) -> float | None:
    """Process start, imports, rendezvous, building and wrapping the model, as rank 0 saw them."""
    if not worker:
        return None
    phases = worker["phases_s"]
    return worker["started_s"] + phases.get("rendezvous_s", 0) + phases["build_s"]


def phase_s(workers: list[dict[str, Any]], key: str) -> float | None:
    """The longest time that a worker spent in a phase."""
    return max((w["phases_s"].get(key, 0.0) for w in workers), default=None)


def worst_memory(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the rank that used most memory."""
    if not workers:
        return {
            "method": None,
            "peak_bytes": None,
            "peak_over_base_bytes": None,
            "model_states": None,
        }
    worst = max(workers, key=lambda w: w["memory"]["peak_bytes"])["memory"]
    largest = max(workers, key=lambda w: sum(w["model_states"].values()))["model_states"]
    return {
        "method": worst["method"],
        "peak_bytes": worst["peak_bytes"],
        "peak_over_base_bytes": worst["peak_over_base_bytes"],
        "model_states": largest,
    }


def provenance(job: Job) -> dict[str, Any]:
    """What the launcher knows about the run."""
    return {
        "stratbench": __version__,
        "git": git_state(REPOSITORY),
        "started": datetime.fromtimestamp(job.origin_unix_s, UTC).isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "nodes": job.n_nodes,
        "workers_per_node": job.workers_per_node,
        "threads_per_worker": job.threads,
        "device": "cuda" if job.use_cuda else "cpu",
        "busy_at_start": job.folder.read_busy(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def timeline(job: Job, out: Path) -> None:
    """Samples of all nodes with the phases of the ranks, as one CSV file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    merge_timeline(job.folder.sample_files(), job.folder.phase_logs(), out)
