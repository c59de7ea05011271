"""Common parts of figures on matplotlib's axes: size, round ticks, names next to them, and marks."""

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
from stratbench.analysis.figures.sheet import INK, MARKERS, PAPER, PX, WIDTH, colour_of

#: How wide a letter is reckoned, in pixels, where the layout is not made yet.
LETTER = 7.2
#: The most letters of a strategy's name.
MAX_LETTERS = 20
#: The first digits of ticks on a logarithmic scale: the first row that gives three is taken.
FIRST_DIGITS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
#: The share of an axis that a tick's text needs, and each letter of it.
TICK_SHARE, LETTER_SHARE = 0.02, 0.045
#: Shapes that look small for their size are drawn larger.
_LARGER = {"star": 1.5, "circle": 1.05, "hexagon": 1.15, "diamond": 0.95}


def new_axes(height: float) -> Axes:
    """The axes of a figure that is WIDTH pixels wide and `height` high."""
    return plt.subplots(figsize=(WIDTH / 96, height / 96))[1]


def figure_of(axes: Axes) -> Figure:
    """The figure that the axes are in."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def settle(axes: Axes) -> Figure:
    """Make the layout, so that all texts have room: from now on pixels are known. Returns the figure."""
    figure = figure_of(axes)
    for drawn in (*axes.lines, *axes.patches, *axes.collections):
        drawn.set_in_layout(False)  # texts alone need room beside the axes
    ConstrainedLayoutEngine(h_pad=2 / 96, w_pad=2 / 96).execute(figure)
    return figure


def limits_of(values: Iterable[float], margin: float, log: bool) -> tuple[float, float]:
    """The ends of an axis that holds these values, with a share `margin` of room; linear ones begin at 0."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not log:
        return 0.0, (max([*known, 0.0]) or 1.0) * (1 + margin)
    low, high = min(known, default=1.0), max(known, default=10.0)
    if high / low < 1.2:  # a few percent would look like a lot
        low, high = low / 1.1, high * 1.1
    room = (high / low) ** margin
    return low / room, high * room


def within_reach(values: list[float], ends: Iterable[float]) -> list[float]:
    """Values, and the ends of their intervals as far as they leave room for the values."""
    if not values:
        return values
    low, high = min(values), max(values)
    low, high = low - 0.5 * abs(low), high + 0.5 * abs(high)
    return [*values, *(min(max(end, low), high) for end in ends)]


def share_of(value: float, limits: tuple[float, float], log: bool) -> float:
    """The share of an axis that is below a value: 0 to 1."""
    low, high, at = (math.log(v) if log else v for v in (*limits, value))
    return (at - low) / (high - low)


def round_ticks(limits: tuple[float, float], log: bool, whole: bool = False) -> list[float]:
    """About four round values between the ends of an axis."""
    low, high = limits
    ticks: list[float] = []
    for digits in FIRST_DIGITS if log else ():
        values = LogLocator(subs=digits, numticks=9).tick_values(low, high)
        ticks = [float(t) for t in values if low <= t <= high]
        if len(ticks) > 2:
            return ticks[:: -(-len(ticks) // 6)]
    if len(ticks) < 2:
        steps = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
        room = 1e-9 * (high - low)
        ticks = [float(t) for t in steps if low - room <= t <= high + room]
    return ticks if len(ticks) > 1 else [low, high]


def set_ticks(
    axis: Axis,
    limits: tuple[float, float],
    log: bool,
    *,
    at: Sequence[float] = (),
    unit: str = "",
    whole: bool = False,
    text_of: Callable[[float], str] | None = None,
) -> None:
    """Set the ends of an axis and its ticks: `at` these values, or at round ones, or at `whole` ones.

    The last tick has the unit. One that has no room for its text beside the next has none.
    """
    name = "x" if axis is axis.axes.xaxis else "y"
    axis.axes.set(**{f"{name}scale": "log" if log else "linear", f"{name}lim": limits})
    ticks = list(at) or round_ticks(limits, log, whole)
    texts = [(text_of or tick_text)(tick) for tick in ticks]
    texts[-1] += f" {unit}" if unit else ""
    taken_from = 2.0
    for i in reversed(range(len(ticks) if name == "x" else 0)):
        place, half = share_of(ticks[i], limits, log), TICK_SHARE + LETTER_SHARE * len(texts[i]) / 2
        if place + half > taken_from:
            texts[i] = ""
        else:
            taken_from = place - half
    axis.set_ticks(ticks, texts)
    axis.set_minor_locator(NullLocator())


def tick_text(value: float) -> str:
    """A round number as text; thousands from ten thousand on with a k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def shifted(axes: Axes, right: float, up: float = 0, of: Transform | None = None) -> Transform:
    """Where so many pixels are from a place: a share of the width and a value, unless `of` says else."""
    given = of or axes.get_yaxis_transform()
    return offset_copy(given, figure_of(axes), x=right * PX, y=up * PX, units="points")


def put_mark(axes: Axes, x: Any, y: Any, mark: Mark, full: bool, size: float, **style: Any) -> None:
    """Draw a strategy's mark, `size` pixels wide."""
    colour = style.pop("color", None) or colour_of(mark, full)
    axes.plot(
        np.atleast_1d(x), np.atleast_1d(y), linestyle="none", marker=MARKERS[mark.shape], clip_on=False,
        markersize=size * _LARGER.get(mark.shape, 1.0) * PX, markeredgewidth=1.5 * PX,
        markeredgecolor=colour, markerfacecolor=PAPER if mark.fill == "open" else colour,
        markerfacecoloralt=PAPER, fillstyle="left" if mark.fill == "half" else "full",
        **({"zorder": 4} | style),
    )  # fmt: skip


def put_row_name(axes: Axes, y: float, name: str, mark: Mark, chosen: bool) -> None:
    """Write a strategy's name and its mark left of the axes."""
    put_mark(axes, 0, y, mark, chosen, 8.5, transform=shifted(axes, -10))
    write(axes, 0, y, shortened(name), ha="right", bold=chosen, transform=shifted(axes, -20))


def write(axes: Axes, x: float, y: float, text: str, colour: str = INK, **style: Any) -> Text:
    """Write text with its middle at height `y`."""
    weight = "bold" if style.pop("bold", False) else "normal"
    return axes.text(x, y, text, color=colour, weight=weight, **({"va": "center_baseline"} | style))


def shortened(name: str, letters: int = MAX_LETTERS) -> str:
    """`name`, cut in its middle to so many letters."""
    tail = letters // 2
    return name if len(name) <= letters else f"{name[: letters - tail - 1]}…{name[-tail:]}"


def spread(wanted: Sequence[float], low: float, high: float, apart: float) -> list[float]:
    """Places at least `apart` from each other between `low` and `high`, in sum nearest to the wanted ones."""
    order = np.argsort(wanted, kind="stable")
    groups: list[list[float]] = []
    for i, k in enumerate(order):  # groups of names that touch are centred on what they want
        groups.append([wanted[k] - apart * i])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    first = np.array([np.mean(group) for group in groups for _ in group])
    top = max(low, high - apart * (len(wanted) - 1))
    places = np.empty(len(wanted))
    places[order] = np.clip(first, low, top) + apart * np.arange(len(wanted))
    return places.tolist()
