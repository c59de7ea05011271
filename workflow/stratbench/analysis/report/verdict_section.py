"""The report's section on the verdict: claims, dropped strategies, bounds, noise and cost."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from stratbench.analysis.figures.panels import (
    add_legend_and_note,
    draw_panels,
)
from stratbench.analysis.figures.style import RC, Style, styles_of

#: An axis reaches at least the first ratio, and up to the second if rivals in the race are there.
LEAST_RANGE, MOST_RANGE = 1.25, 4.0
#: Ticks of an axis, if its range has room for them.
COARSE_TICKS, FINE_TICKS = (
    (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
    (0.8, 0.9, 1.0, 1.1, 1.25),
)


def verdict_section(verdict: Mapping[str, Any], cells: pd.DataFrame) -> dict[str, Any]:
    """The section as values for the template."""
    looks = styles_of(cells, {arm for bout in verdict["bouts"] for arm in bout["arms"]})
    matrix, noise = verdict["matrix_gpu_hours"], verdict["noise"]["text"]
    return {
        "bouts": [bout_line(bout) for bout in verdict["bouts"] if len(bout["arms"]) > 1],
        "hours": verdict["hours"],
        "repeats": verdict["matrix_repeats"],
        "spent": f"{verdict['spent_gpu_hours']:.3g}",
        "matrix": None if matrix is None else f"{matrix:.3g}",
        "share": None if not matrix else f"{100 * verdict['spent_gpu_hours'] / matrix:.1f} %",
        "state": verdict["reason"] if verdict["done"] else "open: another round is due",
        "rounds": verdict["rounds"],
        "figures": list(interval_figures(verdict, looks)),
        "noise": list(noise_rows(verdict["noise"])),
        "implies": f"{noise[0].upper()}{noise[1:]}.",
        "notes": verdict["notes"],
    }


def bout_line(bout: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of claims, and its rivals."""
    matrix = bout["matrix_gpu_hours"]
    spent = bout["block_gpu_hours"] + bout["full_run_gpu_hours"]
    return {
        "experiment": bout["experiment"],
        "model": bout["model"],
        "workers": bout["workers"],
        "text": bout["text"],
        "confidence": bout["confidence"],
        "why": bout["confidence_why"],
        "blocks": bout["blocks"],
        "spent": f"{spent:.3g}" if matrix is None else f"{spent:.3g} of {matrix:.3g}",
        "interval": nearest_interval(bout),
        "at_most": at_most_text(bout),
        "rivals": [rival_line(ratio) for ratio in bout["ratios"] if ratio["state"] != "leader"],
    }


def at_most_text(bout: Mapping[str, Any]) -> str:
    """The share by which something may be faster than the leader; empty if hardly anything is known."""
    known = bout["at_most"] is not None and bout["claimed"]
    return f"{bout['at_most']:.1%}" if known else ""


def nearest_interval(bout: Mapping[str, Any]) -> str:
    """The ratio and bound of the rival that may be the fastest, with its name."""
    known = [r for r in bout["ratios"] if r["low"] is not None and r["against"] == bout["leader"]]
    if not known:
        return ""
    # Dropped rivals come last.
    nearest = min(known, key=lambda ratio: (bool(ratio["why"]), ratio["at_least"]))
    return f"{nearest['strategy']} {nearest['text']}"


def rival_line(ratio: Mapping[str, Any]) -> dict[str, str]:
    """A rival as a row: its state, when it changed and why."""
    return {
        "strategy": ratio["strategy"],
        "state": ratio["words"],
        "ratio": ratio["text"],
        "against": ratio["against"] or "",
        "why": ratio["why"],
    }


