"""Defines the columns of audit.csv, and reads this file."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from stratbench.analysis.records.columns import read_table
from stratbench.cell.text.words import format_count

AUDIT_COLUMNS = (
    "rule", "severity", "affects", "experiment", "strategy", "model", "gpus", "repeat", "figures",
    "explanation",
)  # fmt: skip


#: `unusable` values allow no conclusion, a `warning` must be explained first, a `note` is information.
SEVERITIES = ("unusable", "warning", "note")


def read_audit_findings(path: Path | None) -> pd.DataFrame:
    """Return the audit's findings from audit.csv. Empty if `path` is None."""
    if path is None:
        return pd.DataFrame(columns=list(AUDIT_COLUMNS))
    text_columns = ("rule", "severity", "affects", "figures", "explanation")
    return read_table(path, text_columns=text_columns, gpus="Int64", repeat="Int64")


def format_number_of_findings(count: int, severity: str) -> str:
    """Return the number of findings of one severity as text.

    Examples: `2 unusable`, `1 warning`, `3 notes`.
    """
    return f"{count} unusable" if severity == "unusable" else format_count(count, severity)
