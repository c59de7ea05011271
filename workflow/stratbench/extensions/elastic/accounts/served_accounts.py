"""Computes the record's entries of an elastic cell with parameter servers, from their journal.

Dates are seconds since 1970. The record's times count from the first launcher's start.
"""

from __future__ import annotations

from typing import Any

from stratbench.extensions.elastic.accounts.accounts import (
    compute_worker_job_totals,
    make_worker_job_entry,
    read_member_results,
    read_worker_jobs,
)
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.servers.journal import collect_score_events, read_journal
from stratbench.extensions.servers.cells import read_finished_server_statistics
from stratbench.strategies import get_strategy_class
from stratbench.train.job import Job


def make_elastic_entry(job: Job) -> dict[str, Any]:
    """Return the record's section `elastic` of a cell with parameter servers."""
    journal, origin = read_journal(RunFiles(job.folder).servers_dir), job.origin_unix_s
    jobs = [
        make_worker_job_entry(e, find_first_event_times_unix_s(journal, e["number"]), origin)
        for e in read_worker_jobs(job)
    ]
    training_s = sum(end - begin for begin, end in list_worker_training_intervals_unix_s(journal))
    servers = read_finished_server_statistics(job)
    incarnations = [e for e in journal if e["event"] == "incarnation"]
    done_twice = sum(e["done_twice"] for e in incarnations)
    s = job.settings
    tickets_of_step = s.global_batch // get_strategy_class(s.strategy).samples_per_step(s)
    return {
        "incarnations": max(1, len(incarnations)),
        **compute_worker_job_totals(jobs, training_s),
        "leaves": count_events(journal, "leave"),
        "losses": count_events(journal, "loss"),
        "restarts": sum(e["settled"] > 0 for e in incarnations[1:]),
        "steps_repeated": -(-done_twice // tickets_of_step),
        "pauses": {"count": 0, "median_s": None, "longest_s": None, "total_s": 0.0},
        "checkpoints": {
            "count": sum(s["elastic"]["saves"] for s in servers),
            "held_up_s": sum(s["elastic"]["held_up_s"] for s in servers),
        },
        "jobs": jobs,
        "generations": [],
        "servers": {
            "tickets_done_twice": done_twice,
            "tickets_handed_on": sum(len(e.get("tickets", ())) for e in journal),
            "returns": sum(w.get("returns", 0) for w in read_member_results(job).values()),
            "evaluations": count_events(journal, "score"),
            "last_epoch": next((s["elastic"]["finished_at_epoch"] for s in servers[:1]), None),
            "most_at_a_time": count_max_concurrent_workers(journal),
            "incarnations": [
                {
                    "incarnation": e["incarnation"],
                    "began_s": e["at_unix_s"] - origin,
                    "tickets_before": e["settled"],
                    "tickets_done_twice": e["done_twice"],
                }
                for e in incarnations
            ],
        },
    }


def count_events(journal: list[dict[str, Any]], event: str) -> int:
    """Return how often an event of kind `event` occurs in the journal."""
    return sum(e["event"] == event for e in journal)


def find_first_event_times_unix_s(journal: list[dict[str, Any]], worker: int) -> dict[str, float]:
    """Return the times at which a worker first joined and got a batch, by event."""
    names = {"join": ("admitted", "ready"), "begin": ("first_step",)}
    dates: dict[str, float] = {}
    for event in journal:
        if event.get("worker") == worker:
            for name in names.get(event["event"], ()):
                dates.setdefault(name, event["at_unix_s"])
    return dates


def list_worker_training_intervals_unix_s(
    journal: list[dict[str, Any]],
) -> list[tuple[float, float]]:
    """Return the begin and end of each worker's part in the training.

    If the servers were killed, a period ends with the last event before the kill.
    """
    began: dict[int, float] = {}
    spans: list[tuple[float, float]] = []
    last = 0.0
    for event in journal:
        kind, at = event["event"], event["at_unix_s"]
        if kind in ("incarnation", "end"):
            spans += [(begin, at if kind == "end" else last) for begin in began.values()]
            began.clear()
        elif kind == "begin":
            began[event["worker"]] = at
        elif kind in ("leave", "loss") and event["worker"] in began:
            spans.append((began.pop(event["worker"]), at))
        last = at
    return spans + [(begin, last) for begin in began.values()]


def count_max_concurrent_workers(journal: list[dict[str, Any]]) -> int:
    """Return the largest number of workers that trained at the same time."""
    here: set[int] = set()
    maximum = 0
    for event in journal:
        if event["event"] == "incarnation":
            here.clear()
        elif event["event"] == "join":
            here.add(event["worker"])
        elif event["event"] in ("leave", "loss"):
            here.discard(event["worker"])
        maximum = max(maximum, len(here))
    return maximum


def drop_server_work_after_last_epoch(
    statistics: list[dict[str, Any]], num_epochs: int
) -> list[dict[str, Any]]:
    """Return the servers' statistics without tickets completed after the end of the training.

    The last evaluation may end the training while workers still complete tickets.

    Args:
        statistics: Statistics of all servers. Those of server 0 say when the training ended.
        num_epochs: Number of evaluated epochs, or 0 for all.
    """
    first = statistics[0]
    ends = sorted(first["epochs"], key=lambda e: e["epoch"])
    settled = first["tickets_settled"] - first["elastic"]["after_the_end"]
    kept = {"epochs": ends[: num_epochs or None], "tickets_settled": settled}
    return [s | kept | {"train_time_s": first["train_time_s"]} for s in statistics]


def list_evaluated_epochs(job: Job) -> list[dict[str, Any]]:
    """Return the record's entries of evaluated epochs, up to the epoch that ended the training."""
    scores = collect_score_events(read_journal(RunFiles(job.folder).servers_dir))
    server = job.folder.read_server_statistics(0)
    last = server["elastic"]["finished_at_epoch"] if server else None
    epochs: list[dict[str, Any]] = []
    while (score := scores.get(len(epochs))) and (last is None or len(epochs) <= last):
        epochs.append(
            {
                "epoch": len(epochs) + 1,
                "train_time_s": score["end_s"],
                "train_loss": None,
                **{key: score[key] for key in ("test_loss", "score", "score_error")},
            }
        )
    return epochs
