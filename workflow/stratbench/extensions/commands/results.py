"""Converts a command's report and end into the result files of a worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stratbench.cell.files import last_lines
from stratbench.cell.settings import Settings
from stratbench.extensions.commands.files import command_name, read_ends, report_path
from stratbench.extensions.commands.reading import CommandReport, ReportError, read_report
from stratbench.strategies import strategy_class
from stratbench.telemetry.machine import environment
from stratbench.telemetry.machine.foreign_processes import gpu_at
from stratbench.telemetry.machine.node import facts_of_node
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.timeline import PhaseLog, read_samples
from stratbench.train.inputs import files_entry, unbuilt_model
from stratbench.train.job import Job

#: A command whose last step is so long before its limit was hung, and not slow: in seconds, and in multiples
#: of its longest step.
QUIET_S, QUIET_STEPS = 60.0, 10.0
#: Its own word for what it evaluated.
EVALUATED_ON = "what the command says that it evaluated"


def keep_results(job: Job) -> None:
    """Store the report of a command that has ended, as the result of worker 0.

    An invalid report is the reason of a failure.
    """
    try:
        report = read_report(report_path(job.folder))
    except ReportError as e:
        job.folder.write_worker(0, {"status": "error", "reason": str(e)})
        return
    write_phases(job, report)
    for entry in epochs_of(job.settings, report):
        job.folder.add_epoch(entry)
    job.folder.write_worker(0, as_worker(job, report))


def as_worker(job: Job, report: CommandReport) -> dict[str, Any]:
    """Return a worker's result, as far as the command's report has it."""
    origin_s = origin_of(job)
    starts = [begin - origin_s for begin, _ in report.stretches]
    evaluated_s = sum(s.at_s - e for s, e in zip(report.scores, ends_before(report), strict=True))
    phases = {"build_s": starts[0]}
    if report.scores and not job.settings.steps:
        phases["eval_s"] = evaluated_s
    return {
        "status": "diverged" if report.not_finite else "ok",
        "reason": report.not_finite and f"{report.not_finite} is not a finite number",
        "rank": 0,
        "steps": len(report.step_s),
        "samples": sum(report.samples),
        "train_time_s": report.train_time_s,
        "epoch_starts_s": [begin for begin, _ in report.stretches],
        "epoch_times_s": epoch_times_s(job.settings, report),
        "step_ms": [1e3 * t for t in report.step_s],
        "breakdown_ms": {},
        "phases_s": phases,
        "started_s": 0.0,
        "per_epoch": epochs_of(job.settings, report),
        "losses": {},
        "memory": memory_of(job),
        "model_states": {},
        "strategy": {
            "details": {"engine": job.settings.strategy},
            "evaluated_on": EVALUATED_ON,
            "updates_applied": len(report.step_s),
        },
        "communication": None,
        "model": unbuilt_model(job) | {"parameters": report.facts.get("parameters")},
        "provenance": provenance_of(job, report),
        "told": said_entry(report, origin_s),
    }


def said_entry(report: CommandReport, origin_s: float) -> dict[str, Any]:
    """Return the record's `program.self_reported`."""
    sizes = set(report.samples)
    return {
        "workers": report.facts["workers"],
        "parameters": report.facts.get("parameters"),
        # The last step of a pass may have fewer.
        "batch": max(sizes),
        "batches_differ": len(sizes) > 1,
        "steps": len(report.step_s),
        "samples": sum(report.samples),
        "first_s": report.stretches[0][0] - origin_s,
        "last_s": report.stretches[-1][1] - origin_s,
        "evaluations": len(report.scores),
        "facts": {k: v for k, v in report.facts.items() if k not in ("workers", "parameters")},
    }


def ends_before(report: CommandReport) -> list[float]:
    """Return the clock's time before each score: the end of the last step, or the previous score."""
    ends, latest = [], report.stretches[0][0]
    for score in report.scores:
        done = [end for _, end in report.stretches if end <= score.at_s]
        ends.append(max([latest, *done]))
        latest = score.at_s
    return ends


def epochs_of(s: Settings, report: CommandReport) -> list[dict[str, Any]]:
    """Return the record's `score.per_epoch`: an entry an evaluation that follows training."""
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
            "score_error": score.error,
        }
        for i, score in enumerate(scores, 1)
    ]


def epoch_times_s(s: Settings, report: CommandReport) -> list[float]:
    """Return seconds of training before each score since the one before, and after the last."""
    ends = [e["train_time_s"] for e in epochs_of(s, report)]
    spans = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    rest = report.train_time_s - (ends[-1] if ends else 0.0)
    return [*spans, rest] if rest > 1e-9 else spans


