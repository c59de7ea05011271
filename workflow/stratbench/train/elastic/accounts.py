"""What the record of an elastic cell says of its worker jobs: waits, pauses, joins, GPU-seconds.

Dates are seconds since 1970 by the clocks of the nodes; the record counts from the first launcher's start.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from typing import Any

from stratbench.cell.files import finite
from stratbench.train.job import Job


def members_of(job: Job) -> dict[int, dict[str, Any]]:
    """What each worker of the cell wrote at its end, by number or rank, as far as it wrote anything."""
    if not job.settings.elastic:
        return job.folder.read_workers(job.world_size)
    found = {entry["number"]: job.folder.read_worker(entry["number"]) for entry in worker_jobs(job)}
    return {number: result for number, result in sorted(found.items()) if result is not None}


def run_of_members(job: Job, per_epoch: list[dict[str, Any]]) -> dict[str, Any]:
    """Time, samples and epochs of the whole training, as `assemble.collective_run` gives them.

    Pauses are part of the time, and what had to be repeated. Time in which nobody was there is not.
    """
    epochs: dict[int, dict[str, float]] = {}
    for life in _lives(job):
        for number, told in life["epochs"].items():
            kept = epochs.setdefault(int(number), dict.fromkeys(told, 0.0))
            for key, value in told.items():
                kept[key] += value
    times_s = [epochs[e]["train_s"] + epochs[e]["pause_s"] for e in sorted(epochs)]
    s, elapsed_s = job.settings, 0.0
    per_epoch_steps = job.train_samples // s.global_batch
    for entry, time_s in zip(per_epoch, times_s, strict=False):
        elapsed_s += time_s
        kept = epochs[entry["epoch"] - 1]
        entry["train_time_s"] = elapsed_s
        # A lost member's losses are unknown, and a repeated step's are there twice.
        if abs(kept["steps"] - per_epoch_steps) < 0.5 / job.cell.gpus:
            entry["train_loss"] = finite(kept["loss"] / kept["steps"])
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
    """The record's `elastic`."""
    origin = job.origin_unix_s
    lives = _lives(job)
    jobs = [job_entry(entry, _dates_of(entry, lives), origin) for entry in worker_jobs(job)]
    generations = [
        {**_generation_entry(g, origin), "life": number}
        for number, life in enumerate(lives)
        for g in life["generations"]
    ]
    pauses = [g["pause_s"] for g in generations if g["pause_s"] is not None]
    checkpoints = [w["checkpoints"] for w in members_of(job).values() if w.get("checkpoints")]
    held_up = [x for c in checkpoints for x in c["held_up_s"]]
    return {
        "lives": len(lives),
        **totals_of(jobs, _inside_s(generations)),
        "leaves": sum(len(life["left"]) for life in lives),
        "losses": sum(len(life["lost"]) for life in lives),
        "restarts": sum(g["from_checkpoint"] for g in generations),
        "steps_repeated": _repeated(generations),
        "pauses": {
            "count": len(pauses),
            "median_s": statistics.median(pauses) if pauses else None,
            "longest_s": max(pauses, default=None),
            "total_s": sum(pauses),
        },
        "checkpoints": {"count": len(held_up), "held_up_s": sum(held_up)},
        "jobs": jobs,
        "generations": generations,
    }


def totals_of(jobs: list[dict[str, Any]], inside_s: float) -> dict[str, Any]:
    """What the record says of all worker jobs together; `inside_s`: that they trained, summed up."""
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
    """All worker jobs, by number, each as it was seen last."""
    try:
        text = job.folder.worker_jobs.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    last = {entry["number"]: entry for entry in map(json.loads, text.split("\n")[:-1])}
    return [last[number] for number in sorted(last)]


def _lives(job: Job) -> list[dict[str, Any]]:
    """What each launcher kept, with what the members of its last generation could not tell it any more."""
    lives = [json.loads(path.read_text(encoding="utf-8")) for path in job.folder.lives()]
    for life in lives:
        last = next(iter(life["generations"][-1:]), None)
        if last is None or last["ended_unix_s"] is not None:
            continue
        unheard = [job.folder.read_unheard(number) for number in last["members"]]
        for told in unheard:
            if told is not None and told["generation"] == last["number"]:
                _add_unheard(life, last, told)
    return lives


def _add_unheard(life: dict[str, Any], last: dict[str, Any], told: dict[str, Any]) -> None:
    last["ended_unix_s"] = max(told["ended_unix_s"], last["ended_unix_s"] or 0.0)
    last["to_step"] = max(told["step"], last["to_step"] or last["from_step"])
    for key, (loss, steps, world, seconds) in told["epochs"].items():
        epoch = life["epochs"].setdefault(
            key, {"loss": 0.0, "steps": 0.0, "train_s": 0.0, "pause_s": 0.0}
        )
        longest_s = last["train_s"].get(key, 0.0)
        epoch["loss"] += loss / world
        epoch["steps"] += steps / world
        epoch["train_s"] += max(0.0, seconds - longest_s)
        last["train_s"][key] = max(seconds, longest_s)


def _dates_of(entry: dict[str, Any], lives: list[dict[str, Any]]) -> dict[str, float]:
    return next((x for life in lives if (x := life["dates"].get(str(entry["number"])))), {})


def job_entry(entry: dict[str, Any], dates: dict[str, float], origin: float) -> dict[str, Any]:
    """What the record says of a worker job; `dates`: when it was admitted, ready, and at its first step."""
    started = entry["started_unix_s"] or dates.get("admitted")  # it ended between two looks
    ended = entry["ended_unix_s"]
    return {
        "number": entry["number"],
        "slot": entry["slot"],
        "id": entry["id"],
        "submitted_s": entry["submitted_unix_s"] - origin,
        "started_s": started and started - origin,
        "joined_s": dates["ready"] - origin if "ready" in dates else None,
        "first_step_s": dates["first_step"] - origin if "first_step" in dates else None,
        "ended_s": ended and ended - origin,
        "allocated_s": max(0.0, ended - started) if started and ended else 0.0,
        "reason": entry["reason"],
    }


def _generation_entry(g: dict[str, Any], origin: float) -> dict[str, Any]:
    keys = ("number", "members", "from_step", "to_step", "cause", "pause_s", "from_checkpoint")
    dates = {
        f"{key}_s": g[f"{key}_unix_s"] and g[f"{key}_unix_s"] - origin for key in ("began", "ended")
    }
    return {key: g[key] for key in keys} | {"broken": g["broken"]} | dates


def _inside_s(generations: list[dict[str, Any]]) -> float:
    """Seconds in which workers took steps or evaluated, over all of them."""
    return sum(
        len(g["members"]) * (g["ended_s"] - g["began_s"])
        for g in generations
        if g["began_s"] is not None and g["ended_s"] is not None
    )


def _repeated(generations: list[dict[str, Any]]) -> int:
    """Steps that were taken and lost, so that they were taken again."""
    following = pairwise(generations)
    return sum(max(0, (a["to_step"] or a["from_step"]) - b["from_step"]) for a, b in following)