#: Components of the noise: key, name, description.
COMPONENTS = (
    (
        "allocation",
        "allocation",
        "what a job's nodes do to all strategies alike; pairing removes it",
    ),
    (
        "arm_in_allocation",
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
    """The rows of the table of noise: standard deviations in percent."""
    for key, name, meaning in COMPONENTS:
        value = noise[key]
        shown = "not known" if value is None else f"{100 * value:.2f}"
        yield {"name": name, "sd": shown, "meaning": meaning}


def interval_figures(
    verdict: Mapping[str, Any], looks: Mapping[str, Style]
) -> Iterator[dict[str, Any]]:
    """A figure for each experiment: the bound of each rival, which rises with the number of blocks."""
    for experiment in dict.fromkeys(bout["experiment"] for bout in verdict["bouts"]):
        bouts = [
            bout
            for bout in verdict["bouts"]
            if bout["experiment"] == experiment
            and any(look["blocks"] > 1 for look in bout["looks"])
        ]
        if bouts:
            with plt.rc_context(RC):
                uri, width_pt = interval_figure(bouts, looks, verdict["margin"])
            yield {
                "experiment": experiment,
                "uri": uri,
                "width_pt": width_pt,
                "alt": f"Every strategy's time against the leader's in {experiment}, and its bound, "
                "by blocks.",
            }


def interval_figure(
    bouts: list[Mapping[str, Any]], looks: Mapping[str, Style], margin: float
) -> tuple[str, float]:
    """The figure of one experiment as an SVG's data URI, and its width in points."""
    drawn: dict[str, None] = {}

    def panel(axis: Axes, n: int) -> None:
        drawn.update(dict.fromkeys(draw_intervals(axis, bouts[n], looks, margin)))

    titles = {n: f"{bout['model']}, {bout['workers']}" for n, bout in enumerate(bouts)}
    figure = draw_panels(titles, panel, "time / leader's")
    handles = [
        Line2D([], [], color=looks[arm].colour, marker=looks[arm].marker, label=arm, ls="")
        for arm in drawn
    ]
    note = (
        "The leader at each look is 1. Shaded: the margin. Dash: the least that the ratio may be, "
        "which decides. Arrows lead out of the figure, and so do rivals that are missing."
    )
    add_legend_and_note(figure, handles, note)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = base64.b64encode(out.getvalue()).decode()
    return f"data:image/svg+xml;base64,{svg}", 72 * figure.get_figwidth()


def draw_intervals(
    axis: Axes, bout: Mapping[str, Any], looks: Mapping[str, Style], margin: float
) -> Iterator[str]:
    """Draw one panel, and yield the strategies in it."""
    axis.axhspan(1 / (1 + margin), 1 + margin, color="#e8eef5", zorder=0)
    axis.axhline(1, color="#555555", linewidth=0.8, zorder=1)
    counts = [look["blocks"] for look in bout["looks"] if look["blocks"] > 1]
    still = [values[0] for values in bout["looks"][-1]["intervals"].values()]
    farthest = min(max([LEAST_RANGE, *(1.1 * mean for mean in still if mean)]), MOST_RANGE)
    nearest = [1 / farthest, farthest]
    arms = [arm for arm in bout["arms"] if any(arm in look["intervals"] for look in bout["looks"])]
    for place, arm in enumerate(arms):
        shift = 0.5 * ((place + 0.5) / len(arms) - 0.5)
        shown = [
            (look["blocks"] + shift, *look["intervals"][arm])
            for look in bout["looks"]
            if look["blocks"] > 1 and None not in look["intervals"].get(arm, [None])
        ]
        shown = [point for point in shown if point[1] <= farthest]
        if not shown:
            continue
        yield arm
        x, mean, _, _, bound = np.array(shown).T
        least = np.maximum(bound, nearest[0])
        style = looks[arm]
        axis.vlines(x, least, mean, color=style.colour, linewidth=1.4)
        axis.plot(x, mean, style.marker, color=style.colour, markersize=3.5)
        inside = bound >= nearest[0]
        axis.plot(x[inside], bound[inside], "_", color=style.colour, markersize=8)
        axis.plot(x[~inside], least[~inside], "v", color=style.colour, markersize=2.5)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    ticks = FINE_TICKS if farthest < 1.5 else COARSE_TICKS
    axis.set_yticks([tick for tick in ticks if nearest[0] <= tick <= nearest[1] * 1.001])
    axis.set_ylim(nearest[0] / 1.02, nearest[1] * 1.02)
    axis.set_xticks(counts)
    axis.set_xlim(counts[0] - 0.5, counts[-1] + 0.5)
    axis.minorticks_off()
    axis.set_xlabel("blocks")
