"""Computes the record's entries on an elastic cell's worker jobs: queue waits, pauses, GPU-seconds.

Dates are seconds since 1970 by the clocks of the nodes. The record's times count from the first launcher's
start.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import astuple
from itertools import pairwise
from typing import Any

from stratbench.cell.files import read_json_lines, replace_non_finite_by_none
from stratbench.extensions.elastic.accounts.history import (
    EpochTotals,
    MemberHistory,
    TrainingGeneration,
)
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.train.job import Job


def read_member_results(job: Job) -> dict[int, dict[str, Any]]:
    """Read the results that workers of an elastic cell wrote, by worker number.

    Workers without results are left out.
    """
    results = {
        e["number"]: job.folder.read_worker_result(e["number"]) for e in read_worker_jobs(job)
    }
    return {number: result for number, result in results.items() if result is not None}


def compute_training_totals(job: Job, epoch_entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the time, samples and epochs of an elastic training, summed over all launchers.

    The result has the form of `totals.summarize_collective_run`. Pauses and repeated steps are part of
    the time; time without any worker is not. The times and losses of epochs are written into
    `epoch_entries`.
    """
    s, elapsed_s = job.settings, 0.0
    per_epoch_steps, histories = job.train_samples // s.global_batch, _read_member_histories(job)
    last = max(
        [
            len(epoch_entries),
            *(number + 1 for history in histories for number in history.totals_by_epoch),
        ]
    )
    epochs = [
        _sum_epoch_totals(history.totals_by_epoch.get(number) for history in histories)
        for number in range(last)
    ]
    times_s = [epoch.train_s + epoch.pause_s for epoch in epochs]
    changes = list(pairwise(_list_all_generations(histories)))
    for number, entry in enumerate(epoch_entries):
        elapsed_s += times_s[number]
        entry["train_time_s"] = elapsed_s
        first_step, epoch = number * per_epoch_steps, epochs[number]
        has_repeated_steps = any(
            max(first_step, b.from_step) < min(first_step + per_epoch_steps, a.step_at_end)
            for a, b in changes
        )
        all_reported = abs(epoch.reported_steps - per_epoch_steps) < 0.5 / job.cell.gpus
        # An epoch has no training loss if a worker was lost in it, or if steps were repeated.
        if all_reported and not has_repeated_steps:
            entry["train_loss"] = replace_non_finite_by_none(epoch.loss_sum / epoch.reported_steps)
    steps = s.count_steps(job.train_samples)
    # A training that diverged has fewer evaluated epochs than planned.
    if epoch_entries and len(epoch_entries) < (s.epochs or 0):
        steps = len(epoch_entries) * per_epoch_steps
    return {
        "train_time_s": sum(times_s),
        "samples_seen": steps * s.global_batch,
        "samples_applied": steps * s.global_batch,
        "updates_applied": steps,
        "epoch_times_s": times_s,
        "per_epoch": epoch_entries,
    }


def make_elastic_entry(job: Job) -> dict[str, Any]:
    """Return the record's section `elastic` of a cell without parameter servers."""
    origin = job.origin_unix_s
    histories = _read_member_histories(job)
    dates = {
        number: event_times
        for history in reversed(histories)
        for number, event_times in history.event_times_by_member.items()
    }
    jobs = [
        make_worker_job_entry(entry, dates.get(entry["number"], {}), origin)
        for entry in read_worker_jobs(job)
    ]
    generations = _list_all_generations(histories)
    pauses = [g.pause_s for g in generations if g.pause_s is not None]
    checkpoints = [
        w["checkpoints"] for w in read_member_results(job).values() if w.get("checkpoints")
    ]
    held_up = [x for c in checkpoints for x in c["held_up_s"]]
    return {
        "incarnations": len(histories),
        **compute_worker_job_totals(jobs, _sum_worker_training_s(generations)),
        "leaves": sum(len(history.left_members) for history in histories),
        "losses": sum(len(history.lost_members) for history in histories),
        "restarts": sum(g.from_checkpoint for g in generations),
        # Steps that were computed again, because their result was lost with a worker.
        "steps_repeated": sum(
            max(0, a.step_at_end - b.from_step) for a, b in pairwise(generations)
        ),
        "pauses": {
            "count": len(pauses),
            "median_s": statistics.median(pauses) if pauses else None,
            "longest_s": max(pauses, default=None),
            "total_s": sum(pauses),
        },
        "checkpoints": {"count": len(held_up), "held_up_s": sum(held_up)},
        "jobs": jobs,
        "generations": [
            _make_generation_entry(g, origin) | {"incarnation": number}
            for number, history in enumerate(histories)
            for g in history.generations
        ],
    }


def compute_worker_job_totals(
    jobs: list[dict[str, Any]], sum_of_training_s: float
) -> dict[str, Any]:
    """Return the record's totals of all worker jobs: queue wait, allocated and idle seconds.

    Args:
        jobs: The record's entries of the worker jobs.
        sum_of_training_s: Seconds in which workers trained, summed over all workers.
    """
    started = [j["started_s"] for j in jobs if j["started_s"] is not None]
    first_steps = [j["first_step_s"] for j in jobs if j["first_step_s"] is not None]
    allocated_s = sum(j["allocated_s"] for j in jobs)
    submitted_s = min((j["submitted_s"] for j in jobs), default=0.0)
    return {
        "queue_wait_s": max(0.0, min(started) - submitted_s) if started else None,
        "first_step_s": min(first_steps, default=None),
        "allocated_s": allocated_s,
        "idle_s": max(0.0, allocated_s - sum_of_training_s),
        "joins": len(first_steps),
    }


