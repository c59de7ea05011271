"""Draws samples over time: the utilisation and memory of each worker while a cell ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stratbench.analysis.figures.axes import (
    apply_layout,
    create_figure_axes,
    create_shifted_transform,
    draw_row_name,
    draw_text,
    set_ticks,
)
from stratbench.analysis.figures.curves import parse_dash_pattern
from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.measured import CaptionedFigure, shorten_outcome
from stratbench.analysis.figures.sheet import BAD, BAND, LINE, MUTED, PX, RULE, choose_mark_colour
from stratbench.cell.text.words import MIB, format_bytes

#: Maximum number of points of a line. Longer lines are averaged, since a panel is small.
MAX_POINTS = 80
#: Heights in pixels of a strategy's panel, of the space between two panels, and of the axis below.
PANEL, BETWEEN, AXIS = 34, 10, 34
#: Utilisation of a GPU and of a process: the timeline's column, and the factor to the shown unit.
UTILISATION_COLUMNS = {"gpu": ("gpu_util_pct", 1.0), "process": ("cpu_pct", 1.0)}
#: Memory of a GPU and of a process: the timeline's column, and the factor to the shown unit.
MEMORY_COLUMNS = {"gpu": ("mem_used_bytes", 1 / MIB), "process": ("rss_bytes", 1 / MIB)}


class Line(NamedTuple):
    """The samples of one worker: its name, times in s, and values in the shown unit."""

    name: str
    times_s: np.ndarray
    values: np.ndarray


class Panel(NamedTuple):
    """A strategy's panel: a cell, its timeline if any, and a line per worker."""

    cell: pd.Series
    timeline: pd.DataFrame | None
    lines: list[Line]


def draw_utilisation_figure(data: FigureData) -> CaptionedFigure:
    """Draw the utilisation of each worker over time, with a panel per strategy."""
    return draw_timeline_figure(data, UTILISATION_COLUMNS, "%")


def draw_memory_figure(data: FigureData) -> CaptionedFigure:
    """Draw the memory of each worker over time, with a panel per strategy."""
    return draw_timeline_figure(data, MEMORY_COLUMNS, "MiB")


def has_any_timeline(data: FigureData) -> bool:
    """Return whether any strategy has a timeline to draw."""
    cells = (find_cell_with_most_workers(data, name) for name in data.strategies)
    return any(read_cell_timeline(data.study_dir, cell) is not None for cell in cells)


def draw_timeline_figure(
    data: FigureData, columns_by_kind: dict[str, tuple[str, float]], unit: str
) -> CaptionedFigure:
    """Draw a panel per strategy with the samples of each worker over time.

    A panel shows the strategy's first repeat on its largest number of workers.

    Args:
        data: Data of the figure.
        columns_by_kind: The timeline's column, and the factor to the shown unit, by kind of sample.
        unit: Unit of the values.
    """
    cells = [find_cell_with_most_workers(data, name) for name in data.strategies]
    timelines = [read_cell_timeline(data.study_dir, cell) for cell in cells]
    lines = [[] if t is None else list(iter_worker_lines(t, columns_by_kind)) for t in timelines]
    panels = [Panel(*parts) for parts in zip(cells, timelines, lines, strict=True)]
    workers = ", ".join(dict.fromkeys(data.format_workers(int(cell["gpus"])) for cell in cells))
    caption = [
        f"First repeat of each strategy on its largest number of workers ({workers}).",
        "Shaded: training.",
    ]
    if any(line.name.startswith("server") for panel in panels for line in panel.lines):
        caption.append("Dashed: servers.")
    kinds = {"gpu" if (t["kind"] == "gpu").any() else "process" for t in timelines if t is not None}
    if unit == "MiB":
        caption += ["Memory in use on the GPU by all processes."] * ("gpu" in kinds)
        caption += ["Resident set size of each worker's process."] * ("process" in kinds)
    return CaptionedFigure(draw_timelines(data, panels, unit), " ".join(caption))


