"""Columns that elastic cells add to cells.csv."""

from __future__ import annotations

# fmt: off
#: Columns as arguments of `analysis.records.columns.Column`: name, kind, unit and path in the record.
COLUMNS = (
    ("first_step_s", "number", "s", "elastic.first_step_s"),
    ("allocated_s", "number", "s", "elastic.allocated_s"),
    ("idle_s", "number", "s", "elastic.idle_s"),
    ("worker_joins", "number", "", "elastic.joins"),
    ("pauses_s", "number", "s", "elastic.pauses.total_s"),
)
# fmt: on
