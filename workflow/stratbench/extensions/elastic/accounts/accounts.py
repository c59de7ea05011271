"""The record's entries on an elastic cell's worker jobs: waits, pauses, joins, GPU-seconds.

Dates are seconds since 1970 by the clocks of the nodes; the record counts from the first launcher's start.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import astuple
from itertools import pairwise
from typing import Any

from stratbench.cell.files import finite, read_json_lines
from stratbench.extensions.elastic.accounts.history import EpochTotals, Generation, History
from stratbench.train.job import Job


def members_of(job: Job) -> dict[int, dict[str, Any]]:
    """Return the results that each worker of the cell wrote at its end, by number."""
    results = {e["number"]: job.folder.read_worker(e["number"]) for e in worker_jobs(job)}
    return {number: result for number, result in results.items() if result is not None}


def run_of_members(job: Job, per_epoch: list[dict[str, Any]]) -> dict[str, Any]:
    """Return time, samples and epochs of the training, as `totals.collective_run` does.

    Pauses and repeated steps are part of the time. Time without any worker is not. `per_epoch` is filled in.
    """
    s, elapsed_s = job.settings, 0.0
    per_epoch_steps, incarnations = job.train_samples // s.global_batch, _incarnations(job)
    last = max(
        [
            len(per_epoch),
            *(number + 1 for incarnation in incarnations for number in incarnation.epochs),
        ]
    )
    epochs = [
        _sum(incarnation.epochs.get(number) for incarnation in incarnations)
        for number in range(last)
    ]
    times_s = [epoch.train_s + epoch.pause_s for epoch in epochs]
    changes = list(pairwise(_generations(incarnations)))
    for number, entry in enumerate(per_epoch):
        elapsed_s += times_s[number]
        entry["train_time_s"] = elapsed_s
        # A lost member's losses are unknown, and a repeated step's are there twice.
        first, kept = number * per_epoch_steps, epochs[number]
        once = not any(
            max(first, b.from_step) < min(first + per_epoch_steps, a.stop) for a, b in changes
        )
        if once and abs(kept.steps - per_epoch_steps) < 0.5 / job.cell.gpus:
            entry["train_loss"] = finite(kept.loss / kept.steps)
    steps = s.total_steps(job.train_samples)
    if per_epoch and len(per_epoch) < (s.epochs or 0):  # it diverged before its end
        steps = len(per_epoch) * per_epoch_steps
    return {
        "train_time_s": sum(times_s),
        "samples_seen": steps * s.global_batch,
        "samples_applied": steps * s.global_batch,
        "updates_applied": steps,
        "epoch_times_s": times_s,
        "per_epoch": per_epoch,
    }


def entry_of(job: Job) -> dict[str, Any]:
    """Return the record's `elastic`."""
    origin = job.origin_unix_s
    incarnations = _incarnations(job)
    dates = {n: of for incarnation in reversed(incarnations) for n, of in incarnation.dates.items()}
    jobs = [job_entry(entry, dates.get(entry["number"], {}), origin) for entry in worker_jobs(job)]
    generations = _generations(incarnations)
    pauses = [g.pause_s for g in generations if g.pause_s is not None]
    checkpoints = [w["checkpoints"] for w in members_of(job).values() if w.get("checkpoints")]
    held_up = [x for c in checkpoints for x in c["held_up_s"]]
    return {
        "incarnations": len(incarnations),
        **totals_of(jobs, _inside_s(generations)),
        "leaves": sum(len(incarnation.left) for incarnation in incarnations),
        "losses": sum(len(incarnation.lost) for incarnation in incarnations),
        "restarts": sum(g.from_checkpoint for g in generations),
        # Taken and lost, so that they were taken again.
        "steps_repeated": sum(max(0, a.stop - b.from_step) for a, b in pairwise(generations)),
        "pauses": {
            "count": len(pauses),
            "median_s": statistics.median(pauses) if pauses else None,
            "longest_s": max(pauses, default=None),
            "total_s": sum(pauses),
        },
        "checkpoints": {"count": len(held_up), "held_up_s": sum(held_up)},
        "jobs": jobs,
        "generations": [
            _generation_entry(g, origin) | {"incarnation": number}
            for number, incarnation in enumerate(incarnations)
            for g in incarnation.generations
        ],
    }


