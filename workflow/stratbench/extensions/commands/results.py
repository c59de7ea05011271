"""Converts a command's report and exit statuses to the result files of a worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stratbench.cell.files import read_last_lines
from stratbench.cell.settings import Settings
from stratbench.extensions.commands.files import (
    get_command_file_stem,
    get_report_path,
    read_exit_statuses,
)
from stratbench.extensions.commands.reading import CommandReport, ReportError, read_report
from stratbench.strategies import get_strategy_class
from stratbench.telemetry.machine import environment
from stratbench.telemetry.machine.foreign_processes import find_worker_gpu
from stratbench.telemetry.machine.node import collect_node_facts
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.timeline import PhaseLog, read_samples
from stratbench.train.inputs import build_files_entry, build_model_entry_without_worker
from stratbench.train.job import Job

#: A command counts as hung, and not as slow, if it reported no step for this long before its time limit:
#: QUIET_S seconds, or QUIET_STEPS times its longest step if that is longer.
QUIET_S, QUIET_STEPS = 60.0, 10.0
#: The record's `evaluated_on` for a command. stratbench does not see what the command evaluates.
EVALUATED_ON = "what the command says that it evaluated"


def store_results(job: Job) -> None:
    """Store the report of an ended command as the result of worker 0.

    If the report is invalid, the result is an error with the reason.
    """
    try:
        report = read_report(get_report_path(job.folder))
    except ReportError as e:
        job.folder.write_worker_result(0, {"status": "error", "reason": str(e)})
        return
    write_training_phases(job, report)
    for entry in list_epoch_entries(job.settings, report):
        job.folder.append_epoch_result(entry)
    job.folder.write_worker_result(0, make_worker_result(job, report))


def make_worker_result(job: Job, report: CommandReport) -> dict[str, Any]:
    """Return the result of a worker with the values that the command has reported."""
    origin_s = get_time_origin_s(job)
    starts = [begin - origin_s for begin, _ in report.training_intervals]
    evaluated_s = sum(
        s.reported_at_s - e
        for s, e in zip(report.scores, list_evaluation_start_times_s(report), strict=True)
    )
    phases = {"build_s": starts[0]}
    if report.scores and not job.settings.steps:
        phases["eval_s"] = evaluated_s
    return {
        "status": "diverged" if report.first_nonfinite_value_name else "ok",
        "reason": report.first_nonfinite_value_name
        and f"{report.first_nonfinite_value_name} is not a finite number",
        "rank": 0,
        "steps": len(report.step_times_s),
        "samples": sum(report.samples_per_step),
        "train_time_s": report.train_time_s,
        "epoch_starts_s": [begin for begin, _ in report.training_intervals],
        "epoch_times_s": compute_epoch_times_s(job.settings, report),
        "step_ms": [1e3 * t for t in report.step_times_s],
        "breakdown_ms": {},
        "phases_s": phases,
        "started_s": 0.0,
        "per_epoch": list_epoch_entries(job.settings, report),
        "losses": {},
        "memory": read_peak_memory(job),
        "model_states": {},
        "strategy": {
            "details": {"engine": job.settings.strategy},
            "evaluated_on": EVALUATED_ON,
            "updates_applied": len(report.step_times_s),
        },
        "communication": None,
        "model": build_model_entry_without_worker(job)
        | {"parameters": report.reported_facts.get("parameters")},
        "provenance": collect_provenance(job, report),
        "told": make_self_reported_entry(report, origin_s),
    }


def make_self_reported_entry(report: CommandReport, origin_s: float) -> dict[str, Any]:
    """Return the record's section `program.self_reported`: the values that the command reported."""
    sizes = set(report.samples_per_step)
    return {
        "workers": report.reported_facts["workers"],
        "parameters": report.reported_facts.get("parameters"),
        # The last step of an epoch may have fewer samples. So the largest number is the batch.
        "batch": max(sizes),
        "batches_differ": len(sizes) > 1,
        "steps": len(report.step_times_s),
        "samples": sum(report.samples_per_step),
        "first_s": report.training_intervals[0][0] - origin_s,
        "last_s": report.training_intervals[-1][1] - origin_s,
        "evaluations": len(report.scores),
        "facts": {
            k: v for k, v in report.reported_facts.items() if k not in ("workers", "parameters")
        },
    }


def list_evaluation_start_times_s(report: CommandReport) -> list[float]:
    """Return the time at which the evaluation for each score began, in seconds.

    It is the end of the last step, or the time of the previous score.
    """
    ends, latest = [], report.training_intervals[0][0]
    for score in report.scores:
        done = [end for _, end in report.training_intervals if end <= score.reported_at_s]
        ends.append(max([latest, *done]))
        latest = score.reported_at_s
    return ends


def list_epoch_entries(s: Settings, report: CommandReport) -> list[dict[str, Any]]:
    """Return the record's list `score.per_epoch`, with an entry per evaluation after training."""
    if s.steps:
        return []
    scores = [score for score in report.scores if score.train_time_s > 0]
    return [
        {
            "epoch": i,
            "train_time_s": score.train_time_s,
            "train_loss": score.train_loss,
            "test_loss": score.test_loss,
            "score": score.score,
            "score_error": score.standard_error,
        }
        for i, score in enumerate(scores, 1)
    ]


def compute_epoch_times_s(s: Settings, report: CommandReport) -> list[float]:
    """Return the training time of each epoch: the time between two successive scores.

    Training after the last score is one more epoch.
    """
    ends = [e["train_time_s"] for e in list_epoch_entries(s, report)]
    spans = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    rest = report.train_time_s - (ends[-1] if ends else 0.0)
    return [*spans, rest] if rest > 1e-9 else spans


