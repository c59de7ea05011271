"""The record's entries on an elastic cell with parameter servers, from the servers' journal.

Dates are seconds since 1970; the record counts from the first launcher's start.
"""

from __future__ import annotations

from typing import Any

from stratbench.extensions.elastic.accounts.accounts import (
    job_entry,
    members_of,
    totals_of,
    worker_jobs,
)
from stratbench.extensions.elastic.servers.journal import read_journal, scores_in
from stratbench.extensions.servers.cells import read_servers
from stratbench.strategies import strategy_class
from stratbench.train.job import Job


def entry_of(job: Job) -> dict[str, Any]:
    """Return the record's `elastic`."""
    journal, origin = read_journal(job.folder.servers), job.origin_unix_s
    jobs = [job_entry(e, dates_of(journal, e["number"]), origin) for e in worker_jobs(job)]
    inside_s = sum(end - begin for begin, end in presence(journal))
    servers = read_servers(job)
    incarnations = [e for e in journal if e["event"] == "incarnation"]
    done_twice = sum(e["done_twice"] for e in incarnations)
    s = job.settings
    tickets_of_step = s.global_batch // strategy_class(s.strategy).samples_per_step(s)
    return {
        "incarnations": max(1, len(incarnations)),
        **totals_of(jobs, inside_s),
        "leaves": count(journal, "leave"),
        "losses": count(journal, "loss"),
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
            "returns": sum(w.get("returns", 0) for w in members_of(job).values()),
            "evaluations": count(journal, "score"),
            "last_epoch": next((s["elastic"]["finished_at_epoch"] for s in servers[:1]), None),
            "most_at_a_time": most_at_a_time(journal),
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


def count(journal: list[dict[str, Any]], event: str) -> int:
    """Return the number of occurrences of an event."""
    return sum(e["event"] == event for e in journal)


def dates_of(journal: list[dict[str, Any]], number: int) -> dict[str, float]:
    """Return when a worker was ready, and got its first ticket, in its first incarnation."""
    names = {"join": ("admitted", "ready"), "begin": ("first_step",)}
    dates: dict[str, float] = {}
    for event in journal:
        if event.get("worker") == number:
            for name in names.get(event["event"], ()):
                dates.setdefault(name, event["at_unix_s"])
    return dates


def presence(journal: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return when each worker took part; until the last recorded time if servers were killed."""
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


def most_at_a_time(journal: list[dict[str, Any]]) -> int:
    """Return the maximum number of workers at a time."""
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


def until_the_end(servers: list[dict[str, Any]], epochs: int) -> list[dict[str, Any]]:
    """Return the servers' statistics until the end of training, with `epochs` evaluated epochs.

    Server 0 knows when it ended. Tickets completed during the last evaluation are left out.
    """
    first = servers[0]
    ends = sorted(first["epochs"], key=lambda e: e["epoch"])
    settled = first["tickets_settled"] - first["elastic"]["after_the_end"]
    kept = {"epochs": ends[: epochs or None], "tickets_settled": settled}
    return [s | kept | {"train_time_s": first["train_time_s"]} for s in servers]


def epochs_of(job: Job) -> list[dict[str, Any]]:
    """Return the evaluated epochs, as `RunFolder.read_epochs` does, up to one that ended the run."""
    scores = scores_in(read_journal(job.folder.servers))
    server = job.folder.read_server(0)
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
