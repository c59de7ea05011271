"""Checks a result set and says what is in it, what the audit thinks of it, and what it compares with."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from stratbench.analysis.audit import SEVERITIES
from stratbench.analysis.report import STATUS_WORDS, distinct_values
from stratbench.cell.words import counted, plural, worker_noun
from stratbench.sets.reading import ResultSet

#: Exit codes of a check: all is well; it is valid, but the audit calls figures unusable; it is not valid.
FINE, UNUSABLE, INVALID = 0, 1, 2
#: What an experiment of another set must share to be compared: columns of cells.csv, and their words.
SHARED = {
    "dataset": "data set",
    "epochs": "epochs",
    "steps": "steps",
    "global_batch": "global batch",
    "precision": "precision",
    "task": "task",
}


def printable(text: str) -> str:
    """A text with foreign parts as a terminal may get it: nothing in it moves a cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def exit_code(found: ResultSet) -> int:
    """FINE, or UNUSABLE where the audit finds figures to be so."""
    return UNUSABLE if (found.findings["severity"] == "unusable").any() else FINE


def describe_set(found: ResultSet) -> Iterator[str]:
    """Where a set is from, its cells, what the audit finds, and what it can be compared with, by line."""
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
    """What the workers were, and with which PyTorch."""
    known = cells.dropna(subset=["device_name"])
    noun = plural(worker_noun(known["device_kind"])) if len(known) else "workers"
    return (
        f"{distinct_values(known, 'device_name')}, as {distinct_values(cells, 'gpus')} {noun}; "
        f"torch {distinct_values(cells, 'torch')}"
    )


def describe_audit(findings: pd.DataFrame) -> Iterator[str]:
    """The audit's tally, and a line for each rule that calls figures unusable or doubtful."""
    tally = [f"{int((findings['severity'] == s).sum())} {s}" for s in SEVERITIES]
    yield f"audit: {', '.join(tally)}"
    told = findings[findings["severity"] != "note"]
    for rule, rows in told.groupby("rule", sort=False):
        first = rows.iloc[0]
        places = f", {counted(len(rows), 'finding')}" if len(rows) > 1 else ""
        yield f"  {first['severity']}: {rule} ({first['figures']}{places})"


def kind_of_work(rows: pd.DataFrame) -> str:
    """What another set's cells must have been trained with, to be compared with these."""
    parts = [f"models {distinct_values(rows, 'model')}"]
    parts += [
        f"{words} {distinct_values(rows, column)}"
        for column, words in SHARED.items()
        if rows[column].notna().any()
    ]
    return "; ".join(parts)
