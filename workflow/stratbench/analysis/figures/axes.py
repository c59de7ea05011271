"""Common parts of figures on matplotlib axes: size, round ticks, names next to the axes, and marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Transform, offset_copy

from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.sheet import INK, MARKERS, PAPER, PX, WIDTH, choose_mark_colour

#: Assumed width of a letter in pixels, for estimates before the layout is computed.
LETTER = 7.2
#: Maximum number of shown letters of a strategy's name.
MAX_LETTERS = 20
#: Sets of leading digits for ticks on a logarithmic scale; the first set that gives three ticks is used.
FIRST_DIGITS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
#: Fractions of a horizontal axis: the free room next to a tick's text, and the width of a letter.
TICK_SHARE, LETTER_SHARE = 0.02, 0.045
#: Factors by which shapes are enlarged or reduced to look equally large.
_LARGER = {"star": 1.5, "circle": 1.05, "hexagon": 1.15, "diamond": 0.95}


def create_figure_axes(height_px: float) -> Axes:
    """Return the axes of a new figure. It is WIDTH pixels wide and `height_px` pixels high."""
    return plt.subplots(figsize=(WIDTH / 96, height_px / 96))[1]


def find_root_figure(axes: Axes) -> Figure:
    """Return the figure that contains the axes."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def apply_layout(axes: Axes) -> Figure:
    """Arrange the axes so that all texts have room, and return the figure. Pixel positions are then final."""
    figure = find_root_figure(axes)
    for drawn in (*axes.lines, *axes.patches, *axes.collections):
        drawn.set_in_layout(False)  # the layout makes room only for texts
    ConstrainedLayoutEngine(h_pad=2 / 96, w_pad=2 / 96).execute(figure)
    return figure


def compute_axis_limits(
    values: Iterable[float], margin_fraction: float, is_log_axis: bool
) -> tuple[float, float]:
    """Return the lower and upper end of an axis that shows all values.

    Args:
        values: Values to show; infinite ones are ignored.
        margin_fraction: Extra room as a fraction of the axis.
        is_log_axis: Whether the axis is logarithmic; linear axes begin at 0.
    """
    known = [v for v in values if math.isfinite(v) and (v > 0 or not is_log_axis)]
    if not is_log_axis:
        return 0.0, (max([*known, 0.0]) or 1.0) * (1 + margin_fraction)
    low, high = min(known, default=1.0), max(known, default=10.0)
    if high / low < 1.2:  # without more room, a difference of a few percent would fill the axis
        low, high = low / 1.1, high * 1.1
    room = (high / low) ** margin_fraction
    return low / room, high * room


def add_clipped_interval_ends(values: list[float], interval_ends: Iterable[float]) -> list[float]:
    """Return the values together with the ends of their intervals. Ends far from all values are clipped."""
    if not values:
        return values
    low, high = min(values), max(values)
    low, high = low - 0.5 * abs(low), high + 0.5 * abs(high)
    return [*values, *(min(max(end, low), high) for end in interval_ends)]


def compute_axis_fraction(
    value: float, axis_limits: tuple[float, float], is_log_axis: bool
) -> float:
    """Return a value's position on an axis as a fraction from 0 to 1."""
    low, high, at = (math.log(v) if is_log_axis else v for v in (*axis_limits, value))
    return (at - low) / (high - low)


