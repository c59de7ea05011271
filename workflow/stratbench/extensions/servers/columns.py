"""The columns of cells.csv on parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratbench.analysis.records.derived import list_server_entries
from stratbench.cell.record import Record


def iter_worker_entries_of_servers(record: Record) -> Iterator[dict[str, Any]]:
    """Yield each worker's entry in the statistics of each server."""
    for server in list_server_entries(record):
        yield from server.get("workers") or ()


def count_recorded_servers(record: Record) -> int | None:
    """Return the number of parameter servers that a record has, or None without servers."""
    return len(list_server_entries(record)) or None


def sum_server_bytes(record: Record) -> int | None:
    """Return the bytes that all servers received and sent, or None without servers."""
    if not list_server_entries(record):
        return None
    return sum(
        link["bytes_in"] + link["bytes_out"] for link in iter_worker_entries_of_servers(record)
    )


def sum_server_wait_s(record: Record) -> float | None:
    """Return the seconds that workers waited for servers, summed over servers and workers."""
    if not list_server_entries(record):
        return None
    return sum(link.get("wait_s") or 0.0 for link in iter_worker_entries_of_servers(record))


def count_lost_workers(record: Record) -> int | None:
    """Return the number of distinct workers that disconnected from any server before they finished."""
    if not list_server_entries(record):
        return None
    return len({str(w) for server in list_server_entries(record) for w in server.get("lost") or ()})


# fmt: off
#: Columns of cells.csv: name, kind, unit, function of the record, definition (the arguments of `Column`).
COLUMNS = (
    ("servers", "number", "", count_recorded_servers, "Number of parameter servers."),
    ("server_bytes", "number", "bytes", sum_server_bytes,
     "Bytes that all parameter servers received and sent."),
    ("server_wait_s", "number", "s", sum_server_wait_s,
     "Time that servers made workers wait for other workers, summed over servers and workers."),
    ("server_lost", "number", "", count_lost_workers,
     "Number of workers that disconnected from a server before they finished."),
)
# fmt: on
