"""Describes a result set: its origin, cells, audit findings and trained work."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from stratbench.analysis.records.findings import SEVERITIES, format_number_of_findings
from stratbench.analysis.report.report import STATUS_WORDS, format_distinct_values
from stratbench.cell.text.words import choose_noun_for_workers, format_count, pluralize
from stratbench.extensions.sets.reading import ResultSet

#: Exit codes of `stratbench check SET`. FINE: the set is valid. UNUSABLE: it is valid, but the audit calls
#: some values unusable. INVALID: it is not valid.
FINE, UNUSABLE, INVALID = 0, 1, 2
#: Columns of cells.csv whose values must be equal in comparable cells, with their names in texts.
COMPARABLE_WORK_COLUMNS = {
    "dataset": "data set",
    "epochs": "epochs",
    "steps": "steps",
    "global_batch": "global batch",
    "precision": "precision",
    "task": "task",
}


def choose_check_exit_code(result_set: ResultSet) -> int:
    """Return UNUSABLE if the audit calls a value of the set unusable, else FINE."""
    return UNUSABLE if (result_set.findings["severity"] == "unusable").any() else FINE


def describe_result_set(result_set: ResultSet) -> Iterator[str]:
    """Yield the lines that `stratbench check SET` prints: origin, cells, audit findings and trained work."""
    for key, text in result_set.provenance.items():
        yield f"{key}: {text}"
    counts = result_set.cells["status"].value_counts()
    texts = [f"{counts[s]} {words}" for s, words in STATUS_WORDS.items() if s in counts]
    yield f"cells: {len(result_set.cells)}, of which {', '.join(texts)}"
    yield f"workers: {describe_workers_of_cells(result_set.cells)}"
    yield from describe_audit_findings(result_set.findings)
    for experiment, rows in result_set.cells.groupby("experiment", sort=False):
        work = describe_trained_work(rows)
        yield f"experiment {experiment} is comparable with cells that train the same: {work}"


def describe_workers_of_cells(cells: pd.DataFrame) -> str:
    """Return a text on the workers of cells: devices, numbers and version of PyTorch."""
    known = cells.dropna(subset=["device_name"])
    counts = sorted(map(int, cells["gpus"].unique()))
    noun = choose_noun_for_workers(known["device_kind"])
    return (
        f"{format_distinct_values(known, 'device_name')}; cells on "
        f"{' or '.join(map(str, counts))} {pluralize(noun) if counts[-1] > 1 else noun}; "
        f"torch {format_distinct_values(cells, 'torch')}"
    )


def describe_audit_findings(findings: pd.DataFrame) -> Iterator[str]:
    """Yield a line with the number of audit findings per severity. Then yield a line per rule.

    Rules that only have notes are left out.
    """
    tally = [
        format_number_of_findings(int((findings["severity"] == s).sum()), s) for s in SEVERITIES
    ]
    yield f"audit: {', '.join(tally)}"
    shown = findings[findings["severity"] != "note"]
    for rule, rows in shown.groupby("rule", sort=False):
        first = rows.iloc[0]
        places = f", {format_count(len(rows), 'finding')}" if len(rows) > 1 else ""
        yield f"  {first['severity']}: {rule} ({first['figures']}{places})"


def describe_trained_work(rows: pd.DataFrame) -> str:
    """Return a text on what cells train, such as model, data set and batch size.

    Cells that are comparable with them have the same values.
    """
    parts = [f"models {format_distinct_values(rows, 'model')}"]
    parts += [
        f"{words} {format_distinct_values(rows, column)}"
        for column, words in COMPARABLE_WORK_COLUMNS.items()
        if rows[column].notna().any()
    ]
    return "; ".join(parts)
