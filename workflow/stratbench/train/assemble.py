"""Assembles a cell's record from the files that the cell's processes have written."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from stratbench import __version__
from stratbench.cell import software_gpu
from stratbench.cell.installation import INSTALLED, ROOT, read_build_revision
from stratbench.cell.record import SCHEMA_VERSION, Record
from stratbench.cell.run_folder import parse_rank
from stratbench.cell.settings import Settings
from stratbench.strategies import get_mesh, get_option_defaults, get_strategy_class, get_traits
from stratbench.strategies.base import Strategy
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.git import read_git_state
from stratbench.train import efficiency
from stratbench.train.ending import CellEnding
from stratbench.train.inputs import build_data_entry, build_model_entry, build_task_entry
from stratbench.train.job import Job
from stratbench.train.nodes.paused import build_pauses_entry
from stratbench.train.running.runner import create_runner
from stratbench.workload.data import prepared
from stratbench.workload.data.sources import DataError


def make_record(job: Job, ending: CellEnding) -> Record:
    """Return the record of a cell that ended with a result, such as oom."""
    # The end of the cell is now: assembling the record may take seconds.
    total_s, finished_at = job.elapsed_s, datetime.now(UTC)
    s, strategy = job.settings, get_strategy_class(job.settings.strategy)
    runner = create_runner(s)
    whole = [w for w in runner.workers(job) if "phases_s" in w]
    first = next((w for w in whole if w["per_epoch"]), whole[0] if whole else {})
    meta = prepared.read_verified_metadata(job.data_dir)
    if meta != job.data:
        raise DataError(
            f"{job.data_dir} was prepared again while the cell trained; start the cell again"
        )
    ended = ending.status in ("ok", "diverged") and whole
    run = runner.compute_totals(job, whole) if ended else {}
    communication = runner.communication(job, whole, run)
    task = build_task_entry(job, first, meta)
    return {
        "schema_version": SCHEMA_VERSION,
        "cell": job.cell.as_dict(),
        "status": ending.status,
        "reason": ending.reason,
        "settings": s.as_dict(),
        "strategy": build_strategy_entry(s, strategy, first, runner.is_gang),
        "model": build_model_entry(job, first.get("model")),
        "task": task,
        "data": build_data_entry(job, meta),
        "batch": build_batch_entry(s, strategy, meta, run),
        "time": build_time_entry(job, strategy, whole, first, run, runner.is_gang)
        | {
            "breakdown_ms": efficiency.compute_mean_phase_times_ms(whole, communication),
            **efficiency.compute_bubble_share(whole),
            "total_s": total_s,
            **({} if job.queue_wait_s is None else {"queue_wait_s": job.queue_wait_s}),
        },
        "compute": efficiency.compute_flops_and_mfu(job, whole, run, runner.is_gang),
        "communication": communication,
        "energy": efficiency.build_energy_entry(job, run, runner.read_gpu_intervals(job, whole)),
        "memory": find_largest_worker_memory(whole)
        | list_peak_memory_by_stage(whole, get_mesh(s.strategy, s.options, s.gpus)),
        "score": build_score_entry(
            ending, first, run.get("per_epoch") or runner.epochs(job), task["better"]
        ),
        "server": runner.build_server_entry(job),
        "workers": [build_worker_entry(w) for w in whole],
        "profile": build_profile_entry(job, runner.profile_note),
        **(
            {"pauses": pauses}
            if (pauses := build_pauses_entry(job, runner.read_training_phases))
            else {}
        ),
        **({runner.section: runner.build_section_entry(job, whole)} if runner.section else {}),
        "provenance": build_provenance_entry(job, finished_at),
    }


def build_strategy_entry(
    s: Settings, strategy: type[Strategy], worker: dict[str, Any], has_constant_workers: bool
) -> dict[str, Any]:
    """Return the entry `strategy` of the record.

    Args:
        s: Settings of the cell.
        strategy: Class of the cell's strategy.
        worker: Results of a worker.
        has_constant_workers: Whether the same workers train from beginning to end.
    """
    details = worker.get("strategy", {}).get("details", {})
    by_zeros = bool(details.get("moved_by_zeros"))
    adds_up = worker.get("task", {}).get("loss_adds_up") is not False
    traits = get_traits(s.strategy, s.options, s.gpus, by_zeros, not has_constant_workers, adds_up)
    return {
        "name": s.strategy,
        "kind": strategy.kind,
        "options": get_option_defaults(s.strategy) | s.options,
        "traits": asdict(traits),
        "mesh": asdict(get_mesh(s.strategy, s.options, s.gpus)),
        "wrap_groups": worker.get("wrap_groups", []),
        "details": details,
    }


def build_batch_entry(
    s: Settings, strategy: type[Strategy], meta: dict[str, Any], totals: dict[str, Any]
) -> dict[str, Any]:
    """Return the entry `batch` of the record.

    Args:
        s: Settings of the cell.
        strategy: Class of the cell's strategy.
        meta: Meta data of the data set.
        totals: Totals over all workers, or an empty dict if the cell has not finished.
    """
    return {
        "global_batch": s.global_batch,
        "per_worker_batch": s.per_worker_batch,
        "samples_per_step": strategy.samples_per_step(s),
        "steps_per_epoch": meta["train_samples"] // s.global_batch,
        "samples_seen": totals.get("samples_seen"),
        "samples_applied": totals.get("samples_applied"),
        "updates_applied": totals.get("updates_applied"),
    }


def build_time_entry(
    job: Job,
    strategy: type[Strategy],
    workers: list[dict[str, Any]],
    reporting_worker: dict[str, Any],
    totals: dict[str, Any],
    has_constant_workers: bool,
) -> dict[str, Any]:
    """Return the record's entry `time`, except for the step's breakdown and the total.

    Args:
        job: Job of the cell.
        strategy: Class of the cell's strategy.
        workers: Results of the workers.
        reporting_worker: Results of the worker whose set-up time counts.
        totals: Totals over all workers, or an empty dict if the cell has not finished.
        has_constant_workers: Whether the same workers train from beginning to end.
    """
    s = job.settings
    train_time_s, applied = totals.get("train_time_s"), totals.get("samples_applied")
    return {
        "train_time_s": train_time_s,
        "epoch_times_s": totals.get("epoch_times_s", []),
        # Attempts may have run on different nodes, whose clocks cannot be compared.
        "start_skew_ms": compute_start_skew_ms(workers)
        if has_constant_workers and not job.earlier_attempts
        else None,
        "step_ms": summarize_step_times([t for w in workers for t in w["step_ms"]]),
        "breakdown_note": strategy.breakdown_note,
        "throughput_samples_per_s": applied / train_time_s if train_time_s else None,
        "setup_s": compute_setup_s(reporting_worker, has_constant_workers, job.earlier_attempts_s),
        "data_s": find_longest_phase_time_s(workers, "data_s"),
        "warmup_s": find_longest_phase_time_s(workers, "warmup_s"),
        **get_largest_compile_counts(workers),
        "eval_s": None if s.steps else find_longest_phase_time_s(workers, "eval_s"),
        "time_limit_s": job.time_limit_s,
    }


def build_score_entry(
    ending: CellEnding,
    worker: dict[str, Any],
    per_epoch: list[dict[str, Any]],
    better_direction: str,
) -> dict[str, Any]:
    """Return the entry `score` of the record.

    Args:
        ending: How the cell ended.
        worker: Results of the worker that evaluated.
        per_epoch: Results of each epoch.
        better_direction: Direction of better scores, `higher` or `lower`.
    """
    scores = [e["score"] for e in per_epoch]
    known = [score for score in scores if score is not None]
    return {
        "final": scores[-1] if scores and ending.status == "ok" else None,
        "best": (max if better_direction == "higher" else min)(known, default=None),
        "per_epoch": per_epoch,
        "evaluated_on": worker.get("strategy", {}).get("evaluated_on"),
    }


def build_worker_entry(result: dict[str, Any]) -> dict[str, Any]:
    """Return the element for one worker in the record's list `workers`."""
    keys = ("rank", "steps", "samples", "train_time_s", "epoch_starts_s", "memory", "provenance")
    entry = {key: result[key] for key in keys}
    if own := result.get("own_ms"):
        entry["own_ms"] = [float(f"{ms:.4g}") for ms in own]
    if (wait_s := result.get("core_wait_s")) is not None:
        entry["core_wait_s"] = float(f"{wait_s:.4g}")
    issue_ms = result.get("issue_ms")
    entry["issue_ms"] = None if issue_ms is None else float(f"{issue_ms:.4g}")
    return entry


