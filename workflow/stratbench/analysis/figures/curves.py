"""Figures of lines with their names beside their ends: over worker counts, epochs, time or staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stratbench.analysis.figures.axes import (
    LETTER,
    figure_of,
    limits_of,
    new_axes,
    put_mark,
    set_ticks,
    settle,
    shifted,
    shortened,
    spread,
    within_reach,
    write,
)
from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.sheet import (
    BAD,
    INK,
    LINE,
    LINE_HEIGHT,
    MUTED,
    PX,
    RULE,
    WIDTH,
    colour_of,
)  # fmt: skip

#: Room for ticks and the axis' name below, and above the highest point.
BELOW = 50
#: The least height of a plot; further names make it higher.
MIN_HEIGHT = 160
#: The distance of two names beside lines, and of names from the plot.
APART, NAMES_FROM = 14, 18
#: The most lines of words below a figure.
MAX_NOTES = 6
#: The width of a mark on a line, of the chosen one's and of the others'.
CHOSEN_MARK, MARK = 9, 6
#: The most marks on a line.
MAX_MARKS = 10
#: The room beyond points, as a share of an axis.
ROOM = 0.03


@dataclass(frozen=True)
class Curve:
    """The line of a strategy: its points in order, with the ends of their intervals if they have any."""

    strategy: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    chosen: bool = False
    #: What is written after the name.
    suffix: str = ""
    joined: bool = True


@dataclass(frozen=True)
class Curves:
    """What a figure of lines shows, and how."""

    curves: Sequence[Curve]
    marks: Mapping[str, Mark]
    x_name: str
    x_unit: str = ""
    #: Where the horizontal axis has ticks; empty: at round numbers.
    x_ticks: Sequence[float] = ()
    x_log: bool = False
    x_whole: bool = False
    y_log: bool = False
    #: Whether the vertical axis begins at 0.
    from_zero: bool = True
    #: Whether to draw the line on which y is x, as far as the data go.
    ideal: bool = False
    #: A value of y with a word at its line.
    level: tuple[float, str] | None = None
    #: What is said of cells without points, a line each.
    notes: Sequence[str] = ()


def draw_curves(shown: Curves) -> Figure:
    """The figure, high enough for the names of all lines."""
    height = max(MIN_HEIGHT, APART * (len(shown.curves) + 1))
    notes = noted(shown.notes)
    axes = new_axes(height + BELOW + LINE_HEIGHT * len(notes))
    set_ticks(axes.yaxis, y_limits(shown), shown.y_log)
    x, at = x_limits(shown), shown.x_ticks
    set_ticks(axes.xaxis, x, shown.x_log, at=at, unit=shown.x_unit, whole=shown.x_whole)
    axes.set_xlabel(shown.x_name)
    if notes:
        below = {"x": 0, "ha": "left", "color": BAD, "size": axes.xaxis.label.get_fontsize()}
        most = int(WIDTH / LETTER)
        figure_of(axes).supxlabel("\n".join(shortened(note, most) for note in notes), **below)
    if shown.ideal:
        draw_ideal(axes, shown)
    if shown.level:
        axes.axhline(shown.level[0], color=MUTED, linestyle=dashes("2 2.5"), zorder=1.5)
        write(axes, 0, *shown.level, MUTED, va="bottom", transform=shifted(axes, 4))
    names = []
    for curve in shown.curves:
        mark, text = shown.marks[curve.strategy], shortened(curve.strategy) + curve.suffix
        draw_curve(axes, curve, mark)
        if known := [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y == y]:
            colour = colour_of(mark, True) if curve.chosen else INK
            names.append((text, colour, curve.chosen, known[-1]))
    put_names(axes, names)
    return figure_of(axes)


def bars_show(shown: Curves) -> bool:
    """Whether any interval is longer than the mark on it."""
    low_end, high_end = (math.log(v) if shown.y_log else v for v in y_limits(shown))
    ends = (
        (low, high, CHOSEN_MARK if curve.chosen else MARK)
        for curve in shown.curves
        for low, high in zip(curve.low, curve.high, strict=True)
        if low == low
    )
    share = ((math.log(h / low) if shown.y_log else h - low, mark) for low, h, mark in ends)
    return any(MIN_HEIGHT * part / (high_end - low_end) > mark for part, mark in share)


def noted(notes: Sequence[str]) -> list[str]:
    """The lines of words that have room."""
    if len(notes) <= MAX_NOTES:
        return list(notes)
    return [*notes[: MAX_NOTES - 1], f"and {len(notes) - MAX_NOTES + 1} more: see the table"]


def x_limits(shown: Curves) -> tuple[float, float]:
    """The ends of the horizontal axis: it holds all points, and no more."""
    known = [*(v for c in shown.curves for v in c.x), *shown.x_ticks] or [0.0, 1.0]
    low, high = min(known), max(known)
    if low == high:
        return (low / 2, high * 2) if shown.x_log else (low - 1, high + 1)
    if shown.x_log:
        return low / (high / low) ** ROOM, high
    return low - ROOM * (high - low), high


def y_limits(shown: Curves) -> tuple[float, float]:
    """The ends of the vertical axis: from 0, or from below the lowest point."""
    values = [v for c in shown.curves for v in c.y if v == v]
    known = within_reach(values, [v for c in shown.curves for v in (*c.low, *c.high) if v == v])
    known += [shown.level[0]] if shown.level else []
    if shown.from_zero or shown.y_log:
        return limits_of(known, ROOM, shown.y_log)
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = 2 * ROOM * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def draw_ideal(axes: Axes, shown: Curves) -> None:
    """Draw the line on which a speed-up is the number of workers, and end it where the data end."""
    known = [v for c in shown.curves for v in c.y if v == v]
    first, last = min(shown.x_ticks), min(max(shown.x_ticks), max(known, default=0))
    if last > 1.5 * first:
        axes.plot([first, last], [first, last], color=RULE, zorder=1.4)
        # Left of the line, where only what is better than ideal could lie.
        place = shifted(axes, -8, of=axes.transData)
        write(axes, last, last, "ideal", MUTED, ha="right", transform=place)


def dashes(lengths: str) -> Any:
    """Matplotlib's style of a line with dashes and gaps as SVG takes them."""
    return (0, [float(part) * PX for part in lengths.split()]) if lengths else "-"


