"""Figures of a comparison: each cell's training time as a multiple of the same cell's in the first set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from stratbench.analysis.figures.figure_data import marks_of
from stratbench.analysis.figures.marks import Mark
from stratbench.analysis.figures.rows import FigureRow, Point, Rows, draw_rows
from stratbench.analysis.figures.sheet import RC, save_figure
from stratbench.analysis.report.shown import data_uri
from stratbench.extensions.sets.comparing.comparison import ComparedCell, Comparison


def draw_all(found: Comparison, out_dir: Path, margin: float) -> list[dict[str, Any]]:
    """Draw a figure of every experiment and model with a ratio.

    Return them as the page shows them.
    """
    marks = marks_of(pd.concat([found.first.cells, found.other.cells]))
    drawn = []
    for experiment, model in dict.fromkeys(c.group.comparison for c in found.with_ratio):
        cells = [c for c in found.with_ratio if c.group.comparison == (experiment, model)]
        stem = out_dir / found.other.name / experiment / f"{model}_time_ratio"
        with plt.rc_context(RC):
            save_figure(draw_rows(ratio_rows(cells, marks, margin)), stem)
        drawn.append(
            {
                "title": f"{model}, {experiment}",
                "caption": " ".join(caption(found, cells, margin)),
                "alt": f"Training times in {found.other.name} as multiples of those in "
                f"{found.first.name}: {model}, {experiment}.",
                "uri": data_uri(stem.with_suffix(".svg").read_bytes()),
            }
        )
    return drawn


def ratio_rows(cells: Sequence[ComparedCell], marks: Mapping[str, Mark], margin: float) -> Rows:
    """A row for each strategy, a point for each number of workers.

    Full where the interval leaves out 1.
    """
    several = len({c.group.gpus for c in cells}) > 1
    rows = []
    for strategy in dict.fromkeys(c.group.strategy for c in cells):
        own = sorted((c for c in cells if c.group.strategy == strategy), key=lambda c: c.group.gpus)
        points = [
            Point(*c.time, str(c.group.gpus) if several else "", c.time.excludes(1)) for c in own
        ]
        told = f"{own[-1].time.value:.2f}×"
        rows.append(FigureRow(strategy, points, told=told, chosen=any(p.chosen for p in points)))
    head = f"on {max(c.group.gpus for c in cells)}" if several else ""
    return Rows.of_ratios(rows, marks, margin, head)


def caption(found: Comparison, cells: Sequence[ComparedCell], margin: float) -> Iterator[str]:
    """What the figure shows."""
    yield f"Training time in {found.other.name} as a multiple of that in {found.first.name}."
    if len({c.group.gpus for c in cells}) > 1:
        yield "The number in a mark is the number of workers."
    yield f"Shaded: within {100 * margin:g} % of 1."
    if any(c.time.low is not None for c in cells):
        yield "Lines: 95 % intervals; full colour: the interval leaves out 1."
    else:
        yield "One repeat on a side: no interval."
