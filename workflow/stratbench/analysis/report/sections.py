"""Values for the report's template on strategies, machines and parameter servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.records.groups import bases_by_strategy
from stratbench.cell.text.words import MIB
from stratbench.strategies import REGISTRY, strategy_class


def iter_strategy_rows(cells: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield name, summary and update rule of each strategy. A variant has those of its base strategy."""
    bases = bases_by_strategy(cells)
    for name in cells["strategy"].unique():
        of = bases.get(name, name)
        if of not in REGISTRY:  # only records state the base strategy of a variant
            untold = "a variant of a strategy that no record names."
            yield {"name": name, "summary": untold, "rule": untold}
            continue
        kind = "" if of == name else f"a variant of {of}: "
        known = strategy_class(of)
        yield {"name": name, "summary": kind + known.summary, "rule": known.rule}


def list_machine_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per combination of machine and software versions, most frequent first."""
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


def list_server_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per strategy with parameter servers, model and worker count, over all repeats."""
    known = cells[cells["staleness"].notna()]
    lines = []
    keys = ["experiment", "strategy", "model", "gpus"]
    for key, rows in known.groupby(keys, sort=False):
        counts = [json.loads(text) for text in rows["staleness"]]
        pushes = sum(map(sum, counts))
        weighted = sum(i * count for c in counts for i, count in enumerate(c))
        # For stopped cells the time is unknown in which servers made workers wait.
        timed = rows[rows["train_time_s"] > 0]
        # A worker waits for all servers at the same time.
        worker_s = (timed["train_time_s"] * timed["gpus"] * timed["servers"]).sum()
        wait = timed["server_wait_s"].sum() / worker_s if worker_s else float("nan")
        bytes_per_s = (rows["server_bytes"] / rows["train_time_s"]).median()
        lines.append(
            dict(zip(keys, key, strict=True))
            | {
                "updates": format_integer(rows["updates_applied"].median()),
                "mean": f"{weighted / pushes:.2f}" if pushes else "",
                "most": max(len(c) for c in counts) - 1,
                "waiting": "" if pd.isna(wait) else f"{wait:.1%}",
                "rate": format_integer(bytes_per_s / MIB),
                "lost": f"{rows['server_lost'].sum():.0f}",
            }
        )
    return lines


def format_integer(value: float) -> str:
    """Return a number as text without decimals, or an empty text for NaN."""
    return "" if pd.isna(value) else f"{value:.0f}"