def draw_curve(axes: Axes, curve: Curve, mark: Mark) -> None:
    """Draw a strategy's line, its marks and intervals."""
    colour, over = colour_of(mark, curve.chosen), 2 if curve.chosen else 0
    if curve.joined:
        width = 2.75 if curve.chosen else 1.25
        line = {"color": colour, "linewidth": width * PX, "linestyle": dashes(mark.dash)}
        axes.plot(curve.x, curve.y, zorder=3 + over, **line)
    for x, low, high in zip(curve.x, curve.low, curve.high, strict=False):
        if low == low:
            axes.plot([x, x], [low, high], color=colour, linewidth=1.5 * PX, zorder=3 + over)
    step = max(1, -(-len(curve.x) // MAX_MARKS))
    put_mark(
        axes, curve.x, curve.y, mark, curve.chosen, CHOSEN_MARK if curve.chosen else MARK,
        zorder=3.5 + over, markevery=step,
    )  # fmt: skip


def put_names(axes: Axes, names: Sequence[tuple[str, str, bool, tuple[float, float]]]) -> None:
    """Write names beside the ends of their lines, apart from each other: text, colour, whether bold, end."""
    written = [
        write(axes, 1, end[1], text, colour, bold=bold, transform=shifted(axes, NAMES_FROM))
        for text, colour, bold, end in names
    ]
    settle(axes)
    box, to_values = axes.bbox, axes.transData.inverted().transform
    wanted = [box.y1 - axes.transData.transform(end)[1] for *_, end in names]
    places = spread(wanted, 3, box.height, APART)
    for name, (*_, (x, y)), place in zip(written, names, places, strict=True):
        line = to_values([(box.x1 + NAMES_FROM - left, box.y1 - place) for left in (10, 3)])
        name.set_y(line[0][1])
        axes.plot([x, *line[:, 0]], [y, *line[:, 1]], color=LINE, zorder=1.3, clip_on=False)
