"""Figures of a comparison: ratios of training times with their intervals, and the times themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from stratbench.analysis.figures.panels import (
    INK,
    MOST_COLUMNS,
    add_legend_and_note,
    counts_axis,
    draw_panels,
    line,
    line_handles,
)
from stratbench.analysis.figures.plots import save_figure
from stratbench.analysis.figures.style import GREY, RC, Style, styles_of
from stratbench.sets.comparing.comparison import ComparedCell, Comparison
from stratbench.statistics.unpaired import geometric_mean

#: Height of one line in the figure of ratios, and of its surroundings, in inches.
LINE_IN, AROUND_IN = 0.17, 1.1
#: Ticks of the axis of ratios.
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 5, 10, 20, 50, 100)


def draw_all(found: Comparison, out_dir: Path) -> dict[str, list[Path]]:
    """Draw the figures of every experiment with a ratio; returns their SVGs, by experiment."""
    drawn: dict[str, list[Path]] = {}
    looks = styles_of(pd.concat([found.first.cells, found.other.cells]))
    with plt.rc_context(RC):
        for experiment in dict.fromkeys(cell.group.experiment for cell in found.with_ratio):
            cells = [cell for cell in found.with_ratio if cell.group.experiment == experiment]
            stem = out_dir / found.other.name / experiment
            save_figure(ratio_figure(found, cells, looks), stem / "time_ratio")
            save_figure(times_figure(found, cells, looks), stem / "times")
            drawn[experiment] = [stem / "time_ratio.svg", stem / "times.svg"]
    return drawn


def ratio_figure(
    found: Comparison, cells: Sequence[ComparedCell], looks: dict[str, Style]
) -> Figure:
    """A figure of ratios: a point with its interval for each strategy and worker count, a panel per model."""
    models = list(dict.fromkeys(cell.group.model for cell in cells))
    strategies = list(dict.fromkeys(cell.group.strategy for cell in cells))
    drawn = {(cell.group.strategy, cell.group.gpus) for cell in cells}
    lines = sorted(drawn, key=lambda drawn: (strategies.index(drawn[0]), drawn[1]))
    place = {what: -n for n, what in enumerate(lines)}
    ends = [end for cell in cells for end in cell.time if end is not None]
    # The limits cover all values and at least a tenth around 1, and are the same for all models.
    limits = 0.95 * min(0.95, *ends), 1.05 * max(1.05, *ends)

    def panel(axis: Axes, model: str) -> None:
        axis.axvline(1, color=GREY, linewidth=1, zorder=1)
        for cell in (cell for cell in cells if cell.group.model == model):
            at = place[(cell.group.strategy, cell.group.gpus)]
            look, time = looks[cell.group.strategy], cell.time
            if time.low is not None:
                axis.hlines(at, time.low, time.high, color=look.colour, linewidth=1.6, zorder=2)
            line(axis, time.value, at, look, linestyle="-", zorder=3)
        axis.set_xscale("log")
        axis.set_xlim(*limits)
        axis.set_yticks([-n for n in range(len(lines))], [f"{s}, {n}" for s, n in lines])
        axis.set_ylim(-len(lines) + 0.4, 0.6)
        axis.grid(visible=True, axis="x")
        axis.grid(visible=False, axis="y")
        ratio_ticks(axis)
        axis.set_xlabel(f"Time in {found.other.name} / time in {found.first.name}")

    figure = draw_panels({model: model for model in models}, panel)
    rows = -(-len(models) // MOST_COLUMNS)
    figure.set_figheight(max(2.0, LINE_IN * len(lines) + AROUND_IN) * rows)
    note = (
        f"Training time in {found.other.name}, divided by that in {found.first.name}: left of the line "
        f"{found.other.name} is faster. Bars: 95 % intervals by Welch's t, unpaired; without: one repeat. "
        "Beside a strategy: its number of workers."
    )
    add_legend_and_note(figure, [], note)
    return figure


def ratio_ticks(axis: Axes) -> None:
    """Put round numbers on an axis of ratios."""
    low, high = axis.get_xlim()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    apart = math.log(high / low) / 7  # so that no two labels meet
    for side in (1, -1):  # outwards from 1
        last = 1.0
        for tick in sorted((t for t in ticks if (t - 1) * side > 0), key=lambda t: side * t):
            if abs(math.log(tick / last)) < apart:
                ticks.remove(tick)
            else:
                last = tick
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()


def times_figure(
    found: Comparison, cells: Sequence[ComparedCell], looks: dict[str, Style]
) -> Figure:
    """A figure of training times over the worker count: solid in the first set, dashed in the other."""
    models = list(dict.fromkeys(cell.group.model for cell in cells))
    counts = sorted({cell.group.gpus for cell in cells})
    strategies = list(dict.fromkeys(cell.group.strategy for cell in cells))

    def panel(axis: Axes, model: str) -> None:
        for strategy in strategies:
            shown = sorted(
                (c for c in cells if (c.group.model, c.group.strategy) == (model, strategy)),
                key=lambda c: c.group.gpus,
            )
            at, look = [c.group.gpus for c in shown], looks[strategy]
            hollow = {"markerfacecolor": "white", "markeredgecolor": look.colour}
            first, other = (
                [geometric_mean(times) for times in side]
                for side in ([c.first.times for c in shown], [c.other.times for c in shown])
            )
            line(axis, at, first, look, linestyle="-")
            line(axis, at, other, look, linestyle="--", markeredgewidth=1, **hollow)
        counts_axis(axis, counts, is_ratio=False)
        axis.set_xlabel("workers")

    figure = draw_panels({model: model for model in models}, panel, "Training time (s)")
    handles = line_handles({name: looks[name] for name in strategies})
    handles += [
        Line2D([], [], color=INK, linestyle="-", label=found.first.name),
        Line2D([], [], color=INK, linestyle="--", label=found.other.name),
    ]
    note = f"Geometric means of the repeats. Solid: {found.first.name}; dashed: {found.other.name}."
    add_legend_and_note(figure, handles, note)
    return figure
