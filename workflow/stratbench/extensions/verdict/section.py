"""Makes the report's section on the verdict: conclusions, dropped strategies, bounds, noise and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from stratbench.analysis.figures.figure_data import assign_marks
from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.rows import FigureRow, Point, RowChart, draw_row_chart
from stratbench.analysis.figures.sheet import RC, render_svg
from stratbench.analysis.report.shown import build_data_uri


def collect_verdict_section_values(
    verdict: Mapping[str, Any], cells: pd.DataFrame
) -> dict[str, Any]:
    """Return the values that the template of the report's section on the verdict needs."""
    marks = assign_marks(
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
            make_conclusion_row(comparison)
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
        "figures": list(draw_time_ratio_figures(verdict, marks)),
        "noise": list(iter_noise_rows(verdict["noise"])),
        "implies": f"{noise[0].upper()}{noise[1:]}.",
        "notes": verdict["notes"],
    }


def make_conclusion_row(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return a comparison's row in the table of conclusions.

    Its key `rivals` has the entry of each strategy other than the leader.
    """
    matrix, at_most = comparison["matrix_gpu_hours"], comparison["at_most"]
    spent = comparison["block_gpu_hours"] + comparison["full_run_gpu_hours"]
    return {
        **comparison,
        "spent": f"{spent:.3g}" if matrix is None else f"{spent:.3g} of {matrix:.3g}",
        "interval": format_ratio_of_nearest_rival(comparison),
        "at_most": f"{100 * at_most:.1f} %"
        if at_most is not None and comparison["claimed"]
        else "",
        "rivals": [ratio for ratio in comparison["ratios"] if ratio["state"] != "leader"],
    }


def format_ratio_of_nearest_rival(comparison: Mapping[str, Any]) -> str:
    """Return the name, time ratio and bound of the nearest alternative as text.

    The nearest alternative is the one with the lowest bound. The text is empty if no bound is known.
    """
    known = [
        r
        for r in comparison["ratios"]
        if r["low"] is not None and r["against"] == comparison["leader"]
    ]
    if not known:
        return ""
    # Alternatives that are still in the comparison come before dropped ones.
    nearest = min(known, key=lambda ratio: (bool(ratio["reason"]), ratio["at_least"]))
    return f"{nearest['strategy']} {nearest['text']}"


#: Components of the noise, each with its key in verdict.json, its name and its description in the report.
COMPONENTS = (
    (
        "allocation",
        "allocation",
        "difference between jobs that all strategies share; pairing removes it",
    ),
    (
        "strategy_in_allocation",
        "strategy × allocation",
        "difference between jobs that is not the same for all strategies",
    ),
    ("process", "process", "difference between two starts of the same strategy in one job"),
    ("within", "segment", "random error of the mean over the steps of one segment"),
    (
        "segment",
        "process and segment",
        "process and segment together: the difference between two segments",
    ),
    (
        "drift",
        "drift",
        "trend over a block, at its ends; the reversed order of the second pass removes it",
    ),
    (
        "ratio",
        "ratio of two strategies",
        "variation between blocks, from which the intervals follow",
    ),
)


def iter_noise_rows(noise: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table of noise components, as standard deviations in percent."""
    for key, name, meaning in COMPONENTS:
        value = noise[key]
        shown = "not known" if value is None else f"{100 * value:.2f}"
        yield {"name": name, "sd": shown, "meaning": meaning}


def draw_time_ratio_figures(
    verdict: Mapping[str, Any], marks: Mapping[str, Mark]
) -> Iterator[dict[str, Any]]:
    """Draw a figure per comparison, with the time ratio of each strategy to the leader."""
    for comparison in verdict["comparisons"]:
        known = [r for r in comparison["ratios"] if r["ratio"] is not None]
        if len(known) < 2 or comparison["leader"] is None:
            continue
        with plt.rc_context(RC):
            rows = [make_time_ratio_row(r) for r in sorted(known, key=lambda r: r["ratio"])]
            svg = render_svg(
                draw_row_chart(RowChart.from_ratio_rows(rows, marks, verdict["margin"]))
            )
        title = f"{comparison['model']}, {comparison['workers']}"
        yield {
            "title": title,
            "caption": f"Time of each strategy as a multiple of that of {comparison['leader']}. Lines end at "
            "the lower bound, on which decisions are based. The shaded band is "
            f"{100 * verdict['margin']:g} %. The axis is logarithmic.",
            "alt": f"Time of every strategy relative to the leader's, with its lower bound: {title}.",
            "uri": build_data_uri(svg.encode()),
        }


def make_time_ratio_row(strategy_entry: Mapping[str, Any]) -> FigureRow:
    """Return a strategy's row in the figure of its comparison."""
    leads = strategy_entry["state"] == "leader"
    low = strategy_entry["at_least"]
    point = Point(
        strategy_entry["ratio"],
        low,
        strategy_entry["ratio"] if low is not None else None,
        is_chosen_candidate=leads,
    )
    text = "leads" if leads else f"{strategy_entry['ratio']:.2f}×"
    return FigureRow(
        strategy_entry["strategy"], [point], best_value_text=text, is_chosen_strategy=leads
    )
