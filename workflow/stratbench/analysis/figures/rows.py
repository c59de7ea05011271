"""Figures with a row for each strategy: its mark and name, its values on one scale, its best in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import BoxStyle

from stratbench.analysis.figures.axes import (
    LETTER,
    MAX_LETTERS,
    limits_of,
    new_axes,
    put_mark,
    put_row_name,
    set_ticks,
    settle,
    share_of,
    shifted,
    within_reach,
    write,
)
from stratbench.analysis.figures.marks import Mark
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
    colour_of,
)  # fmt: skip

#: The height of the axis above, of a row, and of a further lane in it for marks that would overlap.
HEAD, ROW, LANE = 24, 24, 18
#: What is beside the axes but letters: marks, and room around them.
MARGINS = 44
#: The width of a mark with a number in it: of one or two digits, and of more.
DISC, WIDE_DISC = 17, 25
#: The mark of a number of more than two digits, a round one drawn long.
_WIDE = BoxStyle.Round(pad=0, rounding_size=1)(-WIDE_DISC / DISC, -1, 2 * WIDE_DISC / DISC, 2, 1)


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


@dataclass(frozen=True)
class RowScale:
    """The horizontal axis of a figure of rows: its ends, and its width in pixels, reckoned by letters."""

    limits: tuple[float, float]
    log: bool
    width: float

    @classmethod
    def of(cls, shown: Rows) -> RowScale:
        """The scale that holds all points and their intervals."""
        letters = max((min(len(row.strategy), MAX_LETTERS) for row in shown.rows), default=0)
        letters += max(
            (len(text) for text in (shown.head, *(r.told for r in shown.rows))), default=0
        )
        width = WIDTH - MARGINS - LETTER * letters
        points = [p for row in shown.rows for p in row.points]
        values = [v for p in points for v in (p.value, p.part) if v is not None]
        values = within_reach(values, [v for p in points for v in (p.low, p.high) if v is not None])
        values += [*(shown.band or ()), *([shown.limit[0]] if shown.limit else [])]
        return cls(limits_of(values, (DISC / 2 + 3) / width, shown.log), shown.log, width)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.width * share_of(value, self.limits, self.log)


def has_points(shown: Rows) -> bool:
    """Whether any row has a value; an axis is drawn for values alone."""
    return any(row.points for row in shown.rows)


def shows_intervals(shown: Rows) -> bool:
    """Whether any interval is wider than the mark on it."""
    scale = RowScale.of(shown)
    return any(
        scale.at(p.high) - scale.at(p.low) > width_of(p)
        for row in shown.rows
        for p in row.points
        if p.low is not None and p.high is not None
    )


def lanes_of(row: FigureRow, scale: RowScale) -> Iterator[int]:
    """The lane of each point: the first in which it overlaps no earlier one."""
    lanes: list[list[tuple[float, float]]] = []
    for point in row.points:
        at, half = scale.at(point.value), width_of(point) / 2
        free = [all(abs(at - a) >= half + h for a, h in lane) for lane in lanes]
        chosen = free.index(True) if any(free) else len(lanes)
        lanes[chosen : chosen + 1] = [[*(lanes[chosen] if any(free) else ()), (at, half)]]
        yield chosen


def width_of(point: Point) -> float:
    """The width of a point's mark in pixels."""
    return WIDE_DISC if len(point.number) > 2 else DISC


def draw_rows(shown: Rows) -> Figure:
    """The figure; rows are drawn in the order given."""
    scale = RowScale.of(shown)
    lanes = [list(lanes_of(row, scale)) for row in shown.rows]
    lowest = [LANE * max(of, default=0) for of in lanes]
    heights = [
        ROW + low + (LINE_HEIGHT if row.words and row.points else 0)
        for row, low in zip(shown.rows, lowest, strict=True)
    ]
    axes = new_axes(HEAD + sum(heights) + (LINE_HEIGHT if shown.limit else 0))
    axes.set_ylim(sum(heights), 0)
    draw_scale(axes, shown, scale)
    for row, of, low, end, height in zip(
        shown.rows, lanes, lowest, accumulate(heights), heights, strict=True
    ):
        middle, mark = end - height + ROW / 2, shown.marks[row.strategy]
        put_row_name(axes, middle, row.strategy, mark, row.chosen)
        axes.axhline(middle, color=LINE, zorder=1)
        full = colour_of(mark, True) if row.chosen else MUTED
        write(axes, 1, middle, row.told, full, bold=row.chosen, transform=shifted(axes, 6))
        for point, lane in zip(row.points, of, strict=True):
            draw_point(axes, point, mark, middle + LANE * lane)
        if row.words:
            room = int((scale.width + MARGINS) / LETTER)  # the values next to it are in other lines
            words = row.words if len(row.words) <= room else f"{row.words[: room - 1]}…"
            below = low + (ROW + LINE_HEIGHT) / 2 - 2 if row.points else 0
            paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0}
            write(axes, 0, middle + below, words, BAD, transform=shifted(axes, 0), bbox=paper)
    return settle(axes)


def draw_scale(axes: Axes, shown: Rows, scale: RowScale) -> None:
    """Draw the band of equals, the ticks above and their lines, and the limit."""
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.tick_params("x", top=False, bottom=False, labeltop=True, labelbottom=False, pad=2 * PX)
    axes.grid(axis="x", visible=has_points(shown))
    if not has_points(shown):
        axes.set_xticks([])
        return
    set_ticks(axes.xaxis, scale.limits, shown.log, unit=shown.unit)
    if scale.at(axes.get_xticks()[-1]) > scale.width - DISC:  # it would touch the words next to it
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    if shown.band:
        axes.axvspan(*shown.band, color=BAND, linewidth=0, zorder=0)
    if shown.head:
        write(axes, 1, 0, shown.head, MUTED, va="bottom", transform=shifted(axes, 6, 6))
    if shown.limit:
        value, text = shown.limit
        axes.axvline(value, color=MUTED, linewidth=1.5 * PX, zorder=2)
        write(axes, value, axes.get_ylim()[0] + LINE_HEIGHT / 2, text, MUTED, ha="right")


def draw_point(axes: Axes, point: Point, mark: Mark, y: float) -> None:
    """Draw a value: its interval, what is part of it, and its mark."""
    colour, chosen = colour_of(mark, point.chosen), point.chosen
    if point.low is not None and point.high is not None:
        width = (3.5 if chosen else 1.75) * PX
        axes.plot([point.low, point.high], [y, y], color=colour, linewidth=width, zorder=2)
    if point.part is not None:
        axes.vlines(point.part, y - 7, y + 7, color=colour, linewidth=2 * PX, zorder=3)
    if not point.number:
        put_mark(axes, point.value, y, mark, chosen, 11 if chosen else 7.5)
        return
    wide = len(point.number) > 2
    axes.plot(
        [point.value], [y], marker=_WIDE if wide else "o", markersize=(width_of(point) - 1.25) * PX,
        color=colour, markerfacecolor=colour if chosen else PAPER, markeredgewidth=1.25 * PX, zorder=5,
    )  # fmt: skip
    text = PAPER if chosen else INK
    write(axes, point.value, y, point.number, text, ha="center", bold=chosen, zorder=6)
