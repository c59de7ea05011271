"""Columns that the extension `elastic` adds to the table cells.csv."""

from __future__ import annotations

from stratbench.analysis.records import derived
from stratbench.cell.record import Record


def compute_time_to_result_s(record: Record) -> float | None:
    """Return the seconds from the submission of a cell's SLURM job to its end.

    None for a cell without SLURM, unless the cell is elastic. The total time of an elastic cell includes the
    queue waits of its workers, with and without SLURM.
    """
    total_s = derived.get_field_by_path(record, "time.total_s")
    if (
        derived.get_field_by_path(record, "elastic") is None
        or total_s is None
        or derived.get_field_by_path(record, "time.queue_wait_s") is not None
    ):
        return derived.compute_time_to_result_s(record)
    return total_s + (derived.get_field_by_path(record, "restarts.between_s") or 0.0)


# fmt: off
#: Arguments of `analysis.records.columns.Column` for each column, such as its name and its path in records.
COLUMNS = (
    ("time_to_result_s", "number", "s", compute_time_to_result_s,
     "Time from the submission of the cell's job to its end, including the wait in the queue, for cells in "
     "SLURM. For elastic cells it also includes the queue waits of their workers."),
    ("first_step_s", "number", "s", "elastic.first_step_s"),
    ("allocated_s", "number", "s", "elastic.allocated_s"),
    ("idle_s", "number", "s", "elastic.idle_s"),
    ("worker_joins", "number", "", "elastic.joins"),
    ("pauses_s", "number", "s", "elastic.pauses.total_s"),
)
# fmt: on
