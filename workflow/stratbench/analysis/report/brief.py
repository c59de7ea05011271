"""Summarises a finished study in a few lines for a terminal: choices, audit and start skew."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stratbench.analysis.decision.answer_line import format_answer_line
from stratbench.cell.files import read_csv_rows
from stratbench.cell.text.words import format_count


def iter_study_summary_lines(folder: Path) -> Iterator[str]:
    """Yield lines that summarise the results in a study's folder: choices, audit and start skew.

    Reads answers.json, cells.csv and, if there is one, audit.csv. Does without pandas, which is slow to
    import.
    """
    decided = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    yield decided["lead"]
    for d in decided["answers"]:
        yield format_answer_line(d)
    if (audit := folder / "audit.csv").exists():
        counts = Counter(row["severity"] for row in read_csv_rows(audit))
        warnings = format_count(counts["warning"], "warning")
        notes = format_count(counts["note"], "note")
        unusable = counts["unusable"]
        yield f"Audit findings: {unusable} unusable, {warnings}, {notes}."
    skews_ms = [float(row["start_skew_ms"] or "nan") for row in read_csv_rows(folder / "cells.csv")]
    known_ms = sorted(skew for skew in skews_ms if skew == skew)
    if known_ms:
        median_ms, max_ms = statistics.median(known_ms), known_ms[-1]
        yield (
            f"Start skew between the workers of an epoch: median {median_ms:.1f} ms, maximum {max_ms:.1f} ms "
            f"over {format_count(len(known_ms), 'cell')}."
        )
