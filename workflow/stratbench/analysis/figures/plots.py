"""Draws the figures of a study as SVG, PNG and PDF, for each experiment and model.

`figures.json` lists their titles and captions for the report, which draws nothing itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from stratbench.analysis.figures.figure_data import FigureData, build_figure_data
from stratbench.analysis.figures.figure_list import INDEX, PLOTS
from stratbench.analysis.figures.measured import (
    CaptionedFigure,
    draw_figure_with_strategy_rows,
    draw_scaling_figure,
    draw_score_figure,
)
from stratbench.analysis.figures.sheet import RC, save_figure
from stratbench.analysis.figures.timelines import (
    draw_memory_figure,
    draw_utilisation_figure,
    has_any_timeline,
)
from stratbench.analysis.figures.tradeoffs import (
    draw_score_over_time_figure,
    draw_staleness_figure,
    draw_step_breakdown_figure,
    draw_tradeoff_figure,
)
from stratbench.analysis.records.columns import read_cells, read_epochs
from stratbench.analysis.records.measures import MEASURES, Measure
from stratbench.analysis.tables.summary import read_summary
from stratbench.cell.files import write_text_atomically
from stratbench.telemetry.machine.cores import list_usable_cores

#: The function that draws a metric's figure, by the kind of chart that PLOTS names.
CHARTS: dict[str, Callable[[FigureData, Measure], CaptionedFigure]] = {
    "Dot chart": draw_figure_with_strategy_rows,
    "Line chart": draw_scaling_figure,
}
#: The functions that draw figures of more than one metric, by the figure's name.
OTHERS: dict[str, Callable[[FigureData], CaptionedFigure]] = {
    "breakdown": draw_step_breakdown_figure,
    "score_over_time": draw_score_over_time_figure,
    "tradeoff": draw_tradeoff_figure,
    "staleness": draw_staleness_figure,
    "utilisation_timelines": draw_utilisation_figure,
    "memory_timelines": draw_memory_figure,
}


def draw_figure(name: str, data: FigureData, num_workers: int | None = None) -> CaptionedFigure:
    """Draw the figure that has the given name in PLOTS, for one experiment and model.

    Args:
        name: Name in PLOTS.
        data: Data of the figure.
        num_workers: Number of workers, for figures per number of workers.
    """
    if num_workers is not None:
        return draw_score_figure(data, data.measures[name], num_workers)
    if name in OTHERS:
        return OTHERS[name](data)
    return CHARTS[PLOTS[name].chart_kind](data, data.measures[name])


def iter_figure_names_and_worker_counts(data: FigureData) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each figure with data. A figure per number of workers also has this number."""
    for name, plot in PLOTS.items():
        if not has_data(name, data):
            continue
        if not plot.is_per_worker_count:
            yield name, None
            continue
        scored = set(data.epochs["gpus"])
        yield from ((name, count) for count in data.worker_counts if count in scored)


def has_data(name: str, data: FigureData) -> bool:
    """Return whether there are data for the figure with a name in PLOTS."""
    if data.cells[PLOTS[name].required_column].isna().all():
        return False
    if name in FURTHER:
        return bool(FURTHER[name](data))
    rows = data.select_summary_rows(name)
    if CHARTS.get(PLOTS[name].chart_kind) is draw_scaling_figure:
        several = rows if MEASURES[name].baseline is None else rows[rows["gpus"] > 1]
        return len(data.worker_counts) > 1 and bool(several["value"].notna().any())
    # The figure of the training time is always drawn, since it lists the outcomes of cells without a time.
    return bool(rows["value"].notna().any()) or name == "training_time"


def make_check_for_column_values(column: str) -> Callable[[FigureData], bool]:
    """Return a check of figure data for values in a column.

    The check is true if the column has any value on the shown number of workers.
    """
    return lambda data: bool(
        data.cells.loc[data.cells["gpus"] == data.shown_worker_count, column].notna().any()
    )


#: Functions that check whether a figure has data, by the names of figures with special requirements.
FURTHER: dict[str, Callable[[FigureData], bool]] = {
    "breakdown": make_check_for_column_values("breakdown_ms"),
    "staleness": make_check_for_column_values("staleness"),
    "score_over_time": lambda data: data.shown_worker_count in set(data.epochs["gpus"]),
    "tradeoff": lambda data: len(find_candidates_with_time_and_score(data)) > 1,
    "utilisation_timelines": has_any_timeline,
    "memory_timelines": has_any_timeline,
    "utilisation": make_check_for_column_values("utilisation_pct"),
}


