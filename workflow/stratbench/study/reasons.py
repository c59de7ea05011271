"""Formats the reasons why cells are not trained or have failed, one line per reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import format_count, join_with_and

#: Text for a failed job that has written no reason.
NO_EVIDENCE = "ended before it could report a reason; its log may have one"
#: Maximum number of lines of a summary; further reasons are only counted.
MAX_LINES = 12


def iter_failure_summary(
    failed: Iterable[tuple[Any, Path]], results: str, run_began_unix_s: float
) -> Iterator[str]:
    """Yield lines that summarise what failed in a run of Snakemake. Empty without failures.

    Args:
        failed: Cell or block of each failed job, and the job's log.
        results: Folder of the results.
        run_began_unix_s: Start of the run in seconds since the epoch; older reasons are those of another run.
    """
    cells: list[tuple[Cell, str]] = []
    blocks: list[str] = []
    ordered = sorted(failed, key=lambda entry: str(entry[0]))
    for trained, _ in ordered:
        reason = _read_failure_reason(trained.log_dir(results), run_began_unix_s)
        if isinstance(trained, Cell):
            cells.append((trained, reason))
        else:
            blocks.append(f"{trained}: {reason}")
    if not ordered:
        return
    counts = {"cell": len(cells), "block": len(blocks)}
    yield f"Failed: {join_with_and(format_count(n, what) for what, n in counts.items() if n)}"
    lines = [*format_skip_reasons(cells), *blocks]
    yield from (f"  {line}" for line in lines[:MAX_LINES])
    if len(lines) > MAX_LINES:
        yield f"  and {format_count(len(lines) - MAX_LINES, 'other reason')}"
    yield f"Logs: {ordered[-1][1]}" + " and its likes" * (len(ordered) > 1)


def _read_failure_reason(log_dir: Path, run_began_unix_s: float) -> str:
    """Return the reason in a failed job's log folder, if written after `run_began_unix_s`."""
    try:
        is_of_this_run = (log_dir / record.FAILURE_FILE).stat().st_mtime >= run_began_unix_s
    except OSError:
        is_of_this_run = False
    reason = record.read_failure_reason(log_dir) if is_of_this_run else None
    return (reason or NO_EVIDENCE).removeprefix("ModelError: ")


def format_skip_reasons(reasons: Iterable[tuple[Cell, str]]) -> list[str]:
    """Return a line for each reason for which cells are not trained.

    The line names all cells with this reason.
    """
    groups: dict[str, list[Cell]] = {}
    for cell, reason in reasons:
        groups.setdefault(remove_cell_from_reason(reason), []).append(cell)
    return [
        f"{_join_names(c.model for c in cells)} with {_join_names(c.strategy for c in cells)} on "
        f"{format_worker_counts({c.gpus for c in cells})} ({format_count(len(cells), 'cell')} of "
        f"{_join_names(c.experiment for c in cells)}): {reason}"
        for reason, cells in groups.items()
    ]


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def remove_cell_from_reason(reason: str) -> str:
    """Return a reason without the names of model and strategy, which its line already has."""
    return reason.partition(" cannot train it: ")[2] or reason


def format_worker_counts(counts: set[int]) -> str:
    return f"{', '.join(map(str, sorted(counts)))} worker{'s' if counts != {1} else ''}"