def totals_of(jobs: list[dict[str, Any]], inside_s: float) -> dict[str, Any]:
    """Return the record's totals of all worker jobs; `inside_s`: sum of their training time."""
    started = [j["started_s"] for j in jobs if j["started_s"] is not None]
    first_steps = [j["first_step_s"] for j in jobs if j["first_step_s"] is not None]
    allocated_s = sum(j["allocated_s"] for j in jobs)
    submitted_s = min((j["submitted_s"] for j in jobs), default=0.0)
    return {
        "queue_wait_s": max(0.0, min(started) - submitted_s) if started else None,
        "first_step_s": min(first_steps, default=None),
        "allocated_s": allocated_s,
        "idle_s": max(0.0, allocated_s - inside_s),
        "joins": len(first_steps),
    }


def worker_jobs(job: Job) -> list[dict[str, Any]]:
    """Return all worker jobs, by number, each as it was seen last."""
    entries = read_json_lines(job.folder.worker_jobs)
    return sorted({e["number"]: e for e in entries}.values(), key=lambda e: e["number"])


def _incarnations(job: Job) -> list[History]:
    """Return each launcher's history, completed by what members could not report."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in job.folder.incarnations()]
    incarnations = [History.from_dict(values) for values in kept]
    for incarnation in incarnations:
        for g in incarnation.generations:
            if g.to_step is None:
                _add_unheard_of(incarnation, g, job)
    for a, b in pairwise(_generations(incarnations)):
        if b.from_checkpoint:  # of members that were all lost it alone says how far they came
            a.to_step = max(a.stop, b.from_step)
    return incarnations


def _generations(incarnations: Iterable[History]) -> list[Generation]:
    return [g for incarnation in incarnations for g in incarnation.generations]


def _sum(parts: Iterable[EpochTotals | None]) -> EpochTotals:
    """Return an epoch that was trained in several incarnations."""
    return EpochTotals(*map(sum, zip(*(astuple(part) for part in parts if part), strict=True)))


def _add_unheard_of(incarnation: History, g: Generation, job: Job) -> None:
    """Add the work of members of a generation that ended without a report.

    Without a file of their own, it is the time of the epoch in progress since their last message.
    """
    files = [job.folder.read_unheard(number) for number in g.members]
    unheard = [file for file in files if file and file["generation"] == g.number]
    for file in unheard:
        g.ended_unix_s = max(file["ended_unix_s"], g.ended_unix_s or 0.0)
        g.to_step = max(file["step"], g.stop)
        incarnation.add_steps(g, file["epochs"])
    if unheard or g.began_unix_s is None:
        return
    g.ended_unix_s = g.ended_unix_s or max(incarnation.seen_unix_s, g.told_unix_s)
    first = g.from_step // (job.train_samples // job.settings.global_batch)
    number = max((epoch + 1 for epoch in g.train_s), default=first)
    incarnation.epochs.setdefault(number, EpochTotals()).train_s += g.ended_unix_s - g.told_unix_s


def job_entry(entry: dict[str, Any], dates: dict[str, float], origin: float) -> dict[str, Any]:
    """Return the record's entry of a worker job.

    SLURM's dates are truncated to seconds: no job starts before its submission, or ends before its start.

    Args:
        entry: The supervisor's entry.
        dates: When it was admitted, ready, and at its first step.
        origin: Origin of the record's times.
    """
    submitted, ended = entry["submitted_unix_s"], entry["ended_unix_s"]
    started = entry["started_unix_s"] or dates.get("admitted")  # it ended between two looks
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


def _generation_entry(g: Generation, origin: float) -> dict[str, Any]:
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


def _inside_s(generations: list[Generation]) -> float:
    """Return seconds in which workers took steps or evaluated, over all of them."""
    return sum(
        len(g.members) * (g.ended_unix_s - g.began_unix_s)
        for g in generations
        if g.began_unix_s is not None and g.ended_unix_s is not None
    )