def compute_round_ticks(
    axis_limits: tuple[float, float], is_log_axis: bool, integers_only: bool = False
) -> list[float]:
    """Return about four round values between the ends of an axis, as ticks."""
    low, high = axis_limits
    ticks: list[float] = []
    for digits in FIRST_DIGITS if is_log_axis else ():
        values = LogLocator(subs=digits, numticks=9).tick_values(low, high)
        ticks = [float(t) for t in values if low <= t <= high]
        if len(ticks) > 2:
            return ticks[:: -(-len(ticks) // 6)]
    if len(ticks) < 2:
        steps = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=integers_only).tick_values(
            low, high
        )
        room = 1e-9 * (high - low)
        ticks = [float(t) for t in steps if low - room <= t <= high + room]
    return ticks if len(ticks) > 1 else [low, high]


def set_ticks(
    axis: Axis,
    axis_limits: tuple[float, float],
    is_log_axis: bool,
    *,
    tick_values: Sequence[float] = (),
    unit: str = "",
    integers_only: bool = False,
    format_value: Callable[[float], str] | None = None,
) -> None:
    """Set the ends, the ticks and the tick texts of an axis.

    A tick has no text if there is no room for it before the next tick.

    Args:
        axis: The x or y axis.
        axis_limits: Ends of the axis.
        is_log_axis: Whether the axis is logarithmic.
        tick_values: Values of the ticks; round values if empty.
        unit: Unit, which is written at the last tick.
        integers_only: Whether ticks are at integers only.
        format_value: Formats the value of a tick; `format_tick_text` if None.
    """
    name = "x" if axis is axis.axes.xaxis else "y"
    axis.axes.set(**{f"{name}scale": "log" if is_log_axis else "linear", f"{name}lim": axis_limits})
    ticks = list(tick_values) or compute_round_ticks(axis_limits, is_log_axis, integers_only)
    texts = [(format_value or format_tick_text)(tick) for tick in ticks]
    texts[-1] += f" {unit}" if unit else ""
    taken_from = 2.0
    for i in reversed(range(len(ticks) if name == "x" else 0)):
        place, half = (
            compute_axis_fraction(ticks[i], axis_limits, is_log_axis),
            TICK_SHARE + LETTER_SHARE * len(texts[i]) / 2,
        )
        if place + half > taken_from:
            texts[i] = ""
        else:
            taken_from = place - half
    axis.set_ticks(ticks, texts)
    axis.set_minor_locator(NullLocator())


def format_tick_text(value: float) -> str:
    """Return a tick's value as text, from ten thousand on in thousands: `20k`."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def create_shifted_transform(
    axes: Axes, right_px: float, up_px: float = 0, transform: Transform | None = None
) -> Transform:
    """Return a matplotlib transform that is shifted by some pixels.

    Args:
        axes: The axes.
        right_px: Shift to the right in pixels.
        up_px: Shift upwards in pixels.
        transform: The transform to shift; by default x is a fraction of the width and y is a value.
    """
    shifted = transform or axes.get_yaxis_transform()
    return offset_copy(
        shifted, find_root_figure(axes), x=right_px * PX, y=up_px * PX, units="points"
    )


def draw_mark(
    axes: Axes, x: Any, y: Any, mark: Mark, is_chosen: bool, width_px: float, **style: Any
) -> None:
    """Draw a strategy's mark, `width_px` pixels wide, at one or several points."""
    colour = style.pop("color", None) or choose_mark_colour(mark, is_chosen)
    axes.plot(
        np.atleast_1d(x), np.atleast_1d(y), linestyle="none",
        marker=MARKERS[mark.family_shape], clip_on=False,
        markersize=width_px * _LARGER.get(mark.family_shape, 1.0) * PX, markeredgewidth=1.5 * PX,
        markeredgecolor=colour, markerfacecolor=PAPER if mark.mark_filling == "open" else colour,
        markerfacecoloralt=PAPER, fillstyle="left" if mark.mark_filling == "half" else "full",
        **({"zorder": 4} | style),
    )  # fmt: skip


def draw_row_name(axes: Axes, y: float, name: str, mark: Mark, is_chosen: bool) -> None:
    """Draw a strategy's name and its mark to the left of the axes."""
    draw_mark(axes, 0, y, mark, is_chosen, 8.5, transform=create_shifted_transform(axes, -10))
    draw_text(
        axes,
        0,
        y,
        shorten_name(name),
        ha="right",
        bold=is_chosen,
        transform=create_shifted_transform(axes, -20),
    )


def draw_text(axes: Axes, x: float, y: float, text: str, colour: str = INK, **style: Any) -> Text:
    """Write a text that is vertically centred at height `y`."""
    weight = "bold" if style.pop("bold", False) else "normal"
    return axes.text(x, y, text, color=colour, weight=weight, **({"va": "center_baseline"} | style))


def shorten_name(name: str, max_letters: int = MAX_LETTERS) -> str:
    """Return a name with at most `max_letters` letters, with `…` in place of its middle."""
    tail = max_letters // 2
    return name if len(name) <= max_letters else f"{name[: max_letters - tail - 1]}…{name[-tail:]}"


def spread_overlapping_positions(
    wanted: Sequence[float], low: float, high: float, min_distance: float
) -> list[float]:
    """Return positions near the wanted ones that keep a minimum distance from each other.

    Args:
        wanted: Wanted positions.
        low: Lowest position.
        high: Highest position.
        min_distance: Minimum distance of two positions.
    """
    order = np.argsort(wanted, kind="stable")
    groups: list[list[float]] = []
    # Positions that would be too close form a group around the mean of their wanted positions.
    for i, k in enumerate(order):
        groups.append([wanted[k] - min_distance * i])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    first = np.array([np.mean(group) for group in groups for _ in group])
    top = max(low, high - min_distance * (len(wanted) - 1))
    places = np.empty(len(wanted))
    places[order] = np.clip(first, low, top) + min_distance * np.arange(len(wanted))
    return places.tolist()
