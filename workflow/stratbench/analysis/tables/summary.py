"""Summarises a study in one long table: a value, a spread and a text for each group and measure.

Tables, figures and the report all take their numbers from here, so that they cannot disagree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.records.columns import Row, read_table
from stratbench.analysis.records.groups import GROUP, Group, findings_by_group, rows_by_group
from stratbench.analysis.records.measures import (
    ALONE,
    MEASURES,
    Measure,
    format_number,
    measures_of,
    status_label,
)
from stratbench.statistics.intervals import mean_ratio, median_and_spread, ratio_intervals

SUMMARY_COLUMNS = (
    *GROUP,
    "measure",
    "unit",
    "cells",
    "ok",
    "outcome",
    "value",
    "low",
    "high",
    "spread",
    "text",
    "flags",
)


def describe_outcome(frame: pd.DataFrame) -> str:
    """The outcomes of cells that are not `ok`: `2 × OOM, >3000 s`; empty if all are `ok`."""
    labels = (
        status_label(status, limit if limit == limit else None, reason)
        for status, limit, reason in zip(
            frame["status"], frame["time_limit_s"], frame["reason"], strict=True
        )
        if status != "ok"
    )
    counts = Counter(labels)
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in counts.items())


def outcome_kinds(outcome_text: str) -> str:
    """The outcome without counts, for a cell with nothing else to print: `3 × OOM` becomes `OOM`."""
    kinds = [part.split(" × ")[-1] for part in outcome_text.split(", ")]
    return ", ".join(dict.fromkeys(kinds))


class MeasuredGroups:
    """Groups of repeats with their measured values, looked up once for all measures of a column."""

    def __init__(self, cells: pd.DataFrame) -> None:
        columns = list(dict.fromkeys(measure.column for measure in MEASURES.values()))
        numbers = {name: pd.to_numeric(cells[name], errors="coerce") for name in columns}
        self.rows = rows_by_group(cells.assign(**numbers))
        #: The measures by name, for each experiment, since each names its own score.
        self.measures = {
            str(name): measures_of(rows) for name, rows in cells.groupby("experiment", sort=False)
        }
        #: Values of cells that are `ok`, by repeat, in the column's unit, without absent ones.
        self._values: dict[tuple[Group, str], dict[int, float]] = {}
        for group, rows in self.rows.items():
            ok = rows[rows["status"] == "ok"]
            repeats = ok["repeat"].tolist()
            for name in columns:
                pairs = zip(repeats, ok[name].to_numpy(dtype=float).tolist(), strict=True)
                self._values[group, name] = {r: value for r, value in pairs if value == value}

    def values_of(self, group: Group, measure: Measure) -> dict[int, float]:
        """The values of a measure by repeat, in the unit in which it is shown."""
        found = self._values[group, measure.column]
        return {repeat: value * measure.scale for repeat, value in found.items()}

    def why_none(self, group: Group) -> str:
        """The outcomes of a group without a value; empty if its cells ended well."""
        return outcome_kinds(describe_outcome(self.rows[group]))


def absolute_row(groups: MeasuredGroups, group: Group, measure: Measure) -> Row:
    """The median of a measure and the ends of its spread; if there are none, `text` says why."""
    found = list(groups.values_of(group, measure).values())
    if not found:
        steps = groups.rows[group]["steps"].dropna()
        unscored = measure.concerns == "score" and len(steps)
        why = (
            f"n/a (not evaluated: {steps.iloc[0]:.0f} steps)" if unscored else "n/a (not recorded)"
        )
        return {"text": groups.why_none(group) or why}
    median, low, high, spread = median_and_spread(found)
    return {"value": median} | (
        {"low": low, "high": high, "spread": spread} if len(found) > 1 else {}
    )


def baseline_of(groups: MeasuredGroups, group: Group, measure: Measure) -> Group | str:
    """The baseline group of a ratio, or a text that says why there is none."""
    match measure.baseline:
        case "self":
            against, where, count = group.strategy, "1 worker", 1
        case str() as against:
            where, count = against, 1 if against == ALONE else group.gpus
    baseline = group.with_strategy(against).with_gpus(count)
    if baseline not in groups.rows:
        return f"n/a (no {where})"
    if not groups.values_of(baseline, measure):
        return f"n/a ({where}: {groups.why_none(baseline) or 'not recorded'})"
    return baseline


def ratio_row(groups: MeasuredGroups, group: Group, measure: Measure) -> Row:
    """A ratio to the baseline; `pairs`, shape [2, repeats], has the data for its interval."""
    found = groups.values_of(group, measure)
    if not found:
        return {"text": groups.why_none(group) or "n/a (not recorded)"}
    baseline = baseline_of(groups, group, measure)
    if isinstance(baseline, str):
        return {"text": baseline}
    others = groups.values_of(baseline, measure)
    common = [repeat for repeat in found if repeat in others]
    if not common:
        return {"text": "n/a (no repeat in common with the baseline)"}
    numerators = np.array([found[r] for r in common]) / (group.gpus if measure.per_worker else 1)
    denominators = np.array([others[r] for r in common])
    if measure.inverted:
        numerators, denominators = denominators, numerators
    row: Row = {"value": mean_ratio(numerators, denominators)}
    if baseline != group:
        row["pairs"] = np.stack([numerators, denominators])
        kinds = (groups.rows[g]["strategy_kind"] for g in (group, baseline))
        row["served"] = any((kind == "server").any() for kind in kinds)
    return row


def fill_intervals(rows: list[Row]) -> None:
    """Replace `pairs` by the ends of 95 % intervals, with variances moderated over a measure's ratios."""
    by_measure: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "pairs" in row:
            by_measure[row["measure"]].append(row)
    for same in by_measure.values():
        most = max(row["pairs"].shape[1] for row in same)
        pairs = np.full((len(same), 2, most), np.nan)
        for i, row in enumerate(same):
            found = row.pop("pairs")
            pairs[i, :, : found.shape[1]] = found
        served = np.array([row.pop("served") for row in same])
        intervals = ratio_intervals(pairs[:, 0], pairs[:, 1], served)
        for row, (low, high) in zip(same, intervals if intervals is not None else (), strict=False):
            if np.isfinite(high):
                row |= {"low": float(low), "high": float(high), "spread": "interval"}


