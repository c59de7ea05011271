"""Renders the report's section that compares the plan with finished cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section

TEMPLATE = Path(__file__).parent / "templates" / "prediction.html.j2"


def make_prediction_sections(inputs: ReportInput) -> Iterator[Section]:
    """Yield the report's section on the plan's errors, if a planned cell has a record."""
    path = inputs.folder / "prediction.csv"
    if path.exists() and (lines := read_prediction_errors(path)):
        on_cpu = (inputs.cells["device_kind"] == "cpu").any()
        html = render_section(TEMPLATE, predictions=lines, on_cpu=on_cpu)
        yield Section("predictions", html)


def read_prediction_errors(path: Path) -> list[dict[str, Any]]:
    """Read the plan's errors from prediction.csv, in a row per experiment and strategy."""
    rows = pd.read_csv(path)
    lines = []
    for (experiment, strategy), held in rows.groupby(["experiment", "strategy"], sort=False):
        line = {"experiment": experiment, "strategy": strategy, "cells": len(held)}
        for what in ("peak_mib", "states_bytes", "sent_bytes"):
            same = held[f"{what}_predicted"] == held[f"{what}_measured"]
            errors = held[f"{what.rpartition('_')[0]}_error_percent"].dropna()
            line[what] = "exact" if same.all() else describe_percent_errors(errors)
        timed = held["train_s_in_range"].dropna().astype(bool)
        line["time"] = f"{timed.sum()} of {len(timed)}" if len(timed) else ""
        lines.append(line)
    return lines


def describe_percent_errors(errors_percent: pd.Series) -> str:
    """Return the plan's errors in percent as text.

    Several errors become the median and the one farthest from 0. The text is empty without errors.
    """
    if len(errors_percent) < 2:
        return "".join(f"{error:+.1f} %" for error in errors_percent)
    worst = errors_percent[errors_percent.abs().idxmax()]
    return f"median {errors_percent.median():+.1f} %, worst {worst:+.1f} %"


READING = Reading(list_sections=make_prediction_sections)
