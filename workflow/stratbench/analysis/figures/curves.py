"""Figures of lines with their names beside their ends: over worker counts, epochs, time or staleness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.scales import Scale, padded, tick_text, within_reach
from stratbench.analysis.figures.sheet import (
    BAD,
    INK,
    LINE,
    LINE_HEIGHT,
    MUTED,
    RULE,
    WIDTH,
    colour_of,
    new_sheet,
    put_mark,
    shortened,
    stroke,
    text_width,
    write,
)

#: Room for the ticks at the left, above the highest point, and below for ticks and the axis' name.
LEFT, TOP, BELOW = 36, 12, 38
#: The heights of a plot: of few names, and the most that further ones make of it.
MIN_HEIGHT, MAX_HEIGHT = 160, 290
#: The widest column of names, and the distance of two of them.
MAX_NAMES, APART = 160, 14
#: The most lines of words below a figure.
MAX_NOTES = 6
#: The width of a mark on a line, of the chosen one's and of the others'.
CHOSEN_MARK, MARK = 9, 6
#: The most marks on a line.
MAX_MARKS = 10


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
    #: Strategies to name first where not all have room.
    named_first: Sequence[str] = ()


def draw_curves(shown: Curves) -> tuple[Figure, int]:
    """The figure, and how many of its strategies have no room for their name."""
    names = [text_width(c.strategy + c.suffix, c.chosen) for c in shown.curves]
    column = min(MAX_NAMES, 22 + max(names, default=0))
    right = WIDTH - column
    height = min(MAX_HEIGHT, max(MIN_HEIGHT, APART * (len(names) + 1)))
    notes = noted(shown.notes)
    below = TOP + height + BELOW
    axes = new_sheet(below + LINE_HEIGHT * len(notes) + (4 if notes else 0))
    y = y_scale(shown, TOP + height)
    left = left_of(y)
    x = x_scale(shown, left, right)
    frame(axes, x, y, x_labels(shown, x), shown.x_name)
    if shown.ideal:
        draw_ideal(axes, shown, x, y)
    if shown.level:
        at = y.at(shown.level[0])
        stroke(axes, [left, right], [at, at], MUTED, dash="2 2.5", zorder=1.5)
        write(axes, left + 4, at - 8, shown.level[1], MUTED)
    for curve in shown.curves:
        draw_curve(axes, curve, shown.marks[curve.strategy], x, y)
    unnamed = put_names(axes, shown, x, y, column)
    for i, note in enumerate(notes):
        write(axes, 1, below + LINE_HEIGHT * (i + 0.5), shortened(note, WIDTH), BAD)
    return axes.figure, unnamed


def bars_show(shown: Curves) -> bool:
    """Whether any interval is longer than the mark on it."""
    y = y_scale(shown, TOP + MIN_HEIGHT)
    return any(
        y.at(low) - y.at(high) > (CHOSEN_MARK if curve.chosen else MARK)
        for curve in shown.curves
        for low, high in zip(curve.low, curve.high, strict=True)
        if low == low
    )


def noted(notes: Sequence[str]) -> list[str]:
    """The lines of words that have room."""
    if len(notes) <= MAX_NOTES:
        return list(notes)
    return [*notes[: MAX_NOTES - 1], f"and {len(notes) - MAX_NOTES + 1} more: see the table"]


def x_scale(shown: Curves, start: float, end: float) -> Scale:
    """The horizontal scale: it holds all points, and no more."""
    known = [v for c in shown.curves for v in c.x] or list(shown.x_ticks) or [0.0, 1.0]
    low, high = min([*known, *shown.x_ticks]), max([*known, *shown.x_ticks])
    if low == high:
        low, high = (low / 2, high * 2) if shown.x_log else (low - 1, high + 1)
    return Scale(low, high, start + 6, end, shown.x_log, shown.x_whole)


def y_scale(shown: Curves, bottom: float) -> Scale:
    """The vertical scale, up to TOP: from 0, or from below the lowest point."""
    values = [v for c in shown.curves for v in c.y if v == v]
    ends = [v for c in shown.curves for of in (c.low, c.high) for v in of if v == v]
    known = within_reach(values, ends)
    known += [shown.level[0]] if shown.level else []
    if shown.from_zero or shown.y_log:
        flipped = padded(known, bottom, 2 * bottom - TOP, 6, shown.y_log)
        return Scale(flipped.low, flipped.high, bottom, TOP, shown.y_log)
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
    return Scale(low - room, high + room, bottom, TOP)


def x_labels(shown: Curves, scale: Scale) -> list[tuple[float, str]]:
    """Pixels and texts of the ticks below."""
    ticks = list(shown.x_ticks) or [t for t in scale.ticks() if not scale.whole or t == int(t)]
    return scale.labelled(ticks, shown.x_unit)


def left_of(y: Scale) -> float:
    """The pixel at which a plot begins, right of the texts of the vertical axis."""
    return max(LEFT, 7 + max(text_width(tick_text(tick)) for tick in y.ticks()))


def frame(axes: Axes, x: Scale, y: Scale, labels: Iterable[tuple[float, str]], name: str) -> None:
    """Draw the ticks of both axes; `labels`: pixels and texts of the horizontal one's."""
    for tick in y.ticks():
        at = y.at(tick)
        stroke(axes, [x.start, x.end], [at, at], LINE, zorder=1)
        write(axes, x.start - 5, at, tick_text(tick), MUTED, ha="right")
    stroke(axes, [x.start, x.end], [y.start, y.start], RULE, zorder=1.2)
    for at, text in labels:
        stroke(axes, [at, at], [y.start, y.start + 4], RULE, zorder=1.2)
        write(axes, at, y.start + 12, text, MUTED, ha="center")
    write(axes, (x.start + x.end) / 2, y.start + 28, name, MUTED, ha="center")


