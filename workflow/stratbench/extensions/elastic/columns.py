"""The columns of cells.csv on workers that come and go."""

from __future__ import annotations

# fmt: off
#: The arguments of `analysis.records.columns.Column`.
COLUMNS = (
    ("first_step_s", "number", "s", "elastic.first_step_s"),
    ("allocated_s", "number", "s", "elastic.allocated_s"),
    ("idle_s", "number", "s", "elastic.idle_s"),
    ("worker_joins", "number", "", "elastic.joins"),
    ("pauses_s", "number", "s", "elastic.pauses.total_s"),
)
# fmt: on
