"""Columns of cells.csv that only cells with checkpoints have."""

from __future__ import annotations

# fmt: off
#: Arguments of `analysis.records.columns.Column` for each column: name, kind, unit and path in the record.
COLUMNS = (
    ("restarts", "number", "", "restarts.count"),
    ("repeated_s", "number", "s", "restarts.repeated_s"),
    ("checkpoint_blocked_s", "number", "s", "restarts.checkpoints.held_up_s"),
)
# fmt: on