def draw_ideal(axes: Axes, shown: Curves, x: Scale, y: Scale) -> None:
    """Draw the line on which a speed-up is the number of workers, and end it where the data end."""
    last = min(x.high, max((v for c in shown.curves for v in c.y if v == v), default=x.low))
    if x.at(last) - x.at(x.low) > 30:
        ends = [x.low, last]
        stroke(axes, [x.at(v) for v in ends], [y.at(v) for v in ends], RULE, zorder=1.4)
        # Left of the line, where only what is better than ideal could lie.
        write(axes, x.at(last) - 6, y.at(last), "ideal", MUTED, ha="right")


def draw_curve(axes: Axes, curve: Curve, mark: Mark, x: Scale, y: Scale) -> None:
    """Draw a strategy's line, its marks and intervals."""
    colour = colour_of(mark, curve.chosen)
    at = [(x.at(a), y.at(b) if b == b else math.nan) for a, b in zip(curve.x, curve.y, strict=True)]
    over = 2 if curve.chosen else 0
    if curve.joined:
        across, down = zip(*at, strict=True) if at else ((), ())
        width = 2.75 if curve.chosen else 1.25
        stroke(axes, across, down, colour, width=width, dash=mark.dash, zorder=3 + over)
    for (across, _), low, high in zip(at, curve.low, curve.high, strict=False):
        if low == low:
            ends = [y.at(min(max(v, y.low), y.high)) for v in (low, high)]
            stroke(axes, [across, across], ends, colour, width=1.5, zorder=3 + over)
    size = CHOSEN_MARK if curve.chosen else MARK
    for across, down in at[:: max(1, -(-len(at) // MAX_MARKS))]:
        if down == down:
            put_mark(axes, across, down, mark, curve.chosen, size, 3.5 + over)


def put_names(axes: Axes, shown: Curves, x: Scale, y: Scale, column: float) -> int:
    """Write the names beside the ends of their lines; returns how many had no room."""
    ends = {}
    for i, curve in enumerate(shown.curves):
        known = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if b == b]
        if known:
            ends[i] = x.at(known[-1][0]), y.at(known[-1][1])
    room = 1 + int((y.start - y.end + 3) / APART)
    kept = first_named(shown, list(ends), room)
    places = spread([ends[i][1] for i in kept], y.end - 3, y.start)
    left = WIDTH - column + 16
    for i, place in zip(kept, places, strict=True):
        curve = shown.curves[i]
        across, down = ends[i]
        if abs(place - down) > 3 or left - across > 14:
            stroke(axes, [across + 6, left - 8, left - 3], [down, place, place], LINE, zorder=1.3)
        colour = colour_of(shown.marks[curve.strategy], True) if curve.chosen else INK
        name = shortened(curve.strategy + curve.suffix, WIDTH - left, curve.chosen)
        write(axes, left, place, name, colour, bold=curve.chosen)
    return len(ends) - len(kept)


def first_named(shown: Curves, known: Sequence[int], room: int) -> list[int]:
    """The curves that get a name: all if they have room, or the chosen one and those named first."""
    if len(known) <= room:
        return list(known)

    def rank(i: int) -> tuple[bool, int]:
        curve = shown.curves[i]
        first = shown.named_first
        place = first.index(curve.strategy) if curve.strategy in first else len(first)
        return not curve.chosen, place

    return sorted(sorted(known, key=rank)[:room])


def spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Places at least APART from each other, near the wanted ones, between `top` and `bottom`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [wanted[i] for i in order]
    # Groups of names that touch are centred on what they want.
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and low_end(groups[-1]) < high_end(groups[-2]) + APART:
            groups[-2:] = [groups[-2] + groups[-1]]
    found: list[float] = []
    for group in groups:
        first = min(max(low_end(group), top), bottom - APART * (len(group) - 1))
        found += [first + APART * i for i in range(len(group))]
    for i in range(len(found) - 2, -1, -1):  # what the bottom pushed up pushes further ones
        found[i] = min(found[i], found[i + 1] - APART)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + APART)
    placed = [0.0] * len(wanted)
    for i, place in zip(order, found, strict=True):
        placed[i] = place
    return placed


def low_end(group: Sequence[float]) -> float:
    """The first place of a group of names that is centred on what they want."""
    return sum(group) / len(group) - APART * (len(group) - 1) / 2


def high_end(group: Sequence[float]) -> float:
    """The last place of such a group."""
    return low_end(group) + APART * (len(group) - 1)