def read_worker_jobs(job: Job) -> list[dict[str, Any]]:
    """Read the last known state of each worker job, sorted by worker number."""
    entries = read_json_lines(RunFiles(job.folder).worker_jobs_path)
    return sorted({e["number"]: e for e in entries}.values(), key=lambda e: e["number"])


def _read_member_histories(job: Job) -> list[MemberHistory]:
    """Read each launcher's history of members, and add steps that were not reported.

    The number of such steps is known from files of the members and from checkpoints, or is estimated.
    """
    kept = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in RunFiles(job.folder).list_member_history_paths()
    ]
    histories = [MemberHistory.from_dict(values) for values in kept]
    for history in histories:
        for g in history.generations:
            if g.to_step is None:
                _add_unreported_steps(history, g, job)
    for a, b in pairwise(_list_all_generations(histories)):
        # If all members of a generation were lost, only the checkpoint shows how many steps they took.
        if b.from_checkpoint:
            a.to_step = max(a.step_at_end, b.from_step)
    return histories


def _list_all_generations(histories: Iterable[MemberHistory]) -> list[TrainingGeneration]:
    """Return the generations of all launchers' histories in one list."""
    return [g for history in histories for g in history.generations]


def _sum_epoch_totals(totals_by_launcher: Iterable[EpochTotals | None]) -> EpochTotals:
    """Sum the totals of one epoch over all launchers. A launcher without this epoch has None."""
    return EpochTotals(
        *map(sum, zip(*(astuple(totals) for totals in totals_by_launcher if totals), strict=True))
    )


def _add_unreported_steps(history: MemberHistory, generation: TrainingGeneration, job: Job) -> None:
    """Add to a history the steps that the members of a generation could not report.

    Members that lost their coordinator write these steps to files. Without a file, the time since the last
    report counts for the epoch in progress.
    """
    files = [RunFiles(job.folder).read_unreported_result(number) for number in generation.members]
    orphaned = [file for file in files if file and file["generation"] == generation.number]
    for file in orphaned:
        generation.ended_unix_s = max(file["ended_unix_s"], generation.ended_unix_s or 0.0)
        generation.to_step = max(file["step"], generation.step_at_end)
        history.add_reported_steps(generation, file["epochs"])
    if orphaned or generation.began_unix_s is None:
        return
    generation.ended_unix_s = generation.ended_unix_s or max(
        history.written_unix_s, generation.reported_unix_s
    )
    first = generation.from_step // (job.train_samples // job.settings.global_batch)
    number = max((epoch + 1 for epoch in generation.train_s_by_epoch), default=first)
    history.totals_by_epoch.setdefault(number, EpochTotals()).train_s += (
        generation.ended_unix_s - generation.reported_unix_s
    )


def make_worker_job_entry(
    journal_entry: dict[str, Any], event_times_unix_s: dict[str, float], origin_unix_s: float
) -> dict[str, Any]:
    """Return the record's entry of one worker job.

    SLURM's dates are truncated to seconds: no job starts before its submission, or ends before its start.

    Args:
        journal_entry: Entry of the job in the supervisor's journal.
        event_times_unix_s: When the worker was admitted, ready, and at its first step.
        origin_unix_s: Time at which the record's times are 0.
    """
    submitted, ended = journal_entry["submitted_unix_s"], journal_entry["ended_unix_s"]
    # A short job may have no start time, because no poll of the scheduler saw it running.
    started = journal_entry["started_unix_s"] or event_times_unix_s.get("admitted")
    started = started and max(started, submitted)
    ended = ended and max(ended, started or submitted)
    return {
        "number": journal_entry["number"],
        "slot": journal_entry["slot"],
        "id": journal_entry["id"],
        "submitted_s": submitted - origin_unix_s,
        "started_s": started and started - origin_unix_s,
        "joined_s": event_times_unix_s["ready"] - origin_unix_s
        if "ready" in event_times_unix_s
        else None,
        "first_step_s": event_times_unix_s["first_step"] - origin_unix_s
        if "first_step" in event_times_unix_s
        else None,
        "ended_s": ended and ended - origin_unix_s,
        "allocated_s": ended - started if started and ended else 0.0,
        "reason": journal_entry["reason"],
    }


def _make_generation_entry(generation: TrainingGeneration, origin_unix_s: float) -> dict[str, Any]:
    """Return the record's entry of one generation, with times in seconds since `origin_unix_s`."""
    keys = (
        "number",
        "members",
        "from_step",
        "to_step",
        "cause",
        "pause_s",
        "from_checkpoint",
        "broken",
    )
    return {key: getattr(generation, key) for key in keys} | {
        "began_s": generation.began_unix_s and generation.began_unix_s - origin_unix_s,
        "ended_s": generation.ended_unix_s and generation.ended_unix_s - origin_unix_s,
    }


def _sum_worker_training_s(generations: list[TrainingGeneration]) -> float:
    """Return the seconds in which workers trained or evaluated, summed over all workers."""
    return sum(
        len(g.members) * (g.ended_unix_s - g.began_unix_s)
        for g in generations
        if g.began_unix_s is not None and g.ended_unix_s is not None
    )
