"""Figures that combine measures: time and score, the phases of a step, staleness of pushes."""

from __future__ import annotations

import json
from itertools import groupby

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from stratbench.analysis.figures.figure_data import FigureData, styles_in_order
from stratbench.analysis.figures.panels import (
    INK,
    LEAST_LOOK,
    SMALL_MARKS,
    add_legend_and_note,
    annotate,
    bar_look,
    blank,
    draw_panels,
    least_handles,
    line,
    line_handles,
)
from stratbench.analysis.figures.style import (
    BROWN,
    DEEP_TEAL,
    GREY,
    PALE,
    PETROL,
    ROSE,
    SAND,
    TEAL,
    WINE,
    Style,
)
from stratbench.analysis.records.measures import ALONE, DOUBT
from stratbench.analysis.records.score import Score
from stratbench.cell.text.words import counted, worker_noun

#: Colour and hatch of a step's phases, in order of time: computing is teal, waiting and sending are not.
PHASE_LOOKS = {
    "data": (PALE, ""),
    "forward": (TEAL, ""),
    "slowdown": ("#ffffff", "...."),
    "backward": (DEEP_TEAL, ""),
    "communication": (WINE, "////"),
    "exposed_communication": (WINE, "////"),
    "bubble": (SAND, "xxxx"),
    "push": (BROWN, ""),
    "server_wait": (SAND, "...."),
    "server": (SAND, "\\\\\\\\"),
    "optimizer": (PETROL, ""),
    "other": ("#ffffff", ""),
}
OTHER_PHASE_LOOKS = ((ROSE, "xxxx"), (ROSE, "...."))
#: The measures that a point of the scatter chart shows.
TRADED = ("training_time", "score", "memory")
#: The area of the largest point in a scatter chart, in square points.
LARGEST_POINT = 220.0


def titles_on_most(data: FigureData) -> dict[str, str]:
    """The titles of panels by model: its name, with the largest worker count."""
    where = counted(data.most, worker_noun(data.cells["device_kind"]))
    return {model: f"{model}, {where}" for model in data.models}


def mark_empty(axis: Axes) -> None:
    """Write into a panel that it has nothing to show."""
    blank(axis)
    annotate(axis, "no result", (0.5, 0.5), "axes fraction", (0, 0), ha="center")


def breakdown_figure(data: FigureData) -> Figure:
    """A figure of stacked bars: the mean step of each strategy by phase, on the most workers."""
    known = data.cells[data.cells["breakdown_ms"].notna()]
    spans = pd.DataFrame([json.loads(text) for text in known["breakdown_ms"]], index=known.index)
    extra = [name for name in spans.columns if name not in PHASE_LOOKS]
    looks = PHASE_LOOKS | {
        name: OTHER_PHASE_LOOKS[i % len(OTHER_PHASE_LOOKS)] for i, name in enumerate(extra)
    }
    phases = [name for name in looks if name in spans.columns]

    def panel(axis: Axes, model: str) -> None:
        rows = known[(known["model"] == model) & (known["gpus"] == data.most)]
        names = [name for name in data.strategies if name in set(rows["strategy"])]
        if not names:
            return mark_empty(axis)
        left = np.zeros(len(names))
        for phase in phases:
            medians = spans.loc[rows.index, phase].groupby(rows["strategy"]).median()
            widths = np.array([medians.get(name, 0.0) for name in names])
            widths = np.nan_to_num(widths)
            axis.barh(range(len(names)), widths, 0.7, left=left, **bar_look(*looks[phase], 0.4))
            left += widths
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", visible=True)
        axis.set_xlabel("ms a step")

    figure = draw_panels(titles_on_most(data), panel)
    handles = [Patch(label=phase, **bar_look(*looks[phase], 0.4)) for phase in phases]
    add_legend_and_note(figure, handles, data.note)
    return figure


