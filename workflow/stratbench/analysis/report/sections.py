"""Sections of the report as values for its template: paper, strategies, machines, servers, plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.paper import published
from stratbench.analysis.records.groups import bases_by_strategy
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import MIB
from stratbench.strategies import REGISTRY, strategy_class


def paper_section(folder: Path) -> dict[str, Any]:
    """The comparison with the paper, from the files of `against`: claims, and its tables beside ours."""
    compared = pd.read_csv(folder / "against_cells.csv")
    judged = pd.read_csv(folder / "against_claims.csv", dtype=str, keep_default_na=False)
    return {
        "claims": judged.to_dict("records"),
        "tables": list(published_table_sections(compared)),
        "total": len(compared),
        "with_counterpart": int(compared["ours"].notna().sum()),
    }


def published_table_sections(compared: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each published table: the number of cells with a counterpart, these cells, and explanations."""
    notes = published.explanations().set_index("about")["explanation"].to_dict()
    for (version, name), rows in compared.groupby(["version", "table"], sort=False):
        found = rows[rows["ours"].notna()]
        yield {
            "title": f"Table {name} of {version}",
            "measure": "accuracy, %"
            if rows["kind"].iloc[0] == "difference"
            else "training time, s",
            "total": len(rows),
            "rows": [published_cell_line(row) for row in found.to_dict("records")],
            "note": notes.get(f"{version} {name}", ""),
        }


def published_cell_line(row: dict[str, Any]) -> dict[str, Any]:
    """The texts of a published cell; the columns of ratios may be empty."""
    is_difference = row["kind"] == "difference"

    def shown(value: float) -> str:
        return "" if pd.isna(value) else f"{value:+.2f}" if is_difference else f"{value:.2f}"

    texts = {name: row[name] for name in ("strategy", "model", "gpus", "experiment")}
    texts["published"] = "above its limit" if pd.isna(row["published"]) else f"{row['published']:g}"
    texts["ours"] = format_number(row["ours"], 2 if is_difference else None)
    for name in ("strategy", "gpus"):
        against = row[f"against_{name}"]
        texts[f"against_{name}"] = "" if pd.isna(against) else str(against).removesuffix(".0")
        for of in ("published", "our", "ratio"):
            texts[f"{of}_to_{name}"] = shown(row[f"{of}_to_{name}"])
    return texts


def strategy_lines(cells: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Name, summary and rule of each strategy in the study; a variant has those of its strategy."""
    bases = bases_by_strategy(cells)
    for name in cells["strategy"].unique():
        of = bases.get(name, name)
        if of not in REGISTRY:  # only records say of which strategy it is a variant
            untold = "a variant, of which there is no record."
            yield {"name": name, "summary": untold, "rule": untold}
            continue
        kind = "" if of == name else f"a variant of {of}: "
        known = strategy_class(of)
        yield {"name": name, "summary": kind + known.summary, "rule": known.rule}


def machine_lines(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each combination of machine and versions that trained cells, the most frequent first."""
    columns = {
        "host": "host",
        "device": "device_name",
        "CPU": "cpu_model",
        "driver": "driver",
        "torch": "torch",
        "code": "revision",
    }
    known = cells.dropna(subset=["device_kind"])
    groups = known.groupby(list(columns.values()), dropna=False, sort=False)
    lines = [
        {name: "" if pd.isna(v) else str(v) for name, v in zip(columns, key, strict=True)}
        | {"cells": len(rows), "experiments": ", ".join(dict.fromkeys(rows["experiment"]))}
        for key, rows in groups
    ]
    return sorted(lines, key=lambda line: -line["cells"])


def server_lines(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each strategy, model and worker count with parameter servers (repeats added up)."""
    known = cells[cells["staleness"].notna()]
    lines = []
    keys = ["experiment", "strategy", "model", "gpus"]
    for key, rows in known.groupby(keys, sort=False):
        counts = [json.loads(text) for text in rows["staleness"]]
        pushes = sum(map(sum, counts))
        weighted = sum(i * count for c in counts for i, count in enumerate(c))
        # Of a cell that was stopped nobody knows for how long its servers held workers back.
        timed = rows[rows["train_time_s"] > 0]
        # A worker waits for all servers at the same time.
        worker_s = (timed["train_time_s"] * timed["gpus"] * timed["servers"]).sum()
        wait = timed["server_wait_s"].sum() / worker_s if worker_s else float("nan")
        moved = (rows["server_bytes"] / rows["train_time_s"]).median()
        lines.append(
            dict(zip(keys, key, strict=True))
            | {
                "updates": whole_number(rows["updates_applied"].median()),
                "mean": f"{weighted / pushes:.2f}" if pushes else "",
                "most": max(len(c) for c in counts) - 1,
                "waiting": "" if pd.isna(wait) else f"{wait:.1%}",
                "rate": whole_number(moved / MIB),
                "lost": f"{rows['server_lost'].sum():.0f}",
            }
        )
    return lines


def prediction_lines(path: Path) -> list[dict[str, Any]]:
    """A row for each experiment and strategy with the errors of the plan, from prediction.csv."""
    rows = pd.read_csv(path)
    lines = []
    for (experiment, strategy), held in rows.groupby(["experiment", "strategy"], sort=False):
        line = {"experiment": experiment, "strategy": strategy, "cells": len(held)}
        for what in ("peak_mib", "states_bytes", "sent_bytes"):
            same = held[f"{what}_predicted"] == held[f"{what}_measured"]
            errors = held[f"{what.rpartition('_')[0]}_error_percent"].dropna()
            line[what] = "exact" if same.all() else describe_errors(errors)
        timed = held["train_s_in_range"].dropna().astype(bool)
        line["time"] = f"{timed.sum()} of {len(timed)}" if len(timed) else ""
        lines.append(line)
    return lines


def describe_errors(percent: pd.Series) -> str:
    """The error; of several the median and the one that is farthest from 0; empty if there are none."""
    if len(percent) < 2:
        return "".join(f"{error:+.1f} %" for error in percent)
    return f"median {percent.median():+.1f} %, worst {percent[percent.abs().idxmax()]:+.1f} %"


def whole_number(value: float) -> str:
    """A whole number as text; empty if there is none."""
    return "" if pd.isna(value) else f"{value:.0f}"
