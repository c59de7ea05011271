"""Figures of samples over time: the utilisation and memory of each worker while a cell ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.panels import NOTE_PT, annotate, blank, wrapped_text
from stratbench.analysis.figures.style import BROWN, DEEP_TEAL, PETROL, ROSE, SAND, WINE
from stratbench.cell.text.words import MIB, counted, worker_noun

#: The most points in a line; longer ones are thinned out, since a panel shows no more.
MOST_POINTS = 120
COLOURS = (PETROL, WINE, DEEP_TEAL, BROWN, ROSE, SAND)
TIMELINE_PANEL_IN = (2.5, 0.95)
#: The column of a timeline and its factor, for a GPU and for a process.
UTILISATION_COLUMNS = {"gpu": ("gpu_util_pct", 1.0), "process": ("cpu_pct", 1.0)}
MEMORY_COLUMNS = {"gpu": ("mem_used_bytes", 1 / MIB), "process": ("rss_bytes", 1 / MIB)}


def utilisation_figure(data: FigureData) -> Figure:
    """A figure of the utilisation of each worker; a row per strategy, a column per model."""
    return timeline_figure(data, UTILISATION_COLUMNS, "%")


def memory_figure(data: FigureData) -> Figure:
    """A figure of the memory of each worker; a row per strategy, a column per model."""
    return timeline_figure(data, MEMORY_COLUMNS, "MiB")


def timeline_figure(data: FigureData, what: dict[str, tuple[str, float]], unit: str) -> Figure:
    """A figure with a small panel per strategy and model: its first repeat on its most workers."""
    rows, columns = data.strategies, data.models
    size = (
        max(4.2, TIMELINE_PANEL_IN[0] * len(columns) + 0.9),
        TIMELINE_PANEL_IN[1] * len(rows) + 1.1,
    )
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False)
    # The layout is fixed: with hundreds of labels, the automatic layout takes seconds.
    figure.subplots_adjust(
        left=0.85 / size[0], right=1 - 0.1 / size[0], top=1 - 0.4 / size[1], bottom=0.8 / size[1],
        hspace=0.5, wspace=0.28,
    )  # fmt: skip
    for i, strategy in enumerate(rows):
        for j, model in enumerate(columns):
            axis = axes[i][j]
            draw_panel(axis, data, strategy, model, what)
            if i == 0:
                axis.set_title(model, pad=9)
            if j == 0:
                axis.set_ylabel(f"{strategy}\n({unit})", fontsize=6.5)
            if i == len(rows) - 1:
                axis.set_xlabel("s since the cell's start", fontsize=7)
    figure.text(
        0.5, 0.06 / size[1], wrapped_text(data.note, figure), fontsize=NOTE_PT, color="#555555",
        ha="center", va="bottom",
    )  # fmt: skip
    return figure


def draw_panel(
    axis: Axes,
    data: FigureData,
    strategy: str,
    model: str,
    what: dict[str, tuple[str, float]],
) -> None:
    """Draw the lines of one cell, or the reason why there are none."""
    cells = data.cells
    cells = cells[(cells["strategy"] == strategy) & (cells["model"] == model)]
    if cells.empty:
        axis.set_axis_off()
        return
    cell = cells[cells["gpus"] == cells["gpus"].max()].iloc[0]
    timeline = read_timeline(data.study_dir, cell)
    label = counted(int(cell["gpus"]), worker_noun(data.cells["device_kind"]))
    if timeline is None:
        blank(axis)
        label += f": {'no timeline' if cell['status'] == 'ok' else cell['status']}"
    else:
        for i, (name, times, values) in enumerate(worker_lines(timeline, what)):
            axis.plot(
                times, values, color=COLOURS[i % len(COLOURS)], linewidth=0.7,
                linestyle="--" if name.startswith("server") else "-",
            )  # fmt: skip
        shade_training(axis, timeline)
        axis.tick_params(labelsize=6)
        axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    annotate(axis, label, (0.99, 1.02), "axes fraction", (0, 0), ha="right", fontsize=5.5)


def read_timeline(study_dir: Path | None, cell: pd.Series) -> pd.DataFrame | None:
    """The timeline of a cell; None without one, or where its record is no measurement."""
    if study_dir is None or not isinstance(cell["record_path"], str):
        return None
    if cell["status"] == "unusable":
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
    """The samples averaged over equal runs, so that at most MOST_POINTS are left."""
    run = -(-len(times) // MOST_POINTS)
    if run == 1:
        return times, values
    starts = np.arange(0, len(times), run)
    counts = np.diff([*starts, len(times)])
    return np.add.reduceat(times, starts) / counts, np.add.reduceat(values, starts) / counts


def shade_training(axis: Axes, timeline: pd.DataFrame) -> None:
    """Shade the time from the first to the last sample of training."""
    if "phase" in timeline:
        times = timeline.loc[timeline["phase"] == "train", "t_s"]
        if len(times):
            axis.axvspan(times.min(), times.max(), color="#eeeeee", zorder=0)