def score_over_time_figure(data: FigureData) -> Figure:
    """A figure of the score after each epoch over the training time so far, on the most workers."""
    epochs, score = data.epochs, data.score

    def panel(axis: Axes, model: str) -> None:
        rows = epochs[(epochs["model"] == model) & (epochs["gpus"] == data.most)]
        alone = epochs[(epochs["model"] == model) & (epochs["strategy"] == ALONE)]
        drawn = rows if data.most == 1 else pd.concat([alone, rows])
        if drawn.empty:
            return mark_empty(axis)
        for name, found in drawn.groupby("strategy", sort=False):
            by_epoch = found.groupby("epoch")[["train_time_s", "score"]].median()
            line(
                axis, by_epoch["train_time_s"], by_epoch["score"] * score.factor,
                data.styles[str(name)], markevery=max(1, len(by_epoch) // 10), **SMALL_MARKS,
            )  # fmt: skip
        if score.least_possible is not None:
            axis.axhline(score.least_possible, **LEAST_LOOK)
        axis.set_xlim(left=0)
        axis.set_xlabel("training time (s)")

    figure = draw_panels(titles_on_most(data), panel, data.score_label)
    noted = f" {ALONE}: on one worker." if data.most > 1 and ALONE in data.strategies else ""
    handles = line_handles(styles_in_order(data)) + least_handles(score)
    add_legend_and_note(figure, handles, data.note + noted)
    return figure


def tradeoff_figure(data: FigureData) -> Figure:
    """A figure of time and score, with memory as area, and the line of points unbeaten in both."""

    def panel(axis: Axes, model: str) -> None:
        found = [
            data.rows(name, model).set_index(["strategy", "gpus"])["value"].rename(name)
            for name in TRADED
        ]
        flags = [data.rows(name, model).set_index(["strategy", "gpus"])["flags"] for name in TRADED]
        found.append(sum(flags[1:], flags[0]).rename("flags"))
        points = pd.concat(found, axis=1).dropna(subset=["training_time", "score"])
        if points.empty:
            return mark_empty(axis)
        draw_points(axis, points, data.styles, data.score)
        axis.set_xlabel("training time (s)")

    figure = draw_panels(data.titles, panel, data.score_label)
    handles = [
        Line2D(
            [], [], linestyle="", marker=style.marker, markerfacecolor=style.colour,
            markeredgecolor=INK, markeredgewidth=0.4, label=name,
        )
        for name, style in styles_in_order(data).items()
    ]  # fmt: skip
    handles.append(Line2D([], [], color=GREY, linewidth=1, label="best trade-offs"))
    add_legend_and_note(figure, handles, data.note + data.doubt_note(*TRADED))
    return figure


def draw_points(axis: Axes, points: pd.DataFrame, looks: dict[str, Style], score: Score) -> None:
    """Draw one panel of `tradeoff_figure`; `points`: training_time, score, memory by (strategy, gpus)."""
    front = are_unbeaten(
        points["training_time"].to_numpy(), score.sign * points["score"].to_numpy()
    )
    on_front = points[front].sort_values("training_time")
    axis.plot(on_front["training_time"], on_front["score"], color=GREY, linewidth=1, zorder=1)
    largest = points["memory"].max()
    for (strategy, gpus), row in points.iterrows():
        known = row["memory"] == row["memory"] and largest > 0
        area = max(8.0, LARGEST_POINT * row["memory"] / largest) if known else 20.0
        style = looks[strategy]
        axis.scatter(
            row["training_time"], row["score"], s=area, marker=style.marker,
            color=style.colour, edgecolors=INK, linewidths=0.5, alpha=0.85, zorder=3,
        )  # fmt: skip
        at = (row["training_time"], row["score"])
        label = f"{gpus}{DOUBT if row['flags'] else ''}"
        annotate(axis, label, at, "data", (0.5 * area**0.5 + 1, 0), va="center", zorder=4)
    axis.margins(0.12)


def are_unbeaten(times: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The mask of unbeaten points: a point beats another if it is no worse in both and better in one."""
    beaten = [
        np.any((times <= t) & (scores >= s) & ((times < t) | (scores > s)))
        for t, s in zip(times, scores, strict=True)
    ]
    return ~np.array(beaten, dtype=bool)


def staleness_figure(data: FigureData) -> Figure:
    """A figure of the share of pushes by staleness, on the most workers, over all repeats."""
    known = data.cells[data.cells["staleness"].notna()]
    names: dict[str, Style] = {}

    def panel(axis: Axes, model: str) -> None:
        rows = known[(known["model"] == model) & (known["gpus"] == data.most)]
        if rows.empty:
            return mark_empty(axis)
        for name, found in groupby(rows.itertuples(), key=lambda row: row.strategy):
            shares = shares_by_value([json.loads(row.staleness) for row in found])
            style = names.setdefault(name, data.styles[name])
            line(axis, range(len(shares)), 100 * shares, style, **SMALL_MARKS)
        axis.set_ylim(0, 105)
        axis.set_xlim(-0.3, max(axis.dataLim.x1, 1) + 0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axis.set_xlabel("updates that the push is behind")

    figure = draw_panels(titles_on_most(data), panel, "Pushes (%)")
    add_legend_and_note(figure, line_handles(names), data.note)
    return figure


def shares_by_value(counts: list[list[int]]) -> np.ndarray:
    """Shares by value, from the sum of all counts; cut off where less than 0.1 % is left."""
    total = np.zeros(max(len(c) for c in counts))
    for c in counts:
        total[: len(c)] += c
    shares = total / max(1.0, total.sum())
    needed = int(np.searchsorted(np.cumsum(shares), 0.999)) + 1
    return shares[:needed]