def compute_start_skew_ms(workers: list[dict[str, Any]]) -> list[float] | None:
    """Return, for each epoch, how many ms the last worker started after the first.

    Only workers on one node share a clock. So with several nodes this is the largest difference within a
    node. The result is None if no two workers share a node.
    """
    nodes: dict[str, list[list[float]]] = {}
    for w in workers:
        nodes.setdefault(w["provenance"]["host"]["name"], []).append(w["epoch_starts_s"])
    by_epoch = [zip(*starts, strict=False) for starts in nodes.values() if len(starts) > 1]
    skews_ms = [[1e3 * (max(s) - min(s)) for s in epochs] for epochs in by_epoch]
    return [max(each) for each in zip(*skews_ms, strict=False)] if skews_ms else None


def build_profile_entry(job: Job, note: str | None) -> dict[str, Any] | None:
    """Return the entry `profile` of the record. None if the profiler has written no trace.

    `note` is a sentence on what the trace does not contain, or None.
    """
    trace = job.folder.profile_trace_path
    if not trace.exists():
        return None
    return {"trace": str(trace.relative_to(job.folder.log_dir)), "note": note}


def summarize_step_times(step_ms: list[float]) -> dict[str, float] | None:
    """Return mean, standard deviation and percentiles of the step times in ms. None without steps."""
    if not step_ms:
        return None
    x = sorted(step_ms)
    mean = statistics.fmean(x)
    # The percentiles equal NumPy's. The import of NumPy would take a third of a launcher's start.
    cuts = statistics.quantiles(x, n=100, method="inclusive") if len(x) > 1 else x * 99
    return {
        "count": len(x), "mean": mean, "std": math.sqrt(statistics.fmean((v - mean) ** 2 for v in x)),
        "min": x[0], **{f"p{n}": cuts[n - 1] for n in (10, 50, 90, 99)}, "max": x[-1],
    }  # fmt: skip