def get_time_origin_s(job: Job) -> float:
    """Return the time on node 0's clock from which the cell's times count.

    The report's times are on this clock.
    """
    ends = read_exit_statuses(job.folder, 1)
    return ends[0]["origin_s"] if ends else job.origin_s


def write_training_phases(job: Job, report: CommandReport) -> None:
    """Write the intervals in which the command trained, for the timeline and the energy measurement."""
    log = PhaseLog(job.folder.get_phase_log_path(0), 0, get_time_origin_s(job))
    for begin, end in report.training_intervals:
        log.write_phase_event("train", "start", at_s=begin)
        log.write_phase_event("train", "end", at_s=end)


def read_peak_memory(job: Job) -> dict[str, Any]:
    """Return the record's memory entry: the peak memory of the largest process, from the kernel."""
    peak_bytes = max(
        (end["max_rss_bytes"] for end in read_exit_statuses(job.folder, job.n_nodes)), default=None
    )
    return {
        "method": "maxrss-since-process-start",
        "peak_bytes": peak_bytes,
        "peak_over_base_bytes": None,
    }


def collect_provenance(job: Job, report: CommandReport) -> dict[str, Any]:
    """Return the provenance of worker 0: this node, its GPU and torch's version.

    The version is taken from the report.
    """
    facts: dict[str, Any] = {
        "device": "cuda" if job.use_cuda else "cpu",
        "host": collect_node_facts(),
        "load_1m": os.getloadavg()[0],
        "environment": environment.select_training_variables(os.environ),
    }
    if version := report.reported_facts.get("torch"):
        facts["software"] = {"torch": str(version)}
    places = [p["gpu"] for p in job.folder.read_process_locations().values() if "gpu" in p]
    gpu = find_worker_gpu(Nvml(), places[0]) if places else None
    return facts | ({"gpu": gpu.read_identity_and_settings()} if gpu else {})


def make_program_entry(job: Job) -> dict[str, Any]:
    """Return the record's section `program`: external measurements, and the command's report."""
    files = get_strategy_class(job.settings.strategy).list_user_files(job.settings.options)
    worker = job.folder.read_worker_result(0) or {}
    return {
        **build_files_entry(files),
        "external": collect_external_measurements(job),
        "self_reported": worker.get("told"),
    }


def collect_external_measurements(job: Job) -> dict[str, Any]:
    """Return measurements of the command's processes on all nodes; a value is None if unknown."""
    ends = read_exit_statuses(job.folder, job.n_nodes)
    processes, gpus = (
        read_column_of_resource_samples(job, "process", "rss_bytes"),
        read_column_of_resource_samples(job, "gpu", "mem_used_bytes"),
    )
    whole = len(ends) == job.n_nodes
    return {
        "exit_code": next((e["exit_code"] for e in ends if e["exit_code"]), 0) if whole else None,
        "begun_s": ends[0]["begun_s"] - get_time_origin_s(job) if whole else None,
        "ended_s": ends[0]["ended_s"] - get_time_origin_s(job) if whole else None,
        "cpu_time_s": sum(e["cpu_time_s"] for e in ends) if whole else None,
        "largest_process_bytes": max(e["max_rss_bytes"] for e in ends) if whole else None,
        "node_rss_bytes": max(processes, default=None),
        "gpu_bytes": max(gpus, default=None),
    }


def read_column_of_resource_samples(job: Job, kind: str, column: str) -> list[int]:
    """Read all sampled values of a column for the cell's processes or GPUs.

    Args:
        job: Job of the cell.
        kind: `process` or `gpu`.
        column: Name of the column.
    """
    rows = (row for path in job.folder.list_timeline_samples_paths() for row in read_samples(path))
    return [int(row[column]) for row in rows if row["kind"] == kind and row.get(column)]


# --- how the command ended ------------------------------------------------------------------------


def describe_command_failure(job: Job, exits: Sequence[Any]) -> str:
    """Describe how a command failed: its exit code, and the last line of its log."""
    failed = next(p for p in exits if p.exit_code not in (0, None))
    lines = [line for line in read_last_log_lines(job) if line.strip()]
    return f"{failed}{f'; its last line: {lines[-1].strip()[:200]}' if lines else ''}"


def read_last_log_lines(job: Job) -> list[str]:
    """Return the last lines of the command's logs on all nodes."""
    paths = (job.folder.get_log_path(get_command_file_stem(node)) for node in range(job.n_nodes))
    return [line for path in paths if path.exists() for line in read_last_lines(path)]


def find_hang_reason(job: Job) -> str | None:
    """Return the reason for which a command at its time limit counts as hung.

    The result is None without a time limit, or if the command was only slow: being slow is a valid result.
    Only reported steps count as progress.
    """
    if job.time_limit_s is None:
        return None
    limit = f"the cell's limit of {job.time_limit_s:g} s"
    try:
        report = read_report(get_report_path(job.folder))
    except ReportError as e:
        return f"no step within {limit}: {e}"
    quiet_s = get_time_origin_s(job) + job.time_limit_s - report.last_line_at_s
    longest_s = max(report.step_times_s)
    if report.is_paused or quiet_s <= max(QUIET_S, QUIET_STEPS * longest_s):
        return None
    return (
        f"it hangs: it reported the last of {len(report.step_times_s)} steps {quiet_s:.1f} s before {limit}, "
        f"and no step had taken longer than {longest_s:.3g} s"
    )