def origin_of(job: Job) -> float:
    """Return the origin of the cell's times on the clock of node 0, where the report was written."""
    ends = read_ends(job.folder, 1)
    return ends[0]["origin_s"] if ends else job.origin_s


def write_phases(job: Job, report: CommandReport) -> None:
    """Write when the command trained, for the timeline and the energy."""
    log = PhaseLog(job.folder.phases(0), 0, origin_of(job))
    for begin, end in report.stretches:
        log.write("train", "start", at_s=begin)
        log.write("train", "end", at_s=end)


def memory_of(job: Job) -> dict[str, Any]:
    """Return the peak memory of the largest process, as the kernel counted it."""
    peak_bytes = max(
        (end["max_rss_bytes"] for end in read_ends(job.folder, job.n_nodes)), default=None
    )
    return {
        "method": "maxrss-since-process-start",
        "peak_bytes": peak_bytes,
        "peak_over_base_bytes": None,
    }


def provenance_of(job: Job, report: CommandReport) -> dict[str, Any]:
    """Return the node of the launcher, and the PyTorch that the command reported."""
    facts: dict[str, Any] = {
        "device": "cuda" if job.use_cuda else "cpu",
        "host": facts_of_node(),
        "load_1m": os.getloadavg()[0],
        "environment": environment.of_training(os.environ),
    }
    if version := report.facts.get("torch"):
        facts["software"] = {"torch": str(version)}
    places = [p["gpu"] for p in job.folder.read_places().values() if "gpu" in p]
    gpu = gpu_at(Nvml(), places[0]) if places else None
    return facts | ({"gpu": gpu.static()} if gpu else {})


def program_entry(job: Job) -> dict[str, Any]:
    """Return the record's `program`: external measurements, and the command's own report."""
    files = strategy_class(job.settings.strategy).files(job.settings.options)
    worker = job.folder.read_worker(0) or {}
    return {
        **files_entry(files),
        "external": outside(job),
        "self_reported": worker.get("told"),
    }


def outside(job: Job) -> dict[str, Any]:
    """Return external measurements of the command's processes on all nodes, or None if unknown."""
    ends = read_ends(job.folder, job.n_nodes)
    processes, gpus = (
        samples_of(job, "process", "rss_bytes"),
        samples_of(job, "gpu", "mem_used_bytes"),
    )
    whole = len(ends) == job.n_nodes
    return {
        "exit_code": next((e["exit_code"] for e in ends if e["exit_code"]), 0) if whole else None,
        "begun_s": ends[0]["begun_s"] - origin_of(job) if whole else None,
        "ended_s": ends[0]["ended_s"] - origin_of(job) if whole else None,
        "cpu_time_s": sum(e["cpu_time_s"] for e in ends) if whole else None,
        "largest_process_bytes": max(e["max_rss_bytes"] for e in ends) if whole else None,
        "node_rss_bytes": max(processes, default=None),
        "gpu_bytes": max(gpus, default=None),
    }


def samples_of(job: Job, kind: str, column: str) -> list[int]:
    """Return all samples of a column of the cell's processes or GPUs.

    Args:
        job: The cell's.
        kind: Kind of the sampled subject.
        column: Name of the column.
    """
    rows = (row for path in job.folder.sample_files() for row in read_samples(path))
    return [int(row[column]) for row in rows if row["kind"] == kind and row.get(column)]


# --- how it ended --------------------------------------------------------------------------------


def why_failed(job: Job, exits: Sequence[Any]) -> str:
    """Return why a command failed: its exit code, and the last line of its log."""
    failed = next(p for p in exits if p.exit_code not in (0, None))
    lines = [line for line in log_of(job) if line.strip()]
    return f"{failed}{f'; its last line: {lines[-1].strip()[:200]}' if lines else ''}"


def log_of(job: Job) -> list[str]:
    """Return the ends of the command's logs, of all nodes."""
    paths = (job.folder.log(command_name(node)) for node in range(job.n_nodes))
    return [line for path in paths if path.exists() for line in last_lines(path)]


def why_no_timeout(job: Job) -> str | None:
    """Return why a command that was ended at its limit failed.

    Return None if it was just slow.

    Being slow is a result. Only the steps that it reports show progress.
    """
    limit = f"the cell's limit of {job.time_limit_s:g} s"
    try:
        report = read_report(report_path(job.folder))
    except ReportError as e:
        return f"no step within {limit}: {e}"
    quiet_s = origin_of(job) + job.time_limit_s - report.latest_s
    longest_s = max(report.step_s)
    if report.paused or quiet_s <= max(QUIET_S, QUIET_STEPS * longest_s):
        return None
    return (
        f"it hangs: {quiet_s:.1f} s before {limit} it told of the last of {len(report.step_s)} steps, of "
        f"which none had taken longer than {longest_s:.3g} s"
    )
