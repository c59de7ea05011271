"""Facts about a cell's parameter servers: their number, their nodes, and their statistics."""

from __future__ import annotations

from typing import Any

from stratbench.cell.settings import Settings
from stratbench.strategies import get_strategy_class
from stratbench.train.job import Job


def has_servers(s: Settings) -> bool:
    """Return whether a cell with these settings has parameter servers."""
    return get_strategy_class(s.strategy).kind == "server"


def count_servers(s: Settings) -> int:
    """Return the number of parameter servers of a cell; 0 if its strategy has none."""
    return s.options["servers"] if has_servers(s) else 0


def read_finished_server_statistics(job: Job) -> list[dict[str, Any]]:
    """Return the statistics of a cell's parameter servers that ended by themselves, in order.

    A server that was killed has no statistics.
    """
    return job.folder.read_all_server_statistics(count_servers(job.settings))
