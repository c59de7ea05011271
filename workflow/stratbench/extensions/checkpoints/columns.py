"""Columns that cells with checkpoints add to cells.csv."""

from __future__ import annotations

# fmt: off
#: Columns as arguments of `analysis.records.columns.Column`: name, kind, unit and path in the record.
COLUMNS = (
    ("restarts", "number", "", "restarts.count"),
    ("repeated_s", "number", "s", "restarts.repeated_s"),
    ("checkpoint_blocked_s", "number", "s", "restarts.checkpoints.held_up_s"),
)
# fmt: on
