"""Writes the tables of a comparison as CSV, Markdown and LaTeX."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.measures import NO_CELL
from stratbench.analysis.tables.tables import (
    build_table_lines,
    build_text_table,
    format_latex_table,
    format_markdown_table,
)
from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import shorten_for_table
from stratbench.extensions.sets.comparing.comparison import (
    ComparedCell,
    Comparison,
    StrategyMean,
    describe_differences,
)
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.unpaired import compute_geometric_mean

#: A spreadsheet reads a text in a CSV file as a formula if it begins with one of these characters.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def format_ratio(estimate: IntervalEstimate) -> str:
    """Return a ratio as text, with its interval if there is one."""
    return estimate.format_value_and_interval("{:.3f}".format)


def format_score_change(cell: ComparedCell) -> str:
    """Return the change of a cell's score as text, which is empty if unknown."""
    change = cell.score_change
    return (
        ""
        if change is None
        else change.format_value_and_interval(f"{{:+.{cell.score.shown_decimals}f}}".format)
    )


def format_mean_time(times_s: tuple[float, ...]) -> str:
    """Return the geometric mean of times as text, such as `1.5 s`. Add the number of several times."""
    if not times_s:
        return NO_CELL
    return f"{compute_geometric_mean(times_s):.4g} s" + (
        f" (n = {len(times_s)})" if len(times_s) > 1 else ""
    )


def make_interval_columns(
    column: str, estimate: IntervalEstimate | None
) -> dict[str, float | None]:
    """Return a value and both ends of its interval, by the names of three columns.

    Args:
        column: Name of the value's column.
        estimate: The value and its interval, or None if they are unknown.
    """
    ends = (column, f"{column}_low", f"{column}_high")
    return dict(zip(ends, estimate or (None, None, None), strict=True))


def iter_compared_cell_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a row of the comparison's cells.csv for each cell that is in both sets."""
    for cell in comparison.common_cells:
        yield {
            "experiment": cell.match.first_group.experiment,
            "experiment_other": cell.match.other_group.experiment,
            "strategy": cell.group.strategy,
            "model": cell.group.model,
            "dataset": cell.match.dataset,
            "workers": cell.group.gpus,
            "repeats_first": len(cell.first_measurements.train_times_s),
            "repeats_other": len(cell.other_measurements.train_times_s),
            "time_first_s": compute_geometric_mean(cell.first_measurements.train_times_s)
            if cell.first_measurements.train_times_s
            else None,
            "time_other_s": compute_geometric_mean(cell.other_measurements.train_times_s)
            if cell.other_measurements.train_times_s
            else None,
            **make_interval_columns("time_ratio", cell.time_ratio),
            "memory_ratio": cell.memory_ratio,
            "score_name": cell.score.name,
            **make_interval_columns("score_change", cell.score_change),
            "outcome_first": cell.first_measurements.failure_text or "ok",
            "outcome_other": cell.other_measurements.failure_text or "ok",
            "no_ratio_because": cell.no_ratio_reason,
            "doubted_by": "; ".join(cell.doubtful_rules),
            "not_known_to_be_equal": describe_differences(cell.unstated_differences),
        }


def make_ratio_table(comparison: Comparison, experiment: str) -> pd.DataFrame:
    """Return the table of an experiment's time ratios, with a row per model and strategy.

    The table has a column per worker count.
    """
    cells = [c for c in comparison.common_cells if c.group.experiment == experiment]
    counts = sorted({c.group.gpus for c in cells})
    texts = (
        (c.group, format_ratio(c.time_ratio) if c.time_ratio else f"n/a ({c.no_ratio_reason})")
        for c in cells
    )
    return build_text_table(counts, build_table_lines(texts), "worker")


def make_strategy_table(means: tuple[StrategyMean, ...]) -> pd.DataFrame:
    """Return the table of each strategy's mean time ratio."""
    return pd.DataFrame(
        [
            [m.strategy, m.workers_text, format_ratio(m.time_ratio), m.model_count, m.cell_count]
            for m in means
        ],
        columns=["strategy", "workers", "time ratio", "models", "cells"],
    )


def make_difference_table(comparison: Comparison) -> pd.DataFrame:
    """Return the table of differences between two sets, those that prevent time ratios first."""
    return pd.DataFrame(
        [
            [
                d.kind,
                d.field_path,
                shorten_for_table(d.first_value),
                shorten_for_table(d.other_value),
                d.cell_count,
                effect,
            ]
            for effect, listed in comparison.differences_by_effect.items()
            for d in listed
        ],
        columns=[
            "kind",
            "field",
            comparison.first_set.name,
            comparison.other_set.name,
            "cells",
            "effect",
        ],
    )


def write_comparison_tables(comparison: Comparison, out_dir: Path) -> None:
    """Write all tables of a comparison of two sets to a folder in `out_dir`.

    The folder has the name of the second set.
    """
    folder = out_dir / comparison.other_set.name
    first, other = comparison.first_set.name, comparison.other_set.name
    write_csv_without_formulas(
        pd.DataFrame(list(iter_compared_cell_rows(comparison))), folder / "cells.csv"
    )
    write_comparison_table(
        make_difference_table(comparison),
        f"Differences between the result sets {first} and {other}.",
        folder / "differences",
    )
    write_comparison_table(
        make_strategy_table(comparison.strategy_means),
        f"Training time in {other} divided by that in {first}, for each strategy. A ratio is the geometric "
        "mean over the cells of each model, then over models. Brackets have the 95 % t interval over models, "
        "or over repeats if there is one model.",
        folder / "strategies",
    )
    for experiment in dict.fromkeys(cell.group.experiment for cell in comparison.common_cells):
        write_comparison_table(
            make_ratio_table(comparison, experiment),
            f"Training time in {other} divided by that in {first}, for each cell of the experiment "
            f"{experiment}. A ratio is that of the geometric means over repeats. Brackets have the 95 % "
            "interval by Welch's t on logarithms, if both sets have two repeats or more.",
            folder / experiment / "time_ratio",
        )


def write_comparison_table(table: pd.DataFrame, title: str, path_stem: Path) -> None:
    """Write a table of texts as CSV, Markdown and LaTeX.

    Args:
        table: The table.
        title: Title of the table.
        path_stem: Path of the files without .csv, .md and .tex.
    """
    write_csv_without_formulas(table, path_stem.with_suffix(".csv"))
    shown = table.map(lambda value: html.escape(str(value), quote=False))
    write_text_atomically(path_stem.with_suffix(".md"), format_markdown_table(shown, title))
    write_text_atomically(path_stem.with_suffix(".tex"), format_latex_table(table, title))


def write_csv_without_formulas(table: pd.DataFrame, path: Path) -> None:
    """Write a CSV file in which no text is a formula for a spreadsheet.

    A text that looks like a formula gets a ' at its begin.
    """

    def escape_formula(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    write_text_atomically(path, table.map(escape_formula).to_csv(index=False))
