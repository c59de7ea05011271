"""Draws the figures of a study: one SVG, PNG and PDF for each experiment and figure.

A cell without a result is a labelled mark, never a gap; repeats give error bars; a strategy looks
the same in every figure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from stratbench.analysis.figures.figure_data import (
    FigureData,
    figure_data_by_experiment,
    styles_in_order,
)
from stratbench.analysis.figures.figure_list import PLOTS
from stratbench.analysis.figures.panels import (
    IDEAL_LOOK,
    INK,
    LEAST_LOOK,
    MOST_NOTES,
    SMALL_MARKS,
    add_legend_and_note,
    annotate,
    bar_look,
    counts_axis,
    cross,
    draw_panels,
    error_bar,
    least_handles,
    line,
    line_handles,
    mark_doubt,
    mark_failures,
    more_notes,
    share_rows,
)
from stratbench.analysis.figures.style import RC, Style
from stratbench.analysis.figures.timelines import memory_figure, utilisation_figure
from stratbench.analysis.figures.tradeoffs import (
    breakdown_figure,
    score_over_time_figure,
    staleness_figure,
    tradeoff_figure,
)
from stratbench.analysis.records.columns import read_cells, read_epochs
from stratbench.analysis.records.measures import MEASURES, Measure
from stratbench.analysis.tables.summary import read_summary
from stratbench.cell.files import replacing
from stratbench.cell.text.words import counted, plural, worker_noun
from stratbench.telemetry.machine.cores import usable_cores


def bar_figure(data: FigureData, measure: Measure) -> Figure:
    """A figure of bars by worker count; on GPUs, a tick across a memory bar marks the model states."""
    noun = worker_noun(data.cells["device_kind"])
    # A CPU's peak is over a base with weights and momentum: the peak does not include them.
    with_states = measure.name == "memory" and not data.on_cpu

    def panel(axis: Axes, model: str) -> None:
        rows = data.rows(measure.name, model)
        states = data.rows("model_states", model).set_index(["strategy", "gpus"])["value"]
        widest = max(rows.groupby("gpus").size())
        width = 0.86 / widest
        for position, count in enumerate(data.counts):
            group = rows[rows["gpus"] == count]
            start = position - width * (len(group) - 1) / 2
            for i, (_, row) in enumerate(group.iterrows()):
                x, style = start + i * width, data.styles[row["strategy"]]
                bar(axis, x, width, row, style)
                if with_states and row["ok"] > 0:
                    held = states.get((row["strategy"], count), np.nan)
                    axis.hlines(held, x - width / 2, x + width / 2, color=INK, linewidth=1.4)
        axis.set_xticks(range(len(data.counts)), [str(n) for n in data.counts])
        axis.set_xlim(-0.6, len(data.counts) - 0.4)
        axis.set_xlabel(plural(noun))
        axis.set_ylim(bottom=0)
        axis.tick_params(axis="x", length=0)

    figure = draw_panels(data.titles, panel, measure.heading)
    handles: list[Line2D | Patch] = [
        Patch(label=name, **bar_look(s.colour, s.hatch))
        for name, s in styles_in_order(data).items()
    ]
    if with_states:
        handles.append(
            Line2D([], [], color=INK, linewidth=1.4, label="model states (part of the peak)")
        )
    add_legend_and_note(figure, handles, data.note_on(measure))
    return figure


def bar(axis: Axes, x: float, width: float, row: pd.Series, style: Style) -> None:
    """Draw one bar with its error bar, or the outcome of a cell without a result."""
    if row["value"] != row["value"]:
        cross(axis, (x, 0), "data", (0, 0), style.colour)
        annotate(axis, row["text"], (x, 0), "data", (0, 6), rotation=90, ha="center", va="bottom")
        return
    axis.bar(x, row["value"], width * 0.94, **bar_look(style.colour, style.hatch))
    spread = error_bar(row)
    if spread:
        axis.errorbar(x, row["value"], spread, color=INK, linewidth=0.9, capsize=1.8)
    if row["ok"] < row["cells"]:
        share = f"{row['ok']}/{row['cells']}"
        annotate(axis, share, (x, row["value"]), "data", (0, 3), ha="center", fontsize=5.5)
    mark_doubt(axis, row["flags"], (x, spread_top(row)), (0, 2))


def spread_top(row: pd.Series) -> float:
    """The upper end of the bar and its error bar."""
    spread = error_bar(row)
    return row["value"] + (spread[1][0] if spread else 0)


def scaling_figure(data: FigureData, measure: Measure) -> Figure:
    """A figure of lines over the worker count, with the ideal line for speedups."""
    noun = worker_noun(data.cells["device_kind"])
    is_ratio = measure.baseline is not None

    def panel(axis: Axes, model: str) -> None:
        rows = data.rows(measure.name, model)
        if is_ratio:
            limits = [data.counts[0], data.counts[-1]]
            axis.plot(limits, limits, zorder=1, **IDEAL_LOOK)
        without = []
        for name, found in rows.groupby("strategy", sort=False):
            if measure.baseline == "self" and set(found["gpus"]) == {1}:
                continue
            scaling_line(axis, found, data.styles[str(name)], is_ratio)
            without += [row for _, row in found.iterrows() if row["value"] != row["value"]]
        counts_axis(axis, data.counts, is_ratio)
        mark_failures(axis, without, data.counts, data.styles)
        axis.set_xlabel(plural(noun))

    figure = draw_panels(data.titles, panel, measure.heading)
    drawn = styles_in_order(data)
    if measure.baseline == "self":
        several = set(data.cells.loc[data.cells["gpus"] > 1, "strategy"])
        drawn = {name: style for name, style in drawn.items() if name in several}
    handles = line_handles(drawn)
    if is_ratio:
        handles.append(Line2D([], [], label="ideal", **IDEAL_LOOK))
    add_legend_and_note(figure, handles, data.note_on(measure))
    return figure


def scaling_line(axis: Axes, rows: pd.DataFrame, style: Style, is_ratio: bool) -> None:
    """Draw one strategy; one with a single worker only also gets a line to compare with."""
    rows = rows.sort_values("gpus")
    line(axis, rows["gpus"], rows["value"], style)
    if set(rows["gpus"]) == {1} and not is_ratio and rows["value"].notna().all():
        axis.axhline(
            rows["value"].iloc[0], color=style.colour, linestyle=":", linewidth=1, zorder=1
        )
    for _, row in rows.iterrows():
        spread = error_bar(row)
        if spread:
            axis.errorbar(
                row["gpus"], row["value"], spread, color=style.colour, capsize=2, linewidth=1
            )
        mark_doubt(axis, row["flags"], (row["gpus"], row["value"]), (5, 2))


def score_figure(data: FigureData, measure: Measure) -> Figure:
    """A figure of the test score by epoch: a row of panels per model, a column per worker count."""
    noun, score = worker_noun(data.cells["device_kind"]), data.score
    titles = {
        (model, n): f"{model}, {counted(n, noun)}" for model in data.models for n in data.counts
    }

    def panel(axis: Axes, place: tuple[str, int]) -> None:
        model, count = place
        epochs = data.epochs
        epochs = epochs[(epochs["model"] == model) & (epochs["gpus"] == count)]
        panel = data.rows(measure.name, model)
        panel = panel[panel["gpus"] == count]
        rows = panel[panel["value"].isna()]
        for name, found in epochs.groupby("strategy", sort=False):
            cut = name in set(rows["strategy"])
            flags = "; ".join(panel.loc[panel["strategy"] == name, "flags"])
            score_line(axis, found, data.styles[str(name)], cut, flags, score.factor)
        score_notes(axis, [f"× {r.strategy}: {r.text}" for r in rows.itertuples()])
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if score.least_possible is not None:
            axis.axhline(score.least_possible, **LEAST_LOOK)

    figure = draw_panels(titles, panel, data.score_label, len(data.counts))
    share_rows(figure.axes, len(data.counts))
    handles = line_handles(styles_in_order(data)) + least_handles(score)
    add_legend_and_note(figure, handles, data.note + data.doubt_note(measure.name))
    return figure


def score_line(
    axis: Axes, rows: pd.DataFrame, style: Style, cut: bool, flags: str, factor: float
) -> None:
    """Draw the median over the repeats, a band from lowest to highest, and a cross if it was cut."""
    by_epoch = (rows["score"] * factor).groupby(rows["epoch"])
    median = by_epoch.median()
    line(axis, median.index, median, style, markevery=max(1, len(median) // 10), **SMALL_MARKS)
    end = (median.index[-1], median.iloc[-1])
    if cut:
        axis.plot(*end, "x", color=style.colour, markersize=8, mew=2, zorder=6)
    mark_doubt(axis, flags, end, (4, 2))
    if by_epoch.size().max() > 1:
        axis.fill_between(
            median.index, by_epoch.min(), by_epoch.max(), color=style.colour, alpha=0.18, lw=0
        )


def score_notes(axis: Axes, notes: Sequence[str]) -> None:
    """List cells without a final score in the lower right corner, as many as there is room for."""
    if rest := more_notes(len(notes)):
        notes = [*notes[: MOST_NOTES - 1], rest]
    place = {"ha": "right", "va": "bottom"}
    annotate(axis, "\n".join(notes), (0.98, 0.03), "axes fraction", (0, 0), **place)


#: The function that draws a measure, by the chart that PLOTS gives it.
CHARTS: dict[str, Callable[[FigureData, Measure], Figure]] = {
    "Bar chart": bar_figure,
    "Line chart": scaling_figure,
    "Line chart by epoch": score_figure,
}
#: The functions of figures that show something else than one measure.
OTHERS: dict[str, Callable[[FigureData], Figure]] = {
    "breakdown": breakdown_figure,
    "score_over_time": score_over_time_figure,
    "tradeoff": tradeoff_figure,
    "staleness": staleness_figure,
    "utilisation_timelines": utilisation_figure,
    "memory_timelines": memory_figure,
}


def draw_figure(name: str, data: FigureData) -> Figure:
    """The figure of one experiment that has this `name` in PLOTS."""
    if name in OTHERS:
        return OTHERS[name](data)
    return CHARTS[PLOTS[name].chart](data, data.measures[name])


def has_data(name: str, data: FigureData) -> bool:
    """Whether any record has data for the figure."""
    if data.cells[PLOTS[name].needs].isna().all():
        return False
    if name in OTHERS:
        return True
    rows = data.summary[data.summary["measure"] == name]
    # Without its baseline a ratio shows nothing; without any value a time lists how the cells ended.
    return bool(rows["value"].notna().any()) or MEASURES[name].baseline is None


#: The files of each figure, without dates and program names: the same figure has the same bytes.
FORMATS: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Producer": None},
}


def save_figure(figure: Figure, stem: Path) -> None:
    """Write the figure in all FORMATS."""
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)  # layout is done; saving would repeat it for each format
    for suffix, metadata in FORMATS.items():
        with replacing(stem.with_suffix(suffix)) as unfinished:
            figure.savefig(unfinished, metadata=metadata)
    plt.close(figure)


def read_figure_data(
    cells: Path, epochs: Path, summary: Path, study_dir: Path | None
) -> dict[str, FigureData]:
    """The data of each experiment in the three tables."""
    return figure_data_by_experiment(
        read_cells(cells), read_epochs(epochs), read_summary(summary), study_dir
    )


#: A process of the pool is worth its start if it has this many figures to draw.
FIGURES_A_PROCESS = 8
_loaded: dict[str, FigureData] = {}


def begin_process(*tables: Path | None) -> None:
    """Read the tables in a new process of the pool, unless it was forked and has them."""
    if not _loaded:
        _loaded.update(read_figure_data(*tables))


def write_figure(name: tuple[str, str], stem: Path) -> None:
    """Draw and save a figure of PLOTS for one experiment."""
    experiment, plot = name
    with plt.rc_context(RC):
        save_figure(draw_figure(plot, _loaded[experiment]), stem)


def remove_old_figures(out_dir: Path, drawn: Sequence[Path]) -> None:
    """Remove the figures of an earlier run that are not `drawn` now, because they have lost their data."""
    for plot in PLOTS:
        for path in out_dir.glob(f"*/{plot}.*"):
            if path.with_suffix("") not in drawn:
                path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.figures.plots", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--epochs", type=Path, required=True, help="epochs.csv")
    parser.add_argument("--summary", type=Path, required=True, help="summary.csv")
    parser.add_argument("--study-dir", type=Path, help="results/<study>, for the timelines")
    parser.add_argument("--out-dir", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args(argv)
    tables = (args.cells, args.epochs, args.summary, args.study_dir)
    found = read_figure_data(*tables)
    _loaded.clear()
    _loaded.update(found)
    names = [(name, plot) for name, rows in found.items() for plot in PLOTS if has_data(plot, rows)]
    stems = [args.out_dir / name / plot for name, plot in names]
    n_processes = min(len(usable_cores()), 1 + len(names) // FIGURES_A_PROCESS)
    with ExitStack() as stack:
        drawing = map
        if n_processes > 1:
            # On other systems, a fork of a process that has used system libraries may crash.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            pool = ProcessPoolExecutor(
                n_processes, context, initializer=begin_process, initargs=tables
            )
            drawing = stack.enter_context(pool).map
        for stem, _ in zip(stems, drawing(write_figure, names, stems), strict=True):
            print(stem.with_suffix(".svg"), flush=True)
    remove_old_figures(args.out_dir, stems)
    return 0


if __name__ == "__main__":
    sys.exit(main())
