"""Checks a result set, and says what it holds, what the audit finds, and what it compares with."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from stratbench.analysis.records.findings import SEVERITIES, format_tally
from stratbench.analysis.report.report import STATUS_WORDS, distinct_values
from stratbench.cell.text.words import counted, plural, worker_noun
from stratbench.extensions.sets.reading import ResultSet

#: Exit codes of a check: all is well; valid, but the audit calls figures unusable; not valid.
FINE, UNUSABLE, INVALID = 0, 1, 2
#: Columns of cells.csv that two sets must share to be compared, with their words.
SHARED = {
    "dataset": "data set",
    "epochs": "epochs",
    "steps": "steps",
    "global_batch": "global batch",
    "precision": "precision",
    "task": "task",
}


def exit_code(found: ResultSet) -> int:
    """FINE, or UNUSABLE if the audit calls figures unusable."""
    return UNUSABLE if (found.findings["severity"] == "unusable").any() else FINE


def describe_set(found: ResultSet) -> Iterator[str]:
    """Yield lines that describe a set: its origin, its cells, the audit's findings, what compares with it."""
    for key, text in found.provenance.items():
        yield f"{key}: {text}"
    counts = found.cells["status"].value_counts()
    told = [f"{counts[s]} {words}" for s, words in STATUS_WORDS.items() if s in counts]
    yield f"cells: {len(found.cells)}, of which {', '.join(told)}"
    yield f"workers: {machines(found.cells)}"
    yield from describe_audit(found.findings)
    for experiment, rows in found.cells.groupby("experiment", sort=False):
        yield f"compares with cells of {experiment}'s kind: {kind_of_work(rows)}"


def machines(cells: pd.DataFrame) -> str:
    """Return a text on the workers' devices, and on the version of PyTorch."""
    known = cells.dropna(subset=["device_name"])
    counts = sorted(map(int, cells["gpus"].unique()))
    noun = worker_noun(known["device_kind"])
    return (
        f"{distinct_values(known, 'device_name')}; cells on "
        f"{' or '.join(map(str, counts))} {plural(noun) if counts[-1] > 1 else noun}; "
        f"torch {distinct_values(cells, 'torch')}"
    )


def describe_audit(findings: pd.DataFrame) -> Iterator[str]:
    """Yield lines with the audit's tally, and with each rule that calls figures unusable or a warning."""
    tally = [format_tally(int((findings["severity"] == s).sum()), s) for s in SEVERITIES]
    yield f"audit: {', '.join(tally)}"
    told = findings[findings["severity"] != "note"]
    for rule, rows in told.groupby("rule", sort=False):
        first = rows.iloc[0]
        places = f", {counted(len(rows), 'finding')}" if len(rows) > 1 else ""
        yield f"  {first['severity']}: {rule} ({first['figures']}{places})"


def kind_of_work(rows: pd.DataFrame) -> str:
    """Return the settings that cells of another set must have to be compared with these."""
    parts = [f"models {distinct_values(rows, 'model')}"]
    parts += [
        f"{words} {distinct_values(rows, column)}"
        for column, words in SHARED.items()
        if rows[column].notna().any()
    ]
    return "; ".join(parts)
