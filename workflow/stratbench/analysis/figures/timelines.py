"""Figures of samples over time: the utilisation and memory of each worker while a cell ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.measured import Drawn, outcome_of
from stratbench.analysis.figures.rows import name_column, put_name
from stratbench.analysis.figures.scales import Scale
from stratbench.analysis.figures.sheet import (
    BAD,
    BAND,
    LINE,
    MUTED,
    RULE,
    WIDTH,
    box,
    colour_of,
    new_sheet,
    stroke,
    write,
)
from stratbench.cell.text.words import MIB, bytes_text

#: The most points in a line; longer ones are thinned out, since a panel shows no more.
MAX_POINTS = 80
#: The height of a strategy's panel, of the space between two, and of the axis below all.
PANEL, BETWEEN, AXIS = 34, 10, 34
#: The column of a timeline and its factor, for a GPU and for a process.
UTILISATION_COLUMNS = {"gpu": ("gpu_util_pct", 1.0), "process": ("cpu_pct", 1.0)}
MEMORY_COLUMNS = {"gpu": ("mem_used_bytes", 1 / MIB), "process": ("rss_bytes", 1 / MIB)}


def utilisation_figure(data: FigureData) -> Drawn:
    """The utilisation of each worker over time; a panel per strategy."""
    return timeline_figure(data, UTILISATION_COLUMNS, "%")


def memory_figure(data: FigureData) -> Drawn:
    """The memory of each worker over time; a panel per strategy."""
    return timeline_figure(data, MEMORY_COLUMNS, "MiB")


def has_timelines(data: FigureData) -> bool:
    """Whether the figures have a timeline to draw."""
    cells = (cell_of(data, name) for name in data.strategies)
    return any(read_timeline(data.study_dir, cell) is not None for cell in cells)


def timeline_figure(data: FigureData, what: dict[str, tuple[str, float]], unit: str) -> Drawn:
    """A small panel per strategy: its first repeat on its most workers; all share the axes."""
    cells = [cell_of(data, name) for name in data.strategies]
    timelines = [read_timeline(data.study_dir, cell) for cell in cells]
    lines = [[] if t is None else list(worker_lines(t, what)) for t in timelines]
    times = [t.max() for of in lines for _, t, _ in of]
    values = [v.max() for of in lines for _, _, v in of]
    left, right = name_column((name, data.is_chosen(name)) for name in data.strategies), WIDTH - 56
    x = Scale(0, max([*times, 1e-3]), left, right)
    bottom = 8 + len(cells) * (PANEL + BETWEEN)
    axes = new_sheet(bottom + AXIS)
    for i, (cell, timeline, of) in enumerate(zip(cells, timelines, lines, strict=True)):
        top = 8 + i * (PANEL + BETWEEN)
        y = Scale(0, max([*values, 1e-3]), top + PANEL, top)
        draw_panel(axes, data, cell, x, y)
        if timeline is None:
            reason = "no timeline" if cell["status"] == "ok" else outcome_of(str(cell["status"]))
            write(axes, left + 4, top + PANEL / 2, reason, BAD)
            continue
        shade_training(axes, timeline, x, y)
        chosen = data.is_chosen(str(cell["strategy"]))
        for name, t, v in of:
            dash = "3 2" if name.startswith("server") else ""
            colour = colour_of(data.marks[str(cell["strategy"])], chosen)
            places = [x.at(s) for s in t], [y.at(value) for value in v]
            stroke(axes, *places, colour, dash=dash, zorder=3, width=1.25)
        if i == 0:
            write(axes, right + 4, top + 4, highest_text(y.high, unit), MUTED)
    for at, text in x.labelled(x.ticks(), "s"):
        write(axes, at, bottom + 6, text, MUTED, ha="center")
    write(axes, (left + right) / 2, bottom + 22, "since the start of the cell", MUTED, ha="center")
    workers = ", ".join(dict.fromkeys(data.workers(int(cell["gpus"])) for cell in cells))
    caption = [f"The first repeat on the most workers ({workers}).", "Shaded: training."]
    if any(name.startswith("server") for of in lines for name, _, _ in of):
        caption.append("Dashed: servers.")
    kinds = {"gpu" if (t["kind"] == "gpu").any() else "process" for t in timelines if t is not None}
    if unit == "MiB":
        caption += ["The device's memory in use."] * ("gpu" in kinds)
        caption += ["The process's resident set."] * ("process" in kinds)
    return Drawn(axes.figure, " ".join(caption))


def highest_text(value: float, unit: str) -> str:
    """The end of the vertical axes with its unit."""
    return bytes_text(value * MIB) if unit == "MiB" else f"{value:.3g} {unit}"


def cell_of(data: FigureData, strategy: str) -> pd.Series:
    """The first repeat of a strategy on its most workers."""
    cells = data.cells[data.cells["strategy"] == strategy]
    return cells[cells["gpus"] == cells["gpus"].max()].iloc[0]


def draw_panel(axes: Axes, data: FigureData, cell: pd.Series, x: Scale, y: Scale) -> None:
    """Draw the name and the ground of a strategy's panel."""
    strategy, middle = str(cell["strategy"]), (y.start + y.end) / 2
    put_name(axes, strategy, data.marks[strategy], data.is_chosen(strategy), middle, x.start)
    stroke(axes, [x.start, x.end], [y.start, y.start], RULE, zorder=1.5)
    stroke(axes, [x.start, x.end], [y.end, y.end], LINE, zorder=1)


def read_timeline(study_dir: Path | None, cell: pd.Series) -> pd.DataFrame | None:
    """The timeline of a cell; None without one, or where its record cannot be used."""
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


def worker_lines(
    timeline: pd.DataFrame, what: dict[str, tuple[str, float]]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, times (s) and values of each GPU; without GPUs, of each worker and server process."""
    kind = "gpu" if (timeline["kind"] == "gpu").any() else "process"
    column, scale = what[kind]
    if column not in timeline:
        return
    for name, rows in timeline[timeline["kind"] == kind].groupby("id", sort=True):
        known = rows.dropna(subset=[column])
        if len(known):
            times, values = known["t_s"].to_numpy(), known[column].to_numpy(dtype=float) * scale
            yield str(name), *thinned(times, values)


def thinned(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The samples averaged over equal runs, so that at most MAX_POINTS are left."""
    run = -(-len(times) // MAX_POINTS)
    if run == 1:
        return times, values
    starts = np.arange(0, len(times), run)
    counts = np.diff([*starts, len(times)])
    return np.add.reduceat(times, starts) / counts, np.add.reduceat(values, starts) / counts


def shade_training(axes: Axes, timeline: pd.DataFrame, x: Scale, y: Scale) -> None:
    """Shade the time from the first to the last sample of training."""
    if "phase" in timeline:
        times = timeline.loc[timeline["phase"] == "train", "t_s"]
        if len(times):
            first, last = x.at(times.min()), x.at(min(times.max(), x.high))
            box(axes, first, y.end, last - first, y.start - y.end, BAND, zorder=0)
