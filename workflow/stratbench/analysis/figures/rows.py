"""Draws charts with a row per strategy: mark, name, values on a common scale, and the best value."""

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
    add_clipped_interval_ends,
    apply_layout,
    compute_axis_fraction,
    compute_limits,
    create_axes,
    create_shifted_transform,
    draw_mark,
    draw_row_name,
    draw_text,
    set_ticks,
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
    choose_colour,
)  # fmt: skip

#: Heights in pixels of the axis above, of a row, and of a further lane in a row for overlapping marks.
HEAD, ROW, LANE = 24, 24, 18
#: Width in pixels next to the axes for marks and the room around them.
MARGINS = 44
#: Width in pixels of a mark that contains a number of one or two digits, and of more digits.
DISC, WIDE_DISC = 17, 25
#: The rounded mark for a number of more than two digits.
_WIDE = BoxStyle.Round(pad=0, rounding_size=1)(-WIDE_DISC / DISC, -1, 2 * WIDE_DISC / DISC, 2, 1)


@dataclass(frozen=True)
class Point:
    """A value on a row of a chart, with the ends of the value's interval, if any."""

    value: float
    low: float | None = None
    high: float | None = None
    #: The number of workers, written in the mark; if empty, the strategy's own mark is drawn.
    workers_text: str = ""
    is_chosen: bool = False
    #: A part of the value that is drawn as a stroke.
    model_states_value: float | None = None


@dataclass(frozen=True)
class FigureRow:
    """A strategy's row in a chart: points, outcomes of cells without values, and the best value as text."""

    strategy: str
    points: Sequence[Point] = ()
    #: Outcomes of cells without a value: `OOM on 2`.
    missing_values_text: str = ""
    value_text: str = ""
    is_chosen: bool = False


@dataclass(frozen=True)
class RowChart:
    """Content and style of a chart of rows."""

    rows: Sequence[FigureRow]
    marks: Mapping[str, Mark]
    has_log_scale: bool = False
    unit: str = ""
    #: The ends of the shaded band of values that count as equal; None without a band.
    equality_band: tuple[float, float] | None = None
    #: A value at which a labelled line is drawn, such as the GPU's memory.
    labelled_limit: tuple[float, str] | None = None
    #: Heading above the values that are shown as text.
    value_heading: str = ""

    @classmethod
    def from_ratios(
        cls, rows: Sequence[FigureRow], marks: Mapping[str, Mark], margin: float, head: str = ""
    ) -> RowChart:
        """Return a chart of ratios, in which values within `margin` of 1 count as equal."""
        band = (1 / (1 + margin), 1 + margin)
        return cls(
            rows, marks, has_log_scale=True, unit="×", equality_band=band, value_heading=head
        )


@dataclass(frozen=True)
class RowScale:
    """The horizontal axis of a chart of rows: its ends, and its estimated width in pixels."""

    limits: tuple[float, float]
    log: bool
    width_px: float

    @classmethod
    def from_chart(cls, shown: RowChart) -> RowScale:
        """Return the scale that spans all points and their intervals."""
        letters = max((min(len(row.strategy), MAX_LETTERS) for row in shown.rows), default=0)
        letters += max(
            (len(text) for text in (shown.value_heading, *(r.value_text for r in shown.rows))),
            default=0,
        )
        width = WIDTH - MARGINS - LETTER * letters
        points = [p for row in shown.rows for p in row.points]
        values = [v for p in points for v in (p.value, p.model_states_value) if v is not None]
        values = add_clipped_interval_ends(
            values, [v for p in points for v in (p.low, p.high) if v is not None]
        )
        values += [
            *(shown.equality_band or ()),
            *([shown.labelled_limit[0]] if shown.labelled_limit else []),
        ]
        return cls(
            compute_limits(values, (DISC / 2 + 3) / width, shown.has_log_scale),
            shown.has_log_scale,
            width,
        )

    def compute_x_px(self, value: float) -> float:
        """Return the position of a value in pixels."""
        return self.width_px * compute_axis_fraction(value, self.limits, self.log)


def has_points(shown: RowChart) -> bool:
    """Return whether any row has a value, so that an axis is drawn."""
    return any(row.points for row in shown.rows)


def has_visible_row_intervals(shown: RowChart) -> bool:
    """Return whether any interval is wider than the mark of its point."""
    scale = RowScale.from_chart(shown)
    return any(
        scale.compute_x_px(p.high) - scale.compute_x_px(p.low) > compute_mark_width_px(p)
        for row in shown.rows
        for p in row.points
        if p.low is not None and p.high is not None
    )


def assign_lanes(row: FigureRow, scale: RowScale) -> Iterator[int]:
    """Yield the lane of each point: the first lane without an overlapping earlier point."""
    lanes: list[list[tuple[float, float]]] = []
    for point in row.points:
        at, half = scale.compute_x_px(point.value), compute_mark_width_px(point) / 2
        free = [all(abs(at - a) >= half + h for a, h in lane) for lane in lanes]
        chosen = free.index(True) if any(free) else len(lanes)
        lanes[chosen : chosen + 1] = [[*(lanes[chosen] if any(free) else ()), (at, half)]]
        yield chosen