def draw_timelines(data: FigureData, panels: Sequence[Panel], unit: str) -> Figure:
    """Draw panels below each other, with a common vertical scale from 0."""
    lines = [line for panel in panels for line in panel.lines]
    end = max([line.times_s.max() for line in lines], default=0) or 1e-3
    highest = max([line.values.max() for line in lines], default=0) or 1e-3
    axes = create_figure_axes(8 + len(panels) * (PANEL + BETWEEN) + AXIS)
    axes.set_ylim(len(panels), -BETWEEN / PANEL)
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params("x", length=0)
    set_ticks(axes.xaxis, (0, end), False, unit="s")
    axes.set_xlabel("since the start of the cell")
    used = PANEL / (PANEL + BETWEEN)
    for i, (cell, timeline, worker_lines) in enumerate(panels):
        bottom, strategy = i + used, str(cell["strategy"])
        mark, chosen = data.marks_by_strategy[strategy], data.is_chosen_strategy(strategy)
        draw_row_name(axes, i + used / 2, strategy, mark, chosen)
        axes.axhline(i, color=LINE, zorder=1)
        axes.axhline(bottom, color=RULE, zorder=1.5)
        if timeline is None:
            reason = (
                "no timeline" if cell["status"] == "ok" else shorten_outcome(str(cell["status"]))
            )
            draw_text(
                axes, 0, i + used / 2, reason, BAD, transform=create_shifted_transform(axes, 4)
            )
            continue
        if "phase" in timeline:
            training = timeline.loc[timeline["phase"] == "train", "t_s"]
            axes.fill_between(
                [training.min(), training.max()], i, bottom, color=BAND, linewidth=0, zorder=0
            )
        for name, times_s, values in worker_lines:
            style = {
                "linestyle": parse_dash_pattern("3 2" if name.startswith("server") else ""),
                "zorder": 3,
            }
            style |= {"color": choose_mark_colour(mark, chosen), "linewidth": 1.25 * PX}
            axes.plot(times_s, bottom - used * values / highest, **style)
    draw_text(
        axes,
        1,
        0,
        format_highest_value(highest, unit),
        MUTED,
        va="top",
        transform=create_shifted_transform(axes, 4),
    )
    return apply_layout(axes)


def format_highest_value(value: float, unit: str) -> str:
    """Return the highest value of a timeline as text with its unit."""
    return format_bytes(value * MIB) if unit == "MiB" else f"{value:.3g} {unit}"


def find_cell_with_most_workers(data: FigureData, strategy: str) -> pd.Series:
    """Return a strategy's first repeat on its largest number of workers. It is a row of cells.csv."""
    cells = data.cells[data.cells["strategy"] == strategy]
    return cells[cells["gpus"] == cells["gpus"].max()].iloc[0]


def read_cell_timeline(study_dir: Path | None, cell: pd.Series) -> pd.DataFrame | None:
    """Return the timeline of a cell. None without a timeline or with an unusable record."""
    if study_dir is None or not isinstance(cell["record_path"], str) or cell["status"] == "error":
        return None
    path = (study_dir / cell["record_path"]).with_name("timeline.csv")
    numbers = {"t_s", *(c for w in (UTILISATION_COLUMNS, MEMORY_COLUMNS) for c, _ in w.values())}
    used = {"kind", "id", "phase", *numbers}
    try:
        if not path.is_file():
            return None
        timeline = pd.read_csv(path, usecols=lambda name: name in used, dtype={"id": str})
    except (OSError, ValueError):
        return None
    if not {"t_s", "kind", "id"} <= set(timeline.columns):
        return None
    for column in numbers & set(timeline.columns):
        timeline[column] = pd.to_numeric(timeline[column], errors="coerce")
    return timeline.replace([np.inf, -np.inf], np.nan).dropna(subset=["t_s"])


def iter_worker_lines(
    timeline: pd.DataFrame, columns_by_kind: dict[str, tuple[str, float]]
) -> Iterator[Line]:
    """Yield the line of each GPU in a timeline. Without GPUs, yield the line of each process."""
    kind = "gpu" if (timeline["kind"] == "gpu").any() else "process"
    column, scale = columns_by_kind[kind]
    if column not in timeline:
        return
    for name, rows in timeline[timeline["kind"] == kind].groupby("id", sort=True):
        known = rows.dropna(subset=[column])
        if len(known):
            times, values = known["t_s"].to_numpy(), known[column].to_numpy(dtype=float) * scale
            yield Line(str(name), *average_consecutive_samples(times, values))


def average_consecutive_samples(
    times: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return at most MAX_POINTS times and values, each the mean of consecutive samples."""
    run = -(-len(times) // MAX_POINTS)
    if run == 1:
        return times, values
    starts = np.arange(0, len(times), run)
    counts = np.diff([*starts, len(times)])
    return np.add.reduceat(times, starts) / counts, np.add.reduceat(values, starts) / counts
