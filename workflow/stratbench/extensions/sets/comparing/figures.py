"""Draws the time ratios of a comparison: a set's training time divided by the first set's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from stratbench.analysis.figures.figure_data import assign_marks
from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.rows import FigureRow, Point, RowChart, draw_row_chart
from stratbench.analysis.figures.sheet import RC, save_figure
from stratbench.analysis.report.shown import build_data_uri
from stratbench.extensions.sets.comparing.comparison import ComparedCell, Comparison


def draw_ratio_figures(
    comparison: Comparison, out_dir: Path, margin: float
) -> list[dict[str, Any]]:
    """Draw a figure of time ratios per experiment and model.

    The result has each figure's title, caption, alternative text and data URI.

    Args:
        comparison: Comparison of two sets.
        out_dir: Folder to write to.
        margin: Share within which two times count as equal.
    """
    marks = assign_marks(pd.concat([comparison.first_set.cells, comparison.other_set.cells]))
    drawn = []
    for experiment, model in dict.fromkeys(
        c.group.experiment_and_model for c in comparison.cells_with_ratio
    ):
        cells = [
            c
            for c in comparison.cells_with_ratio
            if c.group.experiment_and_model == (experiment, model)
        ]
        stem = out_dir / comparison.other_set.name / experiment / f"{model}_time_ratio"
        with plt.rc_context(RC):
            save_figure(draw_row_chart(make_ratio_rows(cells, marks, margin)), stem)
        drawn.append(
            {
                "title": f"{model}, {experiment}",
                "caption": " ".join(iter_caption_sentences(comparison, cells, margin)),
                "alt": f"Training times in {comparison.other_set.name} as multiples of those in "
                f"{comparison.first_set.name}, for model {model} and experiment {experiment}.",
                "uri": build_data_uri(stem.with_suffix(".svg").read_bytes()),
            }
        )
    return drawn


def make_ratio_rows(
    cells: Sequence[ComparedCell], marks: Mapping[str, Mark], margin: float
) -> RowChart:
    """Return a time-ratio figure's rows: one per strategy, with a point per worker count.

    A point has its full colour if the interval of its ratio excludes 1.

    Args:
        cells: Cells of the figure.
        marks: Colour and shape of each strategy.
        margin: Share within which two times count as equal.
    """
    several = len({c.group.gpus for c in cells}) > 1
    rows = []
    for strategy in dict.fromkeys(c.group.strategy for c in cells):
        own = sorted((c for c in cells if c.group.strategy == strategy), key=lambda c: c.group.gpus)
        points = [
            Point(
                *c.time_ratio,
                str(c.group.gpus) if several else "",
                c.time_ratio.interval_excludes(1),
            )
            for c in own
        ]
        text = f"{own[-1].time_ratio.value:.2f}×"
        rows.append(
            FigureRow(
                strategy,
                points,
                best_value_text=text,
                is_chosen_strategy=any(p.is_chosen_candidate for p in points),
            )
        )
    head = f"on {max(c.group.gpus for c in cells)}" if several else ""
    return RowChart.from_ratio_rows(rows, marks, margin, head)


def iter_caption_sentences(
    comparison: Comparison, cells: Sequence[ComparedCell], margin: float
) -> Iterator[str]:
    """Yield the sentences of a figure's caption.

    Args:
        comparison: Comparison of two sets.
        cells: Cells of the figure.
        margin: Share within which two times count as equal.
    """
    first, other = comparison.first_set, comparison.other_set
    yield f"Training time in {other.name}, divided by that in {first.name}."
    if len({c.group.gpus for c in cells}) > 1:
        yield "The number in a mark is the number of workers."
    yield f"In the shaded band, the two times differ by at most {100 * margin:g} %."
    if any(c.time_ratio.low is not None for c in cells):
        yield "Lines are 95 % intervals. A mark has its full colour if the interval excludes 1."
    else:
        yield "There are no intervals, because one of the sets has only one repeat per cell."
