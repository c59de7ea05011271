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
    compute_axis_limits,
    create_figure_axes,
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
    choose_mark_colour,
)  # fmt: skip

#: Heights in pixels of the axis at the top, of a row, and of each further lane for a row's overlapping marks.
HEAD, ROW, LANE = 24, 24, 18
#: Total width in pixels of the marks next to strategies' names and of free room beside the axes.
MARGINS = 44
#: Width in pixels of a mark with a number of at most two digits in it, and of one with more digits.
DISC, WIDE_DISC = 17, 25
#: Shape of a mark with a number of more than two digits in it: a rounded rectangle.
_WIDE = BoxStyle.Round(pad=0, rounding_size=1)(-WIDE_DISC / DISC, -1, 2 * WIDE_DISC / DISC, 2, 1)


@dataclass(frozen=True)
class Point:
    """A value on a row of a chart, with the ends of the value's interval, if any."""

    value: float
    interval_low: float | None = None
    interval_high: float | None = None
    #: The number of workers, which is written in the mark. If empty, the strategy's own mark is drawn.
    workers_text: str = ""
    is_chosen_candidate: bool = False
    #: The part of the value that model states take, drawn as a short vertical line.
    model_states_value: float | None = None


@dataclass(frozen=True)
class FigureRow:
    """A strategy's row in a chart: points, outcomes of cells without a value, and the best value."""

    strategy: str
    points: Sequence[Point] = ()
    #: Outcomes of cells without a value: `OOM on 2`.
    outcomes_without_value_text: str = ""
    best_value_text: str = ""
    is_chosen_strategy: bool = False


@dataclass(frozen=True)
class RowChart:
    """Content and style of a chart with a row per strategy."""

    rows: Sequence[FigureRow]
    marks_by_strategy: Mapping[str, Mark]
    has_log_scale: bool = False
    unit: str = ""
    #: The ends of the shaded band of values that count as equal; None without a band.
    equality_band: tuple[float, float] | None = None
    #: A value at which a vertical line is drawn, such as the GPU's memory, and the line's label.
    vertical_line_and_label: tuple[float, str] | None = None
    #: Heading above the values that are shown as text.
    value_text_heading: str = ""

    @classmethod
    def from_ratio_rows(
        cls,
        rows: Sequence[FigureRow],
        marks: Mapping[str, Mark],
        margin: float,
        value_heading: str = "",
    ) -> RowChart:
        """Return a chart of ratios, in which ratios within `margin` of 1 count as equal."""
        return cls(
            rows,
            marks,
            has_log_scale=True,
            unit="×",
            equality_band=(1 / (1 + margin), 1 + margin),
            value_text_heading=value_heading,
        )


@dataclass(frozen=True)
class RowScale:
    """The horizontal axis of a chart of rows: its ends, and its width in pixels (an estimate)."""

    axis_limits: tuple[float, float]
    is_logarithmic: bool
    axis_width_px: float

    @classmethod
    def from_chart(cls, chart: RowChart) -> RowScale:
        """Return the axis that spans all points of a chart and their intervals."""
        letters = max((min(len(row.strategy), MAX_LETTERS) for row in chart.rows), default=0)
        letters += max(
            (
                len(text)
                for text in (chart.value_text_heading, *(r.best_value_text for r in chart.rows))
            ),
            default=0,
        )
        width = WIDTH - MARGINS - LETTER * letters
        points = [p for row in chart.rows for p in row.points]
        values = [v for p in points for v in (p.value, p.model_states_value) if v is not None]
        values = add_clipped_interval_ends(
            values, [v for p in points for v in (p.interval_low, p.interval_high) if v is not None]
        )
        values += [
            *(chart.equality_band or ()),
            *([chart.vertical_line_and_label[0]] if chart.vertical_line_and_label else []),
        ]
        return cls(
            compute_axis_limits(values, (DISC / 2 + 3) / width, chart.has_log_scale),
            chart.has_log_scale,
            width,
        )

    def compute_pixel_position(self, value: float) -> float:
        """Return the horizontal position of a value in pixels."""
        return self.axis_width_px * compute_axis_fraction(
            value, self.axis_limits, self.is_logarithmic
        )


def has_any_point(chart: RowChart) -> bool:
    """Return whether any row of a chart has a point. Only then is an axis drawn."""
    return any(row.points for row in chart.rows)


def has_visible_row_intervals(chart: RowChart) -> bool:
    """Return whether any interval of a chart is wider than the mark of its point."""
    scale = RowScale.from_chart(chart)
    return any(
        scale.compute_pixel_position(p.interval_high) - scale.compute_pixel_position(p.interval_low)
        > compute_point_mark_width_px(p)
        for row in chart.rows
        for p in row.points
        if p.interval_low is not None and p.interval_high is not None
    )


