"""Computes the record's entries on worker jobs: queue waits, pauses, joins, GPU-seconds.

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

from stratbench.cell.files import finite_or_none, read_json_lines
from stratbench.extensions.elastic.accounts.history import (
    EpochTotals,
    MemberHistory,
    TrainingGeneration,
)
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.train.job import Job


def read_member_results(job: Job) -> dict[int, dict[str, Any]]:
    """Read the results of each worker of an elastic cell, by worker number.

    Each worker writes its results at its end.
    """
    results = {
        e["number"]: job.folder.read_worker_result(e["number"]) for e in read_worker_jobs(job)
    }
    return {number: result for number, result in results.items() if result is not None}


def sum_member_runs(job: Job, per_epoch: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum the time, samples and epochs of a training over all its members and launchers.

    The result has the form of `totals.summarize_collective_run`. Pauses and repeated steps are part of
    the time; time without any worker is not. Times and losses are filled into `per_epoch`.
    """
    s, elapsed_s = job.settings, 0.0
    per_epoch_steps, incarnations = job.train_samples // s.global_batch, _read_histories(job)
    last = max(
        [
            len(per_epoch),
            *(number + 1 for incarnation in incarnations for number in incarnation.totals_by_epoch),
        ]
    )
    epochs = [
        _sum_epoch_totals(incarnation.totals_by_epoch.get(number) for incarnation in incarnations)
        for number in range(last)
    ]
    times_s = [epoch.train_s + epoch.pause_s for epoch in epochs]
    changes = list(pairwise(_list_generations(incarnations)))
    for number, entry in enumerate(per_epoch):
        elapsed_s += times_s[number]
        entry["train_time_s"] = elapsed_s
        # A loss is left out if a member was lost in the epoch, or if steps were repeated in it.
        first, kept = number * per_epoch_steps, epochs[number]
        once = not any(
            max(first, b.from_step) < min(first + per_epoch_steps, a.last_step) for a, b in changes
        )
        if once and abs(kept.reported_steps - per_epoch_steps) < 0.5 / job.cell.gpus:
            entry["train_loss"] = finite_or_none(kept.loss_sum / kept.reported_steps)
    steps = s.total_steps(job.train_samples)
    # With fewer epochs, the training diverged before its end.
    if per_epoch and len(per_epoch) < (s.epochs or 0):
        steps = len(per_epoch) * per_epoch_steps
    return {
        "train_time_s": sum(times_s),
        "samples_seen": steps * s.global_batch,
        "samples_applied": steps * s.global_batch,
        "updates_applied": steps,
        "epoch_times_s": times_s,
        "per_epoch": per_epoch,
    }


def make_elastic_entry(job: Job) -> dict[str, Any]:
    """Return the record's section `elastic`, for a cell without parameter servers."""
    origin = job.origin_unix_s
    incarnations = _read_histories(job)
    dates = {
        n: of
        for incarnation in reversed(incarnations)
        for n, of in incarnation.dates_by_member.items()
    }
    jobs = [
        make_job_entry(entry, dates.get(entry["number"], {}), origin)
        for entry in read_worker_jobs(job)
    ]
    generations = _list_generations(incarnations)
    pauses = [g.pause_s for g in generations if g.pause_s is not None]
    checkpoints = [
        w["checkpoints"] for w in read_member_results(job).values() if w.get("checkpoints")
    ]
    held_up = [x for c in checkpoints for x in c["held_up_s"]]
    return {
        "incarnations": len(incarnations),
        **sum_job_totals(jobs, _sum_training_s(generations)),
        "leaves": sum(len(incarnation.left_members) for incarnation in incarnations),
        "losses": sum(len(incarnation.lost_members) for incarnation in incarnations),
        "restarts": sum(g.from_checkpoint for g in generations),
        # Steps whose result was lost with a member, so that they were taken again.
        "steps_repeated": sum(max(0, a.last_step - b.from_step) for a, b in pairwise(generations)),
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
            for number, incarnation in enumerate(incarnations)
            for g in incarnation.generations
        ],
    }


def sum_job_totals(jobs: list[dict[str, Any]], training_s: float) -> dict[str, Any]:
    """Return the record's totals over all worker jobs: queue wait, allocated and idle seconds.

    `training_s` is the sum of all workers' training seconds.
    """
    started = [j["started_s"] for j in jobs if j["started_s"] is not None]
    first_steps = [j["first_step_s"] for j in jobs if j["first_step_s"] is not None]
    allocated_s = sum(j["allocated_s"] for j in jobs)
    submitted_s = min((j["submitted_s"] for j in jobs), default=0.0)
    return {
        "queue_wait_s": max(0.0, min(started) - submitted_s) if started else None,
        "first_step_s": min(first_steps, default=None),
        "allocated_s": allocated_s,
        "idle_s": max(0.0, allocated_s - training_s),
        "joins": len(first_steps),
    }


