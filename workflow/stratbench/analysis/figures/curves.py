"""Draws line charts with a name at each line's end: over worker counts, epochs, time or staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stratbench.analysis.figures.axes import (
    LETTER,
    add_clipped_interval_ends,
    apply_layout,
    compute_axis_limits,
    create_figure_axes,
    create_shifted_transform,
    draw_mark,
    draw_text,
    find_root_figure,
    set_ticks,
    shorten_name,
    spread_overlapping_positions,
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
    choose_mark_colour,
)  # fmt: skip

#: Height in pixels for ticks and axis label below the plot, and for the room above its highest point.
BELOW = 50
#: Minimum height of a plot in pixels; many names make it higher.
MIN_HEIGHT = 160
#: Minimum distance in pixels between two names of lines, and distance from the plot to the names.
APART, NAMES_FROM = 14, 18
#: Maximum number of notes below a figure, each a line.
MAX_NOTES = 6
#: Width in pixels of a mark on the chosen strategy's line, and on other lines.
CHOSEN_MARK, MARK = 9, 6
#: Maximum number of marks on a line.
MAX_MARKS = 10
#: Room between the outermost point and the end of an axis, as a fraction of the axis.
ROOM = 0.03


@dataclass(frozen=True)
class Curve:
    """A strategy's line in a chart: its points in order, and the ends of their intervals, if any."""

    strategy: str
    x_values: Sequence[float]
    y_values: Sequence[float]
    interval_low: Sequence[float] = ()
    interval_high: Sequence[float] = ()
    is_chosen_strategy: bool = False
    #: Text after the strategy's name, such as a dagger.
    text_after_name: str = ""


class LineName(NamedTuple):
    """The name of a line in a chart, and the last point of the line."""

    text: str
    colour: str
    is_bold: bool
    last_point: tuple[float, float]


@dataclass(frozen=True)
class CurveChart:
    """Content and style of a line chart."""

    curves: Sequence[Curve]
    marks_by_strategy: Mapping[str, Mark]
    x_label: str
    x_unit: str = ""
    #: Ticks of the horizontal axis; round numbers if empty.
    x_ticks: Sequence[float] = ()
    has_log_x: bool = False
    has_whole_x_ticks: bool = False
    has_log_y: bool = False
    #: Whether the vertical axis begins at 0.
    y_starts_at_zero: bool = True
    #: Whether to draw the line y = x, up to the largest value.
    draws_ideal_line: bool = False
    #: A value of y at which a horizontal line is drawn, and the line's label; None without a line.
    horizontal_line_and_label: tuple[float, str] | None = None
    #: Notes below the chart on cells without points, each in its own line.
    notes: Sequence[str] = ()


def draw_curves(chart: CurveChart) -> Figure:
    """Draw a line chart that is high enough for the names of all lines."""
    height = max(MIN_HEIGHT, APART * (len(chart.curves) + 1))
    notes = limit_number_of_notes(chart.notes)
    axes = create_figure_axes(height + BELOW + LINE_HEIGHT * len(notes))
    set_ticks(axes.yaxis, compute_y_limits(chart), chart.has_log_y)
    set_ticks(
        axes.xaxis,
        compute_x_limits(chart),
        chart.has_log_x,
        tick_values=chart.x_ticks,
        unit=chart.x_unit,
        integers_only=chart.has_whole_x_ticks,
    )
    axes.set_xlabel(chart.x_label)
    if notes:
        below = {"x": 0, "ha": "left", "color": BAD, "size": axes.xaxis.label.get_fontsize()}
        most = int(WIDTH / LETTER)
        find_root_figure(axes).supxlabel(
            "\n".join(shorten_name(note, most) for note in notes), **below
        )
    if chart.draws_ideal_line:
        draw_ideal_speedup_line(axes, chart)
    if chart.horizontal_line_and_label:
        axes.axhline(
            chart.horizontal_line_and_label[0],
            color=MUTED,
            linestyle=parse_dash_pattern("2 2.5"),
            zorder=1.5,
        )
        draw_text(
            axes,
            0,
            *chart.horizontal_line_and_label,
            MUTED,
            va="bottom",
            transform=create_shifted_transform(axes, 4),
        )
    names = []
    for curve in chart.curves:
        mark, text = (
            chart.marks_by_strategy[curve.strategy],
            shorten_name(curve.strategy) + curve.text_after_name,
        )
        draw_curve(axes, curve, mark)
        if known := [(x, y) for x, y in zip(curve.x_values, curve.y_values, strict=True) if y == y]:
            colour = choose_mark_colour(mark, True) if curve.is_chosen_strategy else INK
            names.append(LineName(text, colour, curve.is_chosen_strategy, known[-1]))
    write_line_names(axes, names)
    return find_root_figure(axes)


