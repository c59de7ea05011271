"""Figures with a row for each strategy: its mark and name, its values on one scale, its best in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.scales import Scale, padded, within_reach
from stratbench.analysis.figures.sheet import (
    BAD,
    BAND,
    INK,
    LINE,
    LINE_HEIGHT,
    MUTED,
    PAPER,
    PX,
    WIDTH,
    box,
    colour_of,
    new_sheet,
    put_mark,
    shortened,
    stroke,
    text_width,
    write,
)

#: The widest column of names, the column of the values in words, and the height of the axis above.
MAX_NAME, VALUES, HEAD = 158, 58, 20
#: The height of a row, and of a further lane in it for marks that would overlap.
ROW, LANE = 24, 18
#: The width of a mark with a number in it: of one or two digits, and of more.
DISC, WIDE_DISC = 17, 25


@dataclass(frozen=True)
class Point:
    """A value on a row, with the ends of its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None
    #: The number of workers, in the mark; empty: the strategy's own mark is drawn.
    number: str = ""
    chosen: bool = False
    #: A further value that is part of this one, drawn as a stroke.
    part: float | None = None


@dataclass(frozen=True)
class FigureRow:
    """A strategy: its points, the outcomes of the rest in words, and its best in words."""

    strategy: str
    points: Sequence[Point] = ()
    #: Cells without a value: `OOM on 2`.
    words: str = ""
    told: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Rows:
    """What a figure of rows shows, and how."""

    rows: Sequence[FigureRow]
    marks: Mapping[str, Mark]
    log: bool = False
    unit: str = ""
    #: The values between which all count as equal; None: nothing is shaded.
    band: tuple[float, float] | None = None
    #: A value at which a line with a word is drawn, such as the card's memory.
    limit: tuple[float, str] | None = None
    #: What stands above the values in words.
    head: str = ""

    @classmethod
    def of_ratios(
        cls, rows: Sequence[FigureRow], marks: Mapping[str, Mark], margin: float, head: str = ""
    ) -> Rows:
        """Rows of ratios; those within `margin` of 1 count as equal."""
        band = (1 / (1 + margin), 1 + margin)
        return cls(rows, marks, log=True, unit="×", band=band, head=head)


def draw_rows(shown: Rows) -> Figure:
    """The figure; rows are drawn in the order given."""
    scale = scale_of(shown)
    lanes = [list(lanes_of(row, scale)) for row in shown.rows]
    heights = [height_of(row, of) for row, of in zip(shown.rows, lanes, strict=True)]
    bottom = HEAD + sum(heights) + (LINE_HEIGHT if shown.limit else 0)
    axes = new_sheet(bottom + 4)
    if has_points(shown):
        draw_scale(axes, shown, scale, HEAD + sum(heights))
    top: float = HEAD
    for row, of, height in zip(shown.rows, lanes, heights, strict=True):
        draw_row(axes, shown, row, of, top, scale)
        top += height
    return axes.figure


def has_points(shown: Rows) -> bool:
    """Whether any row has a value; an axis is drawn for values alone."""
    return any(row.points for row in shown.rows)


def shows_intervals(shown: Rows) -> bool:
    """Whether any interval is wider than the mark on it."""
    scale = scale_of(shown)
    return any(
        scale.at(p.high) - scale.at(p.low) > width_of(p)
        for row in shown.rows
        for p in row.points
        if p.low is not None and p.high is not None
    )


def name_column(names: Iterator[tuple[str, bool]]) -> float:
    """The width of the column of marks and names; with each name, whether it is the chosen one's."""
    return min(MAX_NAME, 26 + max((text_width(*name) for name in names), default=0))


def put_name(
    axes: Axes, strategy: str, mark: Mark, chosen: bool, middle: float, end: float
) -> None:
    """Draw a strategy's mark and write its name, in a column that ends at pixel `end`."""
    put_mark(axes, 7, middle, mark, chosen, 8.5)
    write(axes, 18, middle, shortened(strategy, end - 26, chosen), bold=chosen)


def scale_of(shown: Rows) -> Scale:
    """The scale that holds all points and their intervals, between the names and the values in words."""
    left = name_column((row.strategy, row.chosen) for row in shown.rows)
    right = WIDTH - max([VALUES, *(text_width(row.told, row.chosen) + 8 for row in shown.rows)])
    points = [p for row in shown.rows for p in row.points]
    values = [v for p in points for v in (p.value, p.part) if v is not None]
    values = within_reach(values, [v for p in points for v in (p.low, p.high) if v is not None])
    values += [*(shown.band or ()), *([shown.limit[0]] if shown.limit else [])]
    return padded(values, left, right, DISC / 2 + 3, shown.log)


