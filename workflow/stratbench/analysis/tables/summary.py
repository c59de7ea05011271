"""Summarises a study in a long table with a value, a spread and a text per group and metric.

Tables, figures and the report all take their numbers from this table, so that they agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import Row, read_table
from stratbench.analysis.records.groups import GROUP, Group, Repeats, iter_findings_by_group
from stratbench.analysis.records.measures import (
    ALONE,
    Measure,
    format_number,
    format_status,
    list_measures_by_experiment,
)
from stratbench.statistics.intervals import (
    IntervalEstimate,
    compute_mean_ratio,
    compute_median_and_spread,
    compute_paired_ratios,
)

SUMMARY_COLUMNS = (
    *GROUP, "measure", "unit", "cells", "ok", "outcome", "value", "low", "high", "spread", "text",
    "flags",
)  # fmt: skip


def describe_outcome(frame: pd.DataFrame) -> str:
    """Return the outcomes of cells that are not `ok`: `2 × OOM, >3000 s`. Empty if all are `ok`."""
    labels = (
        format_status(status, limit if limit == limit else None, reason)
        for status, limit, reason in zip(
            frame["status"], frame["time_limit_s"], frame["reason"], strict=True
        )
        if status != "ok"
    )
    counts = Counter(labels)
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in counts.items())


def format_outcome_kinds(outcome_text: str) -> str:
    """Return outcomes without counts, for cells without values: `3 × OOM` gives `OOM`."""
    kinds = [part.split(" × ")[-1] for part in outcome_text.split(", ")]
    return ", ".join(dict.fromkeys(kinds))


def build_absolute_row(groups: Repeats, group: Group, measure: Measure) -> Row:
    """Return a metric's median and spread, or a `text` on why there is none.

    Args:
        groups: All repeats.
        group: The group.
        measure: The metric.
    """
    values = list(groups.values(group, measure.column).values())
    if not values:
        return {
            "text": describe_outcomes_without_value(groups, group)
            or f"n/a ({describe_unknown(groups, group, measure)})"
        }
    scale = measure.display_factor / (group.gpus if measure.is_per_worker else 1)
    median, low, high, spread = compute_median_and_spread([value * scale for value in values])
    row = {"value": median} | count_missing_repeats(groups, group, measure, len(values))
    return row | ({"low": low, "high": high, "spread": spread} if len(values) > 1 else {})


def describe_unknown(groups: Repeats, group: Group, measure: Measure) -> str:
    """Return why cells with status `ok` have no value of a metric.

    Args:
        groups: All repeats.
        group: The group.
        measure: The metric.
    """
    rows = groups.all[group]
    if measure.name == "time_to_target" and rows["target_score"].notna().any():
        return "target not reached"
    steps = rows["steps"].dropna()
    if measure.audit_kind == "score" and len(steps):
        return f"not evaluated: {steps.iloc[0]:.0f} steps"
    return "not recorded"


def count_missing_repeats(
    groups: Repeats, group: Group, measure: Measure, known: int, reason: str = ""
) -> Row:
    """Return the number of repeats with a value, and the outcomes of the other repeats.

    Empty if all `ok` repeats have a value.

    Args:
        groups: All repeats.
        group: The group.
        measure: The metric.
        known: Number of repeats with a value.
        reason: Reason for the others.
    """
    ok = len(groups.ok[group])
    if known == ok:
        return {}
    reason = reason or describe_unknown(groups, group, measure)
    others = [
        describe_outcome(groups.all[group]),
        f"{ok - known} × {reason}" if ok - known > 1 else reason,
    ]
    return {"ok": known, "outcome": ", ".join(filter(None, others))}


def describe_outcomes_without_value(groups: Repeats, group: Group) -> str:
    """Return the outcomes of a group's cells without a value. Empty if all cells are `ok`."""
    return format_outcome_kinds(describe_outcome(groups.all[group]))


def find_baseline(groups: Repeats, group: Group, measure: Measure) -> Group | str:
    """Return the baseline group of a ratio, or a text on why there is none.

    Args:
        groups: All repeats.
        group: The group.
        measure: The metric.
    """
    match measure.baseline:
        case "self":
            against, where, count = group.strategy, "1 worker", 1
        case str() as against:
            where, count = against, 1 if against == ALONE else group.gpus
    baseline = group.with_strategy(against).with_gpus(count)
    if baseline not in groups.all:
        return f"n/a (no {where})"
    if not groups.values(baseline, measure.column):
        return (
            f"n/a ({where}: {describe_outcomes_without_value(groups, baseline) or 'not recorded'})"
        )
    return baseline


def build_ratio_row(groups: Repeats, group: Group, measure: Measure) -> Row:
    """Return the summary row of a ratio, with the `pair` to divide, or a `text`.

    The text is the reason for which there is no ratio.

    Args:
        groups: All repeats.
        group: The group.
        measure: The metric.
    """
    if not groups.values(group, measure.column):
        return {"text": describe_outcomes_without_value(groups, group) or "n/a (not recorded)"}
    baseline = find_baseline(groups, group, measure)
    if isinstance(baseline, str):
        return {"text": baseline}
    pair = groups.read_common_values((group, baseline), measure.column)
    if not pair.size:
        return {"text": "n/a (no repeat in common with the baseline)"}
    if measure.is_per_worker:
        pair[0] /= group.gpus
    if measure.is_inverted:
        pair = pair[::-1]
    paired = count_missing_repeats(groups, group, measure, pair.shape[1], "without a baseline")
    if baseline == group:  # the ratio to itself is exactly 1 and has no interval
        return {"value": compute_mean_ratio(*pair)} | paired
    return {"pair": pair, "served": groups.has_servers((group, baseline))} | paired


def fill_ratios(rows: list[Row]) -> None:
    """Replace the `pair` in each row by its ratio with a 95 % interval. Variances are pooled per metric."""
    by_measure: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "pair" in row:
            by_measure[row["measure"]].append(row)
    for same in by_measure.values():
        served = [row.pop("served") for row in same]
        ratios = compute_paired_ratios([row.pop("pair") for row in same], served)
        for row, ratio in zip(same, ratios, strict=True):
            row["value"] = ratio.value
            if ratio.low is not None:
                row |= {"low": ratio.low, "high": ratio.high, "spread": "interval"}


def format_cell(row: Row, measure: Measure) -> str:
    """Return the text of a table cell: value, spread, and outcomes that are not `ok`."""
    if "text" in row:
        return row["text"]
    estimate = IntervalEstimate(row["value"], row.get("low"), row.get("high"))
    text = estimate.format_text(lambda value: format_number(value, measure.decimals))
    if row["ok"] < row["cells"]:
        text += f" ({row['ok']} of {row['cells']}; {row['outcome']})"
    return text


def group_findings(
    findings: Iterable[Row], groups: Iterable[Group]
) -> dict[tuple[Any, ...], dict[str, str]]:
    """Return the audit's severities by rule, per group and kind of value (time, memory, score)."""
    doubts: defaultdict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    shown = [finding for finding in findings if finding["severity"] != "note"]
    for key, on_group in iter_findings_by_group(shown, groups):
        for finding in on_group:
            affects = finding["affects"]
            for what in ("time", "memory", "score") if affects == "all" else (affects,):
                doubts[what, *key].setdefault(finding["rule"], finding["severity"])
    return doubts


def build_summary_table(cells: pd.DataFrame, findings: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the long table (SUMMARY_COLUMNS) for the rows of cells.csv, in the rows' order.

    The column `flags` has severity and name of the audit's rules that concern the value, except notes.
    """
    groups = Repeats(cells)
    measures = list_measures_by_experiment(cells)
    rows: list[Row] = []
    for group, repeats in groups.all.items():
        common = group._asdict() | {
            "cells": len(repeats),
            "ok": int((repeats["status"] == "ok").sum()),
            "outcome": describe_outcome(repeats),
        }
        for measure in measures[group.experiment].values():
            row_of = build_ratio_row if measure.baseline else build_absolute_row
            made = row_of(groups, group, measure)
            rows.append(common | {"measure": measure.name, "unit": measure.unit} | made)
    fill_ratios(rows)
    doubts = group_findings([] if findings is None else findings.to_dict("records"), groups.all)
    for row in rows:
        measure = measures[row["experiment"]][row["measure"]]
        row["text"] = format_cell(row, measure)
        flagged = doubts.get((measure.audit_kind, *(row[name] for name in GROUP)), {})
        flags = [f"{severity}: {rule}" for rule, severity in flagged.items()]
        # A cell without a value needs no mark of the audit.
        row["flags"] = "" if row["text"].startswith("n/a") else "; ".join(flags)
    return pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS))


def read_summary(path: Path) -> pd.DataFrame:
    """Return the rows of summary.csv."""
    frame = read_table(path, text=("measure", "unit", "outcome", "spread", "text", "flags"))
    return frame.fillna({"unit": "", "outcome": "", "flags": ""})
