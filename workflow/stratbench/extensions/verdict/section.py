"""The report's section on the verdict: claims, dropped strategies, bounds, noise and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from stratbench.analysis.figures.figure_data import marks_of
from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.rows import FigureRow, Point, Rows, draw_rows
from stratbench.analysis.figures.sheet import RC, svg_of
from stratbench.analysis.report.shown import data_uri


def verdict_section(verdict: Mapping[str, Any], cells: pd.DataFrame) -> dict[str, Any]:
    """Return the section as values for the template."""
    marks = marks_of(
        cells,
        {
            strategy
            for comparison in verdict["comparisons"]
            for strategy in comparison["strategies"]
        },
    )
    matrix, noise = verdict["matrix_gpu_hours"], verdict["noise"]["text"]
    return {
        "comparisons": [
            comparison_line(comparison)
            for comparison in verdict["comparisons"]
            if len(comparison["strategies"]) > 1
        ],
        "hours": verdict["hours"],
        "repeats": verdict["matrix_repeats"],
        "spent": f"{verdict['spent_gpu_hours']:.3g}",
        "matrix": None if matrix is None else f"{matrix:.3g}",
        "share": None if not matrix else f"{100 * verdict['spent_gpu_hours'] / matrix:.1f} %",
        "state": verdict["reason"] if verdict["done"] else "open: another round is due",
        "rounds": verdict["rounds"],
        "figures": list(interval_figures(verdict, marks)),
        "noise": list(noise_rows(verdict["noise"])),
        "implies": f"{noise[0].upper()}{noise[1:]}.",
        "notes": verdict["notes"],
    }


def comparison_line(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table of conclusions, with its alternatives."""
    matrix, at_most = comparison["matrix_gpu_hours"], comparison["at_most"]
    spent = comparison["block_gpu_hours"] + comparison["full_run_gpu_hours"]
    return {
        "experiment": comparison["experiment"],
        "model": comparison["model"],
        "workers": comparison["workers"],
        "text": comparison["text"],
        "confidence": comparison["confidence"],
        "reason": comparison["confidence_reason"],
        "blocks": comparison["blocks"],
        "spent": f"{spent:.3g}" if matrix is None else f"{spent:.3g} of {matrix:.3g}",
        "interval": nearest_interval(comparison),
        "at_most": f"{100 * at_most:.1f} %"
        if at_most is not None and comparison["claimed"]
        else "",
        "rivals": [
            rival_line(ratio) for ratio in comparison["ratios"] if ratio["state"] != "leader"
        ],
    }


def nearest_interval(comparison: Mapping[str, Any]) -> str:
    """Return the ratio and bound of the alternative that may be the fastest, with its name."""
    known = [
        r
        for r in comparison["ratios"]
        if r["low"] is not None and r["against"] == comparison["leader"]
    ]
    if not known:
        return ""
    # Dropped alternatives come last.
    nearest = min(known, key=lambda ratio: (bool(ratio["reason"]), ratio["at_least"]))
    return f"{nearest['strategy']} {nearest['text']}"


def rival_line(ratio: Mapping[str, Any]) -> dict[str, str]:
    """Return an alternative as a row: its state, when it changed and the reason."""
    return {
        "strategy": ratio["strategy"],
        "state": ratio["words"],
        "ratio": ratio["text"],
        "against": ratio["against"] or "",
        "reason": ratio["reason"],
    }


#: Components of the noise: key, name, description.
COMPONENTS = (
    (
        "allocation",
        "allocation",
        "what a job's nodes do to all strategies alike; pairing removes it",
    ),
    (
        "strategy_in_allocation",
        "strategy × allocation",
        "nodes that suit one strategy more than another",
    ),
    ("process", "process", "between two starts of the same strategy in one job"),
    ("within", "segment", "the mean over the steps of one segment"),
    ("segment", "process and segment", "both together, as two segments differ"),
    ("drift", "drift", "trend over a block, at its ends; the mirrored order removes it"),
    ("ratio", "ratio of two strategies", "from block to block: what the intervals rest on"),
)


def noise_rows(noise: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table of noise: standard deviations in percent."""
    for key, name, meaning in COMPONENTS:
        value = noise[key]
        shown = "not known" if value is None else f"{100 * value:.2f}"
        yield {"name": name, "sd": shown, "meaning": meaning}


def interval_figures(
    verdict: Mapping[str, Any], marks: Mapping[str, Mark]
) -> Iterator[dict[str, Any]]:
    """Yield a figure per comparison with intervals: times relative to the leader's, and bounds."""
    for comparison in verdict["comparisons"]:
        known = [r for r in comparison["ratios"] if r["ratio"] is not None]
        if len(known) < 2 or comparison["leader"] is None:
            continue
        with plt.rc_context(RC):
            rows = [ratio_row(r) for r in sorted(known, key=lambda r: r["ratio"])]
            svg = svg_of(draw_rows(Rows.of_ratios(rows, marks, verdict["margin"])))
        title = f"{comparison['model']}, {comparison['workers']}"
        yield {
            "title": title,
            "caption": f"Each one's time as a multiple of {comparison['leader']}'s; lines end at the least "
            "that it "
            f"may be, which decides. Shaded: {100 * verdict['margin']:g} %. Logarithmic.",
            "alt": f"Every strategy's time against the leader's and its bound: {title}.",
            "uri": data_uri(svg.encode()),
        }


def ratio_row(ratio: Mapping[str, Any]) -> FigureRow:
    """Return the row of a strategy in a comparison."""
    leads = ratio["state"] == "leader"
    low = ratio["at_least"]
    point = Point(ratio["ratio"], low, ratio["ratio"] if low is not None else None, chosen=leads)
    text = "leads" if leads else f"{ratio['ratio']:.2f}×"
    return FigureRow(ratio["strategy"], [point], told=text, chosen=leads)