def find_candidates_with_time_and_score(data: FigureData) -> set[tuple[str, int]]:
    """Return the (strategy, number of workers) pairs that have a time and a score."""
    known = [
        set(zip(rows["strategy"], rows["gpus"], strict=True))
        for rows in (
            data.select_summary_rows(name).dropna(subset=["value"])
            for name in ("training_time", "score")
        )
    ]
    return known[0] & known[1]


def read_figure_data(
    cells: Path, epochs: Path, summary: Path, answers: Path | None, study_dir: Path | None
) -> list[FigureData]:
    """Return the figure data of each experiment and model, read from a study's files."""
    decided = json.loads(answers.read_text(encoding="utf-8")) if answers else None
    return build_figure_data(
        read_cells(cells), read_epochs(epochs), read_summary(summary), decided, study_dir
    )


#: One more process is started per this many figures.
FIGURES_A_PROCESS = 8
_loaded: list[FigureData] = []


def load_figure_data_into_process(*tables: Path | None) -> None:
    """Read the figure data into this process, unless its parent process has already read them."""
    if not _loaded:
        _loaded.extend(read_figure_data(*tables))


def write_figure(
    data_index: int, name: str, num_workers: int | None, out_dir: Path
) -> dict[str, Any]:
    """Draw and save a figure, and return its entry for figures.json.

    Args:
        data_index: Index of the experiment and model in the loaded data.
        name: Name of the figure in PLOTS.
        num_workers: Number of workers, for figures per number of workers.
        out_dir: Folder of the figures.
    """
    data, plot = _loaded[data_index], PLOTS[name]
    file = name if num_workers is None else f"{name}_on_{num_workers}"
    stem = out_dir / data.experiment / data.model / file
    with plt.rc_context(RC):
        drawn = draw_figure(name, data, num_workers)
        save_figure(drawn.figure, stem)
    title = plot.format_title(data.score)
    if num_workers is not None:
        title += f", {data.format_workers(num_workers)}"
    strategies = ", ".join(data.strategies)
    return {
        "experiment": data.experiment,
        "model": data.model,
        "file": stem.with_suffix(".svg").relative_to(out_dir).as_posix(),
        "title": title,
        "caption": drawn.caption,
        "alt": f"{plot.chart_kind} of the strategies {strategies} for {data.model}: {title}.",
        "primary": plot.is_unfolded
        and (num_workers is None or num_workers == data.shown_worker_count),
    }


def remove_figures_not_drawn(out_dir: Path, drawn: Sequence[dict[str, Any]]) -> None:
    """Remove the figures of earlier runs that were not drawn again.

    Args:
        out_dir: Folder of the figures.
        drawn: Entries of the figures that were drawn now.
    """
    kept = {out_dir / Path(figure["file"]).with_suffix("") for figure in drawn}
    for path in out_dir.rglob("*"):
        ours = path.stem.partition("_on_")[0] in PLOTS
        if path.is_file() and ours and path.with_suffix("") not in kept:
            path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of figures, and return the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.figures.plots", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="the file cells.csv to read")
    parser.add_argument("--epochs", type=Path, required=True, help="the file epochs.csv to read")
    parser.add_argument("--summary", type=Path, required=True, help="the file summary.csv to read")
    parser.add_argument(
        "--answers", type=Path, help="the file answers.json, to mark the chosen strategies"
    )
    parser.add_argument(
        "--study-dir", type=Path, help="the folder results/<study>, to draw timelines"
    )
    parser.add_argument(
        "--out-dir", type=Path, required=True, help="the folder to write the figures to"
    )
    args = parser.parse_args(argv)
    tables = (args.cells, args.epochs, args.summary, args.answers, args.study_dir)
    found = read_figure_data(*tables)
    _loaded[:] = found
    asked = [
        (place, name, count)
        for place, data in enumerate(found)
        for name, count in iter_figure_names_and_worker_counts(data)
    ]
    n_processes = min(len(list_usable_cores()), 1 + len(asked) // FIGURES_A_PROCESS)
    with ExitStack() as stack:
        drawing = map
        if n_processes > 1:
            # Outside of Linux, a forked process may crash after its parent has used system libraries.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            pool = ProcessPoolExecutor(
                n_processes, context, initializer=load_figure_data_into_process, initargs=tables
            )
            drawing = stack.enter_context(pool).map
        columns = list(zip(*asked, strict=True)) or [(), (), ()]
        drawn = []
        for figure in drawing(write_figure, *columns, [args.out_dir] * len(asked)):
            print(args.out_dir / figure["file"], flush=True)
            drawn.append(figure)
    write_text_atomically(args.out_dir / INDEX, json.dumps(drawn, indent=1, ensure_ascii=False))
    remove_figures_not_drawn(args.out_dir, drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