def compute_mark_width_px(point: Point) -> float:
    """Return the width of a point's mark in pixels."""
    return WIDE_DISC if len(point.workers_text) > 2 else DISC


def draw_rows(shown: RowChart) -> Figure:
    """Draw the chart, with its rows in the given order."""
    scale = RowScale.from_chart(shown)
    lanes = [list(assign_lanes(row, scale)) for row in shown.rows]
    lowest = [LANE * max(of, default=0) for of in lanes]
    heights = [
        ROW + low + (LINE_HEIGHT if row.missing_values_text and row.points else 0)
        for row, low in zip(shown.rows, lowest, strict=True)
    ]
    axes = create_axes(HEAD + sum(heights) + (LINE_HEIGHT if shown.labelled_limit else 0))
    axes.set_ylim(sum(heights), 0)
    draw_scale(axes, shown, scale)
    for row, of, low, end, height in zip(
        shown.rows, lanes, lowest, accumulate(heights), heights, strict=True
    ):
        middle, mark = end - height + ROW / 2, shown.marks[row.strategy]
        draw_row_name(axes, middle, row.strategy, mark, row.is_chosen)
        axes.axhline(middle, color=LINE, zorder=1)
        full = choose_colour(mark, True) if row.is_chosen else MUTED
        draw_text(
            axes,
            1,
            middle,
            row.value_text,
            full,
            bold=row.is_chosen,
            transform=create_shifted_transform(axes, 6),
        )
        for point, lane in zip(row.points, of, strict=True):
            draw_point(axes, point, mark, middle + LANE * lane)
        if row.missing_values_text:
            # The text may extend below the values on the right, which are in another line.
            room = int((scale.width_px + MARGINS) / LETTER)
            words = (
                row.missing_values_text
                if len(row.missing_values_text) <= room
                else f"{row.missing_values_text[: room - 1]}…"
            )
            below = low + (ROW + LINE_HEIGHT) / 2 - 2 if row.points else 0
            paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0}
            draw_text(
                axes,
                0,
                middle + below,
                words,
                BAD,
                transform=create_shifted_transform(axes, 0),
                bbox=paper,
            )
    return apply_layout(axes)


def draw_scale(axes: Axes, shown: RowChart, scale: RowScale) -> None:
    """Draw the band of equal values, the ticks with grid lines, and the limit."""
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.tick_params("x", top=False, bottom=False, labeltop=True, labelbottom=False, pad=2 * PX)
    axes.grid(axis="x", visible=has_points(shown))
    if not has_points(shown):
        axes.set_xticks([])
        return
    set_ticks(axes.xaxis, scale.limits, shown.has_log_scale, unit=shown.unit)
    # The tick's text would touch the text to the right.
    if scale.compute_x_px(axes.get_xticks()[-1]) > scale.width_px - DISC:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    if shown.equality_band:
        axes.axvspan(*shown.equality_band, color=BAND, linewidth=0, zorder=0)
    if shown.value_heading:
        draw_text(
            axes,
            1,
            0,
            shown.value_heading,
            MUTED,
            va="bottom",
            transform=create_shifted_transform(axes, 6, 6),
        )
    if shown.labelled_limit:
        value, text = shown.labelled_limit
        axes.axvline(value, color=MUTED, linewidth=1.5 * PX, zorder=2)
        draw_text(axes, value, axes.get_ylim()[0] + LINE_HEIGHT / 2, text, MUTED, ha="right")


def draw_point(axes: Axes, point: Point, mark: Mark, y: float) -> None:
    """Draw a point of a row: its value, its interval, its stroke and its mark."""
    colour, chosen = choose_colour(mark, point.is_chosen), point.is_chosen
    if point.low is not None and point.high is not None:
        width = (3.5 if chosen else 1.75) * PX
        axes.plot([point.low, point.high], [y, y], color=colour, linewidth=width, zorder=2)
    if point.model_states_value is not None:
        axes.vlines(
            point.model_states_value, y - 7, y + 7, color=colour, linewidth=2 * PX, zorder=3
        )
    if not point.workers_text:
        draw_mark(axes, point.value, y, mark, chosen, 11 if chosen else 7.5)
        return
    wide = len(point.workers_text) > 2
    axes.plot(
        [point.value], [y], marker=_WIDE if wide else "o",
        markersize=(compute_mark_width_px(point) - 1.25) * PX,
        color=colour, markerfacecolor=colour if chosen else PAPER, markeredgewidth=1.25 * PX, zorder=5,
    )  # fmt: skip
    text = PAPER if chosen else INK
    draw_text(axes, point.value, y, point.workers_text, text, ha="center", bold=chosen, zorder=6)