def cell_text(row: Row, measure: Measure) -> str:
    """The text of a table's cell: the value, its spread, and the outcomes that are not `ok`."""
    if "text" in row:
        return row["text"]
    parts = [format_number(row["value"], measure.decimals)]
    if "low" in row:
        low, high = (format_number(row[end], measure.decimals) for end in ("low", "high"))
        parts.append(f"[{low}, {high}]")
    if row["ok"] < row["cells"]:
        parts.append(f"({row['ok']} of {row['cells']}; {row['outcome']})")
    return " ".join(parts)


def doubts_by_group(
    findings: list[Row], groups: dict[Group, pd.DataFrame]
) -> dict[tuple[Any, ...], list[str]]:
    """The rules that doubt a group's time, memory or score: (what, *group) to rules."""
    doubts: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    told = [finding for finding in findings if finding["severity"] != "note"]
    for key, found in findings_by_group(told, groups):
        for finding in found:
            affects = finding["affects"]
            for what in ("time", "memory", "score") if affects == "all" else (affects,):
                if finding["rule"] not in doubts[what, *key]:
                    doubts[what, *key].append(finding["rule"])
    return doubts


def summarise(cells: pd.DataFrame, findings: pd.DataFrame | None = None) -> pd.DataFrame:
    """The long table (SUMMARY_COLUMNS) from the rows of cells.csv, in their order.

    `flags` names the audit's rules (rows of audit.csv, except notes) that doubt the figure.
    """
    groups = MeasuredGroups(cells)
    rows: list[Row] = []
    for group, repeats in groups.rows.items():
        common = group._asdict() | {
            "cells": len(repeats),
            "ok": int((repeats["status"] == "ok").sum()),
            "outcome": describe_outcome(repeats),
        }
        for measure in groups.measures[group.experiment].values():
            row_of = ratio_row if measure.baseline else absolute_row
            found = row_of(groups, group, measure)
            rows.append(common | {"measure": measure.name, "unit": measure.unit} | found)
    fill_intervals(rows)
    doubts = doubts_by_group([] if findings is None else findings.to_dict("records"), groups.rows)
    for row in rows:
        measure = groups.measures[row["experiment"]][row["measure"]]
        row["text"] = cell_text(row, measure)
        flags = doubts.get((measure.concerns, *(row[name] for name in GROUP)), ())
        # A cell without the figure has nothing to doubt.
        row["flags"] = "" if row["text"].startswith("n/a") else "; ".join(flags)
    return pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS))


def read_summary(path: Path) -> pd.DataFrame:
    """Reads summary.csv, as `tables` wrote it."""
    frame = read_table(path, text=("measure", "unit", "outcome", "spread", "text", "flags"))
    return frame.fillna({"unit": "", "outcome": "", "flags": ""})