def lanes_of(row: FigureRow, scale: Scale) -> Iterator[int]:
    """The lane of each point: the first in which it overlaps no earlier one."""
    ends: list[list[tuple[float, float]]] = []
    for point in row.points:
        half = width_of(point) / 2
        at = scale.at(point.value)
        span = at - half, at + half
        lane = 0
        while lane < len(ends) and any(a < span[1] and span[0] < b for a, b in ends[lane]):
            lane += 1
        if lane == len(ends):
            ends.append([])
        ends[lane].append(span)
        yield lane


def width_of(point: Point) -> float:
    """The width of a point's mark in pixels."""
    return WIDE_DISC if len(point.number) > 2 else DISC


def height_of(row: FigureRow, lanes: Sequence[int]) -> float:
    """The height of a row with these lanes."""
    further = max(lanes, default=0) * LANE
    words = LINE_HEIGHT if row.words and row.points else 0
    return ROW + further + words


def draw_scale(axes: Axes, shown: Rows, scale: Scale, bottom: float) -> None:
    """Draw the band of equals, the ticks above and their lines, and the limit."""
    if shown.band:
        low, high = (scale.at(min(max(v, scale.low), scale.high)) for v in shown.band)
        box(axes, low, HEAD - 2, high - low, bottom - HEAD + 2, BAND, zorder=0)
    for at, text in scale.labelled(scale.ticks(), shown.unit):
        stroke(axes, [at, at], [HEAD - 2, bottom], LINE, zorder=1)
        half = text_width(text) / 2
        write(axes, min(at, WIDTH - VALUES - half), 9, text, MUTED, ha="center")
    if shown.head:
        write(axes, WIDTH, 9, shown.head, MUTED, ha="right")
    if shown.limit:
        at = scale.at(shown.limit[0])
        stroke(axes, [at, at], [HEAD - 2, bottom], MUTED, zorder=2, width=1.5)
        write(axes, at, bottom + 9, shown.limit[1], MUTED, ha="right")


def draw_row(
    axes: Axes, shown: Rows, row: FigureRow, lanes: Sequence[int], top: float, scale: Scale
) -> None:
    """Draw one strategy."""
    mark, middle = shown.marks[row.strategy], top + ROW / 2
    put_name(axes, row.strategy, mark, row.chosen, middle, scale.start)
    stroke(axes, [scale.start, scale.end], [middle, middle], LINE, zorder=1)
    for point, lane in zip(row.points, lanes, strict=True):
        draw_point(axes, point, mark, middle + lane * LANE, scale)
    if row.words:
        below = max(lanes, default=0) * LANE + (ROW + LINE_HEIGHT) / 2 - 2 if row.points else 0
        put_words(axes, row.words, middle + below, scale)
    full = colour_of(mark, True) if row.chosen else MUTED
    write(axes, WIDTH, middle, row.told, full, ha="right", bold=row.chosen)


def put_words(axes: Axes, words: str, y: float, scale: Scale) -> None:
    """Write the outcomes of cells without a value."""
    room = WIDTH - scale.start
    words = words if text_width(words) <= room else f"{words[: int(room / 6.5)]}…"
    wide = min(room, text_width(words) * 0.95)
    box(axes, scale.start, y - 7, wide, 14, PAPER, zorder=3)
    write(axes, scale.start, y, words, BAD, zorder=4)


def draw_point(axes: Axes, point: Point, mark: Mark, y: float, scale: Scale) -> None:
    """Draw a value: its interval, what is part of it, and its mark."""
    at, colour = scale.at(point.value), colour_of(mark, point.chosen)
    if point.low is not None and point.high is not None:
        ends = [scale.at(min(max(v, scale.low), scale.high)) for v in (point.low, point.high)]
        stroke(axes, ends, [y, y], colour, width=3.5 if point.chosen else 1.75, zorder=2)
    if point.part is not None:
        part = scale.at(point.part)
        stroke(axes, [part, part], [y - 7, y + 7], colour, width=2, zorder=3)
    if not point.number:
        put_mark(axes, at, y, mark, point.chosen, 11 if point.chosen else 7.5)
        return
    disc(axes, at, y, width_of(point), colour, point.chosen)
    text = PAPER if point.chosen else INK
    write(axes, at, y, point.number, text, ha="center", zorder=6, bold=point.chosen)


def disc(axes: Axes, x: float, y: float, width: float, colour: str, filled: bool) -> None:
    """Draw a mark with room for a number, filled or as a ring."""
    inset = 0 if filled else 0.75  # about half of the ring's line
    inside, line_px = (colour, 0) if filled else (PAPER, 1.25)
    look = {"facecolor": inside, "edgecolor": colour, "linewidth": line_px * PX, "zorder": 5}
    radius = DISC / 2 - inset
    if width == DISC:
        axes.add_patch(Circle((x, y), radius, **look))
        return
    shape = f"round,pad=0,rounding_size={radius}"
    corner, height = (x - width / 2 + inset, y - radius), 2 * radius
    axes.add_patch(FancyBboxPatch(corner, width - 2 * inset, height, boxstyle=shape, **look))
