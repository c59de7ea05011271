"""The parts of every figure: panels, legend, axes, and marks for cells without a result."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import ScalarFormatter

from stratbench.analysis.figures.style import GREY, Style
from stratbench.analysis.records.measures import DOUBT
from stratbench.analysis.records.score import Score

matplotlib.use("Agg")  # draws into files, whatever display is there
PANEL_IN = (3.3, 2.45)
NARROWEST_IN = 4.8
LEGEND_ROW_IN = 0.17
MOST_COLUMNS = 3
#: Worker counts above this are drawn on logarithmic axes.
LINEAR_UP_TO = 8
Key = TypeVar("Key")
INK = "#222222"
#: The line of the least possible loss.
LEAST_LOOK: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 1.1, "zorder": 1}
#: The line of ideal speedups.
IDEAL_LOOK: dict[str, Any] = {"color": GREY, "linestyle": (0, (4, 3)), "linewidth": 1}
#: The marks of a line with many points.
SMALL_MARKS = {"markersize": 3.5, "markeredgewidth": 0.3}
#: Size of the line below a figure, in points.
NOTE_PT = 6.5
#: The most lines in a panel's list of strategies without a result.
MOST_NOTES = 7


def draw_panels(
    titles: Mapping[Key, str],
    draw: Callable[[Axes, Key], None],
    label: str = "",
    columns: int = MOST_COLUMNS,
) -> Figure:
    """A figure with a titled panel for each key of `titles`, which `draw` fills.

    `label` stands beside the vertical axis of the first panel in each row.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = (max(NARROWEST_IN, PANEL_IN[0] * columns), PANEL_IN[1] * rows + 0.75)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for extra in grid.flat[len(titles) :]:
        extra.set_visible(False)
    for axis, (key, title) in zip(grid.flat, titles.items(), strict=False):
        axis.set_title(title)
        draw(axis, key)
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(label)
    return figure


def add_legend_and_note(figure: Figure, handles: Iterable[Line2D | Patch], note: str) -> None:
    """Add the legend, and the line that says what was measured and on what."""
    handles = list(handles)
    if handles:
        add_legend(figure, handles)
    figure.supxlabel(wrapped_text(note, figure), fontsize=NOTE_PT, color="#555555")


def add_legend(figure: Figure, handles: list[Line2D | Patch]) -> None:
    """Add the legend above the panels; its rows make the figure higher."""
    columns = legend_columns([str(h.get_label()) for h in handles], figure.get_figwidth())
    further_rows = -(-len(handles) // columns) - 1
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_IN * further_rows)
    # Matplotlib fills column by column, but the config's order must read row by row.
    by_row = [handle for start in range(columns) for handle in handles[start::columns]]
    figure.legend(handles=by_row, loc="outside upper center", ncols=columns, handlelength=2.2)