def has_visible_intervals(chart: CurveChart) -> bool:
    """Return whether any interval of a chart is longer than the mark of its point."""
    low_end, high_end = (math.log(v) if chart.has_log_y else v for v in compute_y_limits(chart))
    ends = (
        (low, high, CHOSEN_MARK if curve.is_chosen_strategy else MARK)
        for curve in chart.curves
        for low, high in zip(curve.interval_low, curve.interval_high, strict=True)
        if low == low
    )
    share = ((math.log(h / low) if chart.has_log_y else h - low, mark) for low, h, mark in ends)
    return any(MIN_HEIGHT * part / (high_end - low_end) > mark for part, mark in share)


def limit_number_of_notes(notes: Sequence[str]) -> list[str]:
    """Return at most MAX_NOTES notes, of which the last one counts any omitted notes."""
    if len(notes) <= MAX_NOTES:
        return list(notes)
    return [*notes[: MAX_NOTES - 1], f"and {len(notes) - MAX_NOTES + 1} more: see the table"]


def compute_x_limits(chart: CurveChart) -> tuple[float, float]:
    """Return the ends of the horizontal axis, which spans exactly the points and ticks."""
    known = [*(v for c in chart.curves for v in c.x_values), *chart.x_ticks] or [0.0, 1.0]
    low, high = min(known), max(known)
    if low == high:
        return (low / 2, high * 2) if chart.has_log_x else (low - 1, high + 1)
    if chart.has_log_x:
        return low / (high / low) ** ROOM, high
    return low - ROOM * (high - low), high


def compute_y_limits(chart: CurveChart) -> tuple[float, float]:
    """Return the ends of the vertical axis. It begins at 0 or below the lowest point."""
    values = [v for c in chart.curves for v in c.y_values if v == v]
    known = add_clipped_interval_ends(
        values, [v for c in chart.curves for v in (*c.interval_low, *c.interval_high) if v == v]
    )
    known += [chart.horizontal_line_and_label[0]] if chart.horizontal_line_and_label else []
    if chart.y_starts_at_zero or chart.has_log_y:
        return compute_axis_limits(known, ROOM, chart.has_log_y)
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = 2 * ROOM * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def draw_ideal_speedup_line(axes: Axes, chart: CurveChart) -> None:
    """Draw the line of ideal speedup (n on n workers), up to the largest value."""
    known = [v for c in chart.curves for v in c.y_values if v == v]
    first, last = min(chart.x_ticks), min(max(chart.x_ticks), max(known, default=0))
    if last > 1.5 * first:
        axes.plot([first, last], [first, last], color=RULE, zorder=1.4)
        # The label is left of the line, where no points are: they would be better than ideal.
        place = create_shifted_transform(axes, -8, transform=axes.transData)
        draw_text(axes, last, last, "ideal", MUTED, ha="right", transform=place)


def parse_dash_pattern(svg_dash_pattern: str) -> Any:
    """Return matplotlib's line style for a dash pattern in SVG's notation, such as `6 3`."""
    return (0, [float(part) * PX for part in svg_dash_pattern.split()]) if svg_dash_pattern else "-"


def draw_curve(axes: Axes, curve: Curve, mark: Mark) -> None:
    """Draw a strategy's line with its marks and intervals."""
    colour, over = (
        choose_mark_colour(mark, curve.is_chosen_strategy),
        2 if curve.is_chosen_strategy else 0,
    )
    width = 2.75 if curve.is_chosen_strategy else 1.25
    line = {
        "color": colour,
        "linewidth": width * PX,
        "linestyle": parse_dash_pattern(mark.line_dash_pattern),
    }
    axes.plot(curve.x_values, curve.y_values, zorder=3 + over, **line)
    for x, low, high in zip(curve.x_values, curve.interval_low, curve.interval_high, strict=False):
        if low == low:
            axes.plot([x, x], [low, high], color=colour, linewidth=1.5 * PX, zorder=3 + over)
    step = max(1, -(-len(curve.x_values) // MAX_MARKS))
    width_px = CHOSEN_MARK if curve.is_chosen_strategy else MARK
    draw_mark(
        axes, curve.x_values, curve.y_values, mark, curve.is_chosen_strategy, width_px,
        zorder=3.5 + over, markevery=step,
    )  # fmt: skip


def write_line_names(axes: Axes, names: Sequence[LineName]) -> None:
    """Write the name of each line next to the line's end. Names do not overlap."""
    written = [
        draw_text(
            axes,
            1,
            name.last_point[1],
            name.text,
            name.colour,
            bold=name.is_bold,
            transform=create_shifted_transform(axes, NAMES_FROM),
        )
        for name in names
    ]
    apply_layout(axes)
    box, to_values = axes.bbox, axes.transData.inverted().transform
    wanted = [box.y1 - axes.transData.transform(name.last_point)[1] for name in names]
    places = spread_overlapping_positions(wanted, 3, box.height, APART)
    for text, name, place in zip(written, names, places, strict=True):
        line = to_values([(box.x1 + NAMES_FROM - left, box.y1 - place) for left in (10, 3)])
        text.set_y(line[0][1])
        x, y = name.last_point
        axes.plot([x, *line[:, 0]], [y, *line[:, 1]], color=LINE, zorder=1.3, clip_on=False)