def iter_non_overlapping_lane_indices(row: FigureRow, scale: RowScale) -> Iterator[int]:
    """Yield the lane of each point of a row. It is the first one without an overlapping earlier point."""
    lanes: list[list[tuple[float, float]]] = []
    for point in row.points:
        at, half = scale.compute_pixel_position(point.value), compute_point_mark_width_px(point) / 2
        free = [all(abs(at - a) >= half + h for a, h in lane) for lane in lanes]
        chosen = free.index(True) if any(free) else len(lanes)
        lanes[chosen : chosen + 1] = [[*(lanes[chosen] if any(free) else ()), (at, half)]]
        yield chosen


def compute_point_mark_width_px(point: Point) -> float:
    """Return the width of a point's mark in pixels."""
    return WIDE_DISC if len(point.workers_text) > 2 else DISC


def draw_row_chart(chart: RowChart) -> Figure:
    """Draw a chart with its rows in the given order."""
    scale = RowScale.from_chart(chart)
    lanes = [list(iter_non_overlapping_lane_indices(row, scale)) for row in chart.rows]
    lowest = [LANE * max(of, default=0) for of in lanes]
    heights = [
        ROW + low + (LINE_HEIGHT if row.outcomes_without_value_text and row.points else 0)
        for row, low in zip(chart.rows, lowest, strict=True)
    ]
    axes = create_figure_axes(
        HEAD + sum(heights) + (LINE_HEIGHT if chart.vertical_line_and_label else 0)
    )
    axes.set_ylim(sum(heights), 0)
    draw_horizontal_scale(axes, chart, scale)
    for row, of, low, end, height in zip(
        chart.rows, lanes, lowest, accumulate(heights), heights, strict=True
    ):
        middle, mark = end - height + ROW / 2, chart.marks_by_strategy[row.strategy]
        draw_row_name(axes, middle, row.strategy, mark, row.is_chosen_strategy)
        axes.axhline(middle, color=LINE, zorder=1)
        full = choose_mark_colour(mark, True) if row.is_chosen_strategy else MUTED
        draw_text(
            axes,
            1,
            middle,
            row.best_value_text,
            full,
            bold=row.is_chosen_strategy,
            transform=create_shifted_transform(axes, 6),
        )
        for point, lane in zip(row.points, of, strict=True):
            draw_point_of_row(axes, point, mark, middle + LANE * lane)
        if row.outcomes_without_value_text:
            # This text has a line of its own, so it may extend to the right of the axes.
            room = int((scale.axis_width_px + MARGINS) / LETTER)
            words = (
                row.outcomes_without_value_text
                if len(row.outcomes_without_value_text) <= room
                else f"{row.outcomes_without_value_text[: room - 1]}…"
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


def draw_horizontal_scale(axes: Axes, chart: RowChart, scale: RowScale) -> None:
    """Draw the background of the points.

    It has a band of equal values, ticks with grid lines, and a line with a label.
    """
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.tick_params("x", top=False, bottom=False, labeltop=True, labelbottom=False, pad=2 * PX)
    axes.grid(axis="x", visible=has_any_point(chart))
    if not has_any_point(chart):
        axes.set_xticks([])
        return
    set_ticks(axes.xaxis, scale.axis_limits, chart.has_log_scale, unit=chart.unit)
    # A centred text of the last tick would touch the heading to its right.
    if scale.compute_pixel_position(axes.get_xticks()[-1]) > scale.axis_width_px - DISC:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    if chart.equality_band:
        axes.axvspan(*chart.equality_band, color=BAND, linewidth=0, zorder=0)
    if chart.value_text_heading:
        draw_text(
            axes,
            1,
            0,
            chart.value_text_heading,
            MUTED,
            va="bottom",
            transform=create_shifted_transform(axes, 6, 6),
        )
    if chart.vertical_line_and_label:
        value, text = chart.vertical_line_and_label
        axes.axvline(value, color=MUTED, linewidth=1.5 * PX, zorder=2)
        draw_text(axes, value, axes.get_ylim()[0] + LINE_HEIGHT / 2, text, MUTED, ha="right")


def draw_point_of_row(axes: Axes, point: Point, mark: Mark, y: float) -> None:
    """Draw a point of a row: interval, line of model states, and mark."""
    colour, chosen = choose_mark_colour(mark, point.is_chosen_candidate), point.is_chosen_candidate
    if point.interval_low is not None and point.interval_high is not None:
        width = (3.5 if chosen else 1.75) * PX
        axes.plot(
            [point.interval_low, point.interval_high],
            [y, y],
            color=colour,
            linewidth=width,
            zorder=2,
        )
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
        markersize=(compute_point_mark_width_px(point) - 1.25) * PX,
        color=colour, markerfacecolor=colour if chosen else PAPER, markeredgewidth=1.25 * PX, zorder=5,
    )  # fmt: skip
    text = PAPER if chosen else INK
    draw_text(axes, point.value, y, point.workers_text, text, ha="center", bold=chosen, zorder=6)