def legend_columns(labels: Sequence[str], width_in: float) -> int:
    """The largest number of columns that fit for a legend of `labels`, evened out over its rows."""
    for rows in range(1, len(labels) + 1):
        columns = -(-len(labels) // rows)
        entry_in = [0.68 + 0.073 * len(label) for label in labels]
        if sum(max(entry_in[start::columns]) for start in range(columns)) <= width_in:
            return columns
    return 1


def wrapped_text(text: str, figure: Figure) -> str:
    """`text` broken into lines that fit the figure's width, for letters of NOTE_PT."""
    return textwrap.fill(text, width=int(figure.get_figwidth() * 72 / (NOTE_PT * 0.56)))


def share_rows(axes: Sequence[Axes], columns: int) -> None:
    """Give the panels of a row the same vertical range."""
    for start in range(0, len(axes), columns):
        row = [axis for axis in axes[start : start + columns] if axis.lines]
        limits = [axis.get_ylim() for axis in row]
        for axis in row:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def counts_axis(axis: Axes, counts: Sequence[int], is_ratio: bool) -> None:
    """Put ticks at the worker counts; above LINEAR_UP_TO workers, both axes are logarithmic."""
    if counts[-1] > LINEAR_UP_TO:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(ScalarFormatter())
    else:
        # From zero, with room above the highest point, whatever the spread of the points.
        highest = axis.dataLim.y1 if np.isfinite(axis.dataLim.y1) and axis.dataLim.y1 > 0 else 1.0
        axis.set_ylim(0, 1.08 * (max(highest, counts[-1]) if is_ratio else highest))
        axis.set_xlim(counts[0] - 0.15, counts[-1] + 0.15)
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.minorticks_off()


def error_bar(row: pd.Series) -> list[list[float]] | None:
    """The distances from the value down and up to the ends of its spread; None without a spread."""
    low, high = row["low"], row["high"]
    if low != low:
        return None
    return [[max(0.0, row["value"] - low)], [max(0.0, high - row["value"])]]


def mark_failures(
    axis: Axes, rows: Sequence[pd.Series], counts: Sequence[int], looks: dict[str, Style]
) -> None:
    """Draw a cross on the horizontal axis for each point without a result, and a list of them."""
    first, last = counts[0], counts[-1]
    beside: dict[int, list[str]] = {}
    named: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        beside.setdefault(row["gpus"], []).append(row["strategy"])
        named.setdefault((row["strategy"], row["text"]), []).append(str(row["gpus"]))
    for count, strategies in beside.items():
        for i, strategy in enumerate(strategies):
            # Side by side: to the right of the first tick, to the left of the last, else around it.
            shift = 0 if count == first else len(strategies) - 1
            shift = shift if count in (first, last) else shift / 2
            offset = (5.5 * (i - shift), 0)
            cross(axis, (count, 0), axis.get_xaxis_transform(), offset, looks[strategy].colour)
    notes = [
        (f"{strategy}, {', '.join(counts)}: {text}", looks[strategy].colour)
        for (strategy, text), counts in named.items()
    ]
    rest = more_notes(len(notes))
    listed = [*notes[: MOST_NOTES - 1], (rest, INK)] if rest else notes
    for i, (text, colour) in enumerate(listed):
        down = -7.5 * i - 3
        if colour != INK:
            cross(axis, (0.03, 0.97), "axes fraction", (0, down), colour)
        annotate(axis, text, (0.03, 0.97), "axes fraction", (6, down), va="center")


def more_notes(notes: int) -> str | None:
    """The text that replaces all notes after the first MOST_NOTES - 1; None if all have room."""
    rest = notes - MOST_NOTES + 1
    return f"and {rest} more strategies: see the table" if notes > MOST_NOTES else None


def mark_doubt(axis: Axes, flags: str, at: tuple[float, float], offset: Any) -> None:
    """Draw a dagger beside a point if the audit's rules `flags` doubt its figure."""
    if flags:
        annotate(axis, DOUBT, at, "data", offset, ha="center", fontsize=7)


def annotate(axis: Axes, text: str, at: Any, coordinates: Any, offset: Any, **style: Any) -> None:
    """Write small text `offset` points from `at`; it takes no room in the layout."""
    given = {"fontsize": 6, "color": INK} | style
    note = axis.annotate(
        text, at, xycoords=coordinates, xytext=offset, textcoords="offset points", **given
    )
    note.set_in_layout(False)


def cross(axis: Axes, at: Any, coordinates: Any, offset: Any, colour: str) -> None:
    """Draw the mark of a cell without a result."""
    bold = {"fontsize": 9, "fontweight": "bold", "ha": "center", "va": "center", "zorder": 6}
    annotate(axis, "×", at, coordinates, offset, color=colour, **bold)


def least_handles(score: Score) -> list[Line2D]:
    """The legend entry of the least possible loss, if it is known."""
    least = score.least_possible
    if least is None:
        return []
    return [Line2D([], [], label=f"least possible ({score.text(least)})", **LEAST_LOOK)]


def line_look(style: Style) -> dict[str, Any]:
    """How Matplotlib draws the line of a strategy."""
    return {
        "color": style.colour,
        "linestyle": style.line,
        "marker": style.marker,
        "markeredgecolor": INK,
        "markeredgewidth": 0.4,
    }


def line(axis: Axes, x: Any, y: Any, style: Style, **look: Any) -> None:
    """Draw the line of a strategy; `look` has what differs from `line_look`."""
    axis.plot(x, y, **(line_look(style) | look))


def line_handles(looks: Mapping[str, Style]) -> list[Line2D]:
    """The legend entries of strategies in a line figure."""
    return [Line2D([], [], label=name, **line_look(style)) for name, style in looks.items()]


def bar_look(colour: str, hatch: str, linewidth: float = 0.5) -> dict[str, Any]:
    """How Matplotlib draws a bar and its entry in a legend."""
    return {"facecolor": colour, "hatch": hatch, "edgecolor": INK, "linewidth": linewidth}


def blank(axis: Axes) -> None:
    """Take ticks and grid off a panel that has nothing to show."""
    axis.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axis.grid(visible=False)