def compute_setup_s(
    worker: dict[str, Any], has_constant_workers: bool, earlier_attempts_s: float
) -> float | None:
    """Return the seconds of a worker's set-up, from its process's start to the wrapped model.

    Set-up consists of process start, imports, rendezvous, building and wrapping. For workers that may start
    at any time, process start and imports do not count.

    Args:
        worker: Results of the worker.
        has_constant_workers: Whether the same workers train from beginning to end.
        earlier_attempts_s: Seconds of earlier attempts of the cell.
    """
    if not worker:
        return None
    phases = worker["phases_s"]
    started_s = worker["started_s"] - earlier_attempts_s if has_constant_workers else 0.0
    return started_s + phases.get("rendezvous_s", 0) + phases["build_s"]


def get_largest_compile_counts(workers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest number of compilations of any worker, and the longest compile time.

    The dict is empty if no worker has compiled.
    """
    figures = [w["compile"] for w in workers if w.get("compile")]
    keys = ("compile_s", "compilations", "recompilations")
    return {key: max(f[key] for f in figures) for key in keys} if figures else {}


def find_longest_phase_time_s(workers: list[dict[str, Any]], phase_key: str) -> float | None:
    """Return the longest time in seconds that a worker spent in a phase. None if unknown.

    `phase_key` is the phase's key in the results, such as `data_s`.
    """
    return max(
        (w["phases_s"][phase_key] for w in workers if phase_key in w["phases_s"]), default=None
    )


def find_largest_worker_memory(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the memory values in bytes of the worker with the highest peak.

    The entry `model_states` comes from the worker with the largest model states. All values are None without
    workers.
    """
    if not workers:
        return dict.fromkeys(("method", "peak_bytes", "peak_over_base_bytes", "model_states"))
    worst = max(workers, key=lambda w: w["memory"]["peak_bytes"])["memory"]
    largest = max(workers, key=lambda w: sum(w["model_states"].values()))["model_states"]
    return {
        "method": worst["method"],
        "peak_bytes": worst["peak_bytes"],
        "peak_over_base_bytes": worst["peak_over_base_bytes"],
        # None if a user's command trained, which does not report its model states.
        "model_states": largest or None,
        **{key: worst[key] for key in ("requested_peak_bytes", "cublas_bytes") if key in worst},
    }


def list_peak_memory_by_stage(workers: list[dict[str, Any]], mesh: Mesh) -> dict[str, Any]:
    """Return the highest peak memory of a worker in bytes, per pipeline stage.

    The dict is empty without stages.
    """
    each = [
        [w for w in workers if mesh.get_coordinate(w["rank"]).stage == i]
        for i in range(mesh.stages)
    ]
    if mesh.stages == 1 or not all(each):
        return {}
    worst = [max(ws, key=lambda w: w["memory"]["peak_bytes"])["memory"] for ws in each]
    keys = ("peak_bytes", "peak_over_base_bytes")
    return {"stages": [{key: m[key] for key in keys} for m in worst]}


def build_provenance_entry(job: Job, finished: datetime) -> dict[str, Any]:
    """Return the entry `provenance` of the record, such as versions, times and nodes."""
    first_unix_s = (
        job.earlier_attempts[0]["started_unix_s"] if job.earlier_attempts else job.origin_unix_s
    )
    return {
        "stratbench": __version__,
        "git": read_build_revision() if INSTALLED else read_git_state(ROOT),
        "started": datetime.fromtimestamp(first_unix_s, UTC).isoformat(timespec="seconds"),
        "finished": finished.isoformat(timespec="seconds"),
        "nodes": job.n_nodes,
        "workers_per_node": job.workers_per_node,
        "threads_per_worker": job.threads,
        "device": "cuda" if job.use_cuda else "cpu",
        **({"planned_repeats": job.planned_repeats} if job.planned_repeats else {}),
        **(
            {"software_gpu": True}
            if job.use_cuda and software_gpu.is_software_gpu_installed()
            else {}
        ),
        "busy_at_start": job.folder.read_load_of_other_processes(),
        "gpus": {
            name: device["gpu"] | {"node": job.get_node_of_rank(parse_rank(name))}
            for name, device in job.folder.read_process_locations().items()
            if "gpu" in device
        },
        "foreign_gpu_processes": job.folder.read_foreign_processes(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }
