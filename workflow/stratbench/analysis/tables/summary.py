"""Summarises a study in a long table with a row per group of repeats and metric: value and spread.

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
    format_status_as_value,
    map_measures_by_experiment,
)
from stratbench.statistics.intervals import (
    IntervalEstimate,
    compute_geometric_mean_ratio,
    compute_median_and_spread,
    compute_paired_ratios,
)

SUMMARY_COLUMNS = (
    *GROUP, "measure", "unit", "cells", "ok", "outcome", "value", "low", "high", "spread", "text",
    "flags",
)  # fmt: skip


def describe_outcomes_of_cells(cells: pd.DataFrame) -> str:
    """Return the outcomes of the cells that are not `ok`: `2 × OOM, >3000 s`. Empty if all are `ok`."""
    labels = (
        format_status_as_value(status, limit if limit == limit else None, reason)
        for status, limit, reason in zip(
            cells["status"], cells["time_limit_s"], cells["reason"], strict=True
        )
        if status != "ok"
    )
    counts = Counter(labels)
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in counts.items())


def remove_outcome_counts(outcome_text: str) -> str:
    """Return the text of outcomes without their counts: `OOM` for `3 × OOM`."""
    kinds = [part.split(" × ")[-1] for part in outcome_text.split(", ")]
    return ", ".join(dict.fromkeys(kinds))


def build_median_row(all_repeats: Repeats, group: Group, measure: Measure) -> Row:
    """Return a group's summary row: the metric's median and spread, or why there is none.

    Args:
        all_repeats: All repeats.
        group: The group.
        measure: The metric.
    """
    values = list(all_repeats.values(group, measure.column).values())
    if not values:
        return {
            "text": describe_outcomes_without_value(all_repeats, group)
            or f"n/a ({describe_missing_value(all_repeats, group, measure)})"
        }
    scale = measure.display_factor / (group.gpus if measure.is_per_worker else 1)
    median, low, high, spread = compute_median_and_spread([value * scale for value in values])
    row = {"value": median} | build_fields_on_missing_repeats(
        all_repeats, group, measure, len(values)
    )
    return row | ({"low": low, "high": high, "spread": spread} if len(values) > 1 else {})


def describe_missing_value(all_repeats: Repeats, group: Group, measure: Measure) -> str:
    """Return a few words on why `ok` cells have no value of a metric.

    Args:
        all_repeats: All repeats.
        group: The group.
        measure: The metric.
    """
    rows = all_repeats.all[group]
    if measure.name == "time_to_target" and rows["target_score"].notna().any():
        return "target not reached"
    steps = rows["steps"].dropna()
    if measure.audit_kind == "score" and len(steps):
        return f"not evaluated: {steps.iloc[0]:.0f} steps"
    return "not recorded"


def build_fields_on_missing_repeats(
    all_repeats: Repeats, group: Group, measure: Measure, num_known: int, reason: str = ""
) -> Row:
    """Return a summary row's fields `ok` and `outcome`. Empty if no repeat lacks a value.

    `ok` is the number of repeats with a value, and `outcome` says why the others have none.

    Args:
        all_repeats: All repeats.
        group: The group.
        measure: The metric.
        num_known: Number of repeats with a value.
        reason: Reason for the others.
    """
    ok = len(all_repeats.ok[group])
    if num_known == ok:
        return {}
    reason = reason or describe_missing_value(all_repeats, group, measure)
    others = [
        describe_outcomes_of_cells(all_repeats.all[group]),
        f"{ok - num_known} × {reason}" if ok - num_known > 1 else reason,
    ]
    return {"ok": num_known, "outcome": ", ".join(filter(None, others))}


def describe_outcomes_without_value(all_repeats: Repeats, group: Group) -> str:
    """Return how those cells of a group ended that are not `ok`. Empty if all cells are `ok`."""
    return remove_outcome_counts(describe_outcomes_of_cells(all_repeats.all[group]))


def find_baseline_or_missing_reason(
    all_repeats: Repeats, group: Group, measure: Measure
) -> Group | str:
    """Return the group whose value is a ratio's denominator. Without one, return a text with the reason.

    Args:
        all_repeats: All repeats.
        group: The group.
        measure: The metric.
    """
    match measure.baseline:
        case "self":
            against, where, count = group.strategy, "1 worker", 1
        case str() as against:
            where, count = against, 1 if against == ALONE else group.gpus
    baseline = group.copy_with_strategy(against).copy_with_gpu_count(count)
    if baseline not in all_repeats.all:
        return f"n/a (no {where})"
    if not all_repeats.values(baseline, measure.column):
        return f"n/a ({where}: {describe_outcomes_without_value(all_repeats, baseline) or 'not recorded'})"
    return baseline


def build_ratio_row(all_repeats: Repeats, group: Group, measure: Measure) -> Row:
    """Return the summary row of a ratio before the division, or why there is none.

    `pair` has the values to divide, and `text` a reason.

    Args:
        all_repeats: All repeats.
        group: The group.
        measure: The metric.
    """
    if not all_repeats.values(group, measure.column):
        return {"text": describe_outcomes_without_value(all_repeats, group) or "n/a (not recorded)"}
    baseline = find_baseline_or_missing_reason(all_repeats, group, measure)
    if isinstance(baseline, str):
        return {"text": baseline}
    pair = all_repeats.read_values_of_common_repeats((group, baseline), measure.column)
    if not pair.size:
        return {"text": "n/a (no repeat in common with the baseline)"}
    if measure.is_per_worker:
        pair[0] /= group.gpus
    if measure.is_inverted:
        pair = pair[::-1]
    paired = build_fields_on_missing_repeats(
        all_repeats, group, measure, pair.shape[1], "without a baseline"
    )
    if baseline == group:  # a group's ratio to itself is exactly 1 and needs no interval
        return {"value": compute_geometric_mean_ratio(*pair)} | paired
    return {"pair": pair, "served": all_repeats.has_parameter_servers((group, baseline))} | paired


def replace_pairs_by_ratios(rows: list[Row]) -> None:
    """Replace the `pair` of values in each row by a ratio. It has a 95 % interval."""
    # All pairs of a metric are passed together, since their variances are pooled.
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


def format_table_cell(row: Row, measure: Measure) -> str:
    """Return the text of a table cell with a value and its spread.

    It also has the outcomes of cells that are not `ok`.
    """
    if "text" in row:
        return row["text"]
    estimate = IntervalEstimate(row["value"], row.get("low"), row.get("high"))
    text = estimate.format_value_and_interval(lambda value: format_number(value, measure.decimals))
    if row["ok"] < row["cells"]:
        text += f" ({row['ok']} of {row['cells']}; {row['outcome']})"
    return text


def find_rule_severities_of_each_group(
    findings: Iterable[Row], groups: Iterable[Group]
) -> dict[tuple[Any, ...], dict[str, str]]:
    """Return severities by audit rule, for each kind of value (time, memory, score) and group."""
    doubts: defaultdict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    shown = [finding for finding in findings if finding["severity"] != "note"]
    for key, on_group in iter_findings_by_group(shown, groups):
        for finding in on_group:
            affects = finding["affects"]
            for what in ("time", "memory", "score") if affects == "all" else (affects,):
                doubts[what, *key].setdefault(finding["rule"], finding["severity"])
    return doubts


def build_summary_table(cells: pd.DataFrame, findings: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows of summary.csv for rows of cells.csv, in the same order.

    The column `flags` has severity and name of each audit rule that doubts the value, except notes.
    """
    groups = Repeats(cells)
    measures = map_measures_by_experiment(cells)
    rows: list[Row] = []
    for group, repeats in groups.all.items():
        common = group._asdict() | {
            "cells": len(repeats),
            "ok": int((repeats["status"] == "ok").sum()),
            "outcome": describe_outcomes_of_cells(repeats),
        }
        for measure in measures[group.experiment].values():
            row_of = build_ratio_row if measure.baseline else build_median_row
            made = row_of(groups, group, measure)
            rows.append(common | {"measure": measure.name, "unit": measure.unit} | made)
    replace_pairs_by_ratios(rows)
    doubts = find_rule_severities_of_each_group(
        [] if findings is None else findings.to_dict("records"), groups.all
    )
    for row in rows:
        measure = measures[row["experiment"]][row["measure"]]
        row["text"] = format_table_cell(row, measure)
        flagged = doubts.get((measure.audit_kind, *(row[name] for name in GROUP)), {})
        flags = [f"{severity}: {rule}" for rule, severity in flagged.items()]
        # If there is no value, a finding of the audit cannot concern it.
        row["flags"] = "" if row["text"].startswith("n/a") else "; ".join(flags)
    return pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS))


def read_summary(path: Path) -> pd.DataFrame:
    """Return the rows of summary.csv."""
    text_columns = ("measure", "unit", "outcome", "spread", "text", "flags")
    frame = read_table(path, text_columns=text_columns)
    return frame.fillna({"unit": "", "outcome": "", "flags": ""})