def read_worker_jobs(job: Job) -> list[dict[str, Any]]:
    """Read the last known state of each worker job, sorted by number."""
    entries = read_json_lines(RunFiles(job.folder).worker_jobs_path)
    return sorted({e["number"]: e for e in entries}.values(), key=lambda e: e["number"])


def _read_histories(job: Job) -> list[MemberHistory]:
    """Read each launcher's history of members, and add the work that members could not report."""
    kept = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in RunFiles(job.folder).list_incarnation_paths()
    ]
    incarnations = [MemberHistory.from_dict(values) for values in kept]
    for incarnation in incarnations:
        for g in incarnation.generations:
            if g.to_step is None:
                _add_unreported_work(incarnation, g, job)
    for a, b in pairwise(_list_generations(incarnations)):
        # If all members were lost, only the checkpoint says how far they came.
        if b.from_checkpoint:
            a.to_step = max(a.last_step, b.from_step)
    return incarnations


def _list_generations(incarnations: Iterable[MemberHistory]) -> list[TrainingGeneration]:
    """Return the generations of all launchers in one list."""
    return [g for incarnation in incarnations for g in incarnation.generations]


def _sum_epoch_totals(parts: Iterable[EpochTotals | None]) -> EpochTotals:
    """Sum the totals of one epoch over all launchers that trained in the epoch."""
    return EpochTotals(*map(sum, zip(*(astuple(part) for part in parts if part), strict=True)))


def _add_unreported_work(incarnation: MemberHistory, g: TrainingGeneration, job: Job) -> None:
    """Add the unreported work of a generation to a history.

    The members of such a generation could not report their end, and write the work to files. The time since
    their last message counts for the epoch in progress if there is no file.
    """
    files = [RunFiles(job.folder).read_orphaned_result(number) for number in g.members]
    unheard = [file for file in files if file and file["generation"] == g.number]
    for file in unheard:
        g.ended_unix_s = max(file["ended_unix_s"], g.ended_unix_s or 0.0)
        g.to_step = max(file["step"], g.last_step)
        incarnation.add_steps(g, file["epochs"])
    if unheard or g.began_unix_s is None:
        return
    g.ended_unix_s = g.ended_unix_s or max(incarnation.written_unix_s, g.reported_unix_s)
    first = g.from_step // (job.train_samples // job.settings.global_batch)
    number = max((epoch + 1 for epoch in g.train_s_by_member), default=first)
    incarnation.totals_by_epoch.setdefault(number, EpochTotals()).train_s += (
        g.ended_unix_s - g.reported_unix_s
    )


def make_job_entry(entry: dict[str, Any], dates: dict[str, float], origin: float) -> dict[str, Any]:
    """Return the record's entry of one worker job.

    SLURM's dates are truncated to seconds: no job starts before its submission, or ends before its start.

    Args:
        entry: Entry of the job in the supervisor's journal.
        dates: When the worker was admitted, ready, and at its first step, in seconds since 1970.
        origin: Origin of the record's times, in seconds since 1970.
    """
    submitted, ended = entry["submitted_unix_s"], entry["ended_unix_s"]
    # A job without a start was never seen running by a poll.
    started = entry["started_unix_s"] or dates.get("admitted")
    started = started and max(started, submitted)
    ended = ended and max(ended, started or submitted)
    return {
        "number": entry["number"],
        "slot": entry["slot"],
        "id": entry["id"],
        "submitted_s": submitted - origin,
        "started_s": started and started - origin,
        "joined_s": dates["ready"] - origin if "ready" in dates else None,
        "first_step_s": dates["first_step"] - origin if "first_step" in dates else None,
        "ended_s": ended and ended - origin,
        "allocated_s": ended - started if started and ended else 0.0,
        "reason": entry["reason"],
    }


def _make_generation_entry(g: TrainingGeneration, origin: float) -> dict[str, Any]:
    """Return the record's entry of one generation, with times relative to `origin`."""
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
    return {key: getattr(g, key) for key in keys} | {
        "began_s": g.began_unix_s and g.began_unix_s - origin,
        "ended_s": g.ended_unix_s and g.ended_unix_s - origin,
    }


def _sum_training_s(generations: list[TrainingGeneration]) -> float:
    """Return the seconds in which workers took steps or evaluated, summed over all workers."""
    return sum(
        len(g.members) * (g.ended_unix_s - g.began_unix_s)
        for g in generations
        if g.began_unix_s is not None and g.ended_unix_s is not None
    )
