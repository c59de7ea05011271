"""The report's section on parameter servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.cell.text.words import MIB

TEMPLATE = Path(__file__).parent / "templates" / "servers.html.j2"


def make_server_sections(inputs: ReportInput) -> Iterator[Section]:
    """Yield the report's section on parameter servers, if cells of the study have servers."""
    if lines := list_server_report_rows(inputs.cells):
        yield Section("servers", render_section(TEMPLATE, servers=lines), "Servers")


def list_server_report_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of the report's table on parameter servers.

    A row is of one strategy, model and number of workers, over all repeats.
    """
    known = cells[cells["staleness"].notna()]
    lines = []
    keys = ["experiment", "strategy", "model", "gpus"]
    for key, rows in known.groupby(keys, sort=False):
        counts = [json.loads(text) for text in rows["staleness"]]
        pushes = sum(map(sum, counts))
        weighted = sum(i * count for c in counts for i, count in enumerate(c))
        # Stopped cells have no training time, and their waiting time is unknown.
        timed = rows[rows["train_time_s"] > 0]
        # A worker waits for all servers at the same time, and `server_wait_s` sums its wait over the servers.
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


READING = Reading(list_sections=make_server_sections)
