"""The columns of cells.csv on cells that resume."""

from __future__ import annotations

# fmt: off
#: The arguments of `analysis.records.columns.Column`.
COLUMNS = (
    ("restarts", "number", "", "restarts.count"),
    ("repeated_s", "number", "s", "restarts.repeated_s"),
    ("checkpoint_blocked_s", "number", "s", "restarts.checkpoints.held_up_s"),
)
# fmt: on
