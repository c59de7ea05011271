"""Tables of a comparison as CSV, Markdown and LaTeX."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.measures import NO_CELL
from stratbench.analysis.tables.tables import latex, lines_by_model, markdown, table_by_count
from stratbench.cell.files import write_atomic
from stratbench.cell.text.words import shortened
from stratbench.extensions.sets.comparing.comparison import (
    ComparedCell,
    Comparison,
    StrategyMean,
    against_each_other,
)
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.unpaired import geometric_mean

#: First characters that make other programs read a text in a CSV file as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def ratio_text(estimate: IntervalEstimate) -> str:
    """Return a ratio as tables print it, with its interval if there is one."""
    return estimate.text("{:.3f}".format)


def change_text(cell: ComparedCell) -> str:
    """Return a change of a score as tables print it.

    Empty if it is not known.
    """
    change = cell.score_change
    return "" if change is None else change.text(f"{{:+.{cell.score.decimals}f}}".format)


def times_text(times: tuple[float, ...]) -> str:
    """Return the geometric mean of times, with their number."""
    if not times:
        return NO_CELL
    return f"{geometric_mean(times):.4g} s" + (f" (n = {len(times)})" if len(times) > 1 else "")


def columns_of(name: str, estimate: IntervalEstimate | None) -> dict[str, float | None]:
    """Return the columns of a value and of the ends of its interval."""
    ends = (name, f"{name}_low", f"{name}_high")
    return dict(zip(ends, estimate or (None, None, None), strict=True))


def cell_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a row for every shared kind of cell, with all its numbers."""
    for cell in comparison.cells:
        yield {
            "experiment": cell.match.first.experiment,
            "experiment_other": cell.match.other.experiment,
            "strategy": cell.group.strategy,
            "model": cell.group.model,
            "dataset": cell.match.dataset,
            "workers": cell.group.gpus,
            "repeats_first": len(cell.first.times),
            "repeats_other": len(cell.other.times),
            "time_first_s": geometric_mean(cell.first.times) if cell.first.times else None,
            "time_other_s": geometric_mean(cell.other.times) if cell.other.times else None,
            **columns_of("time_ratio", cell.time),
            "memory_ratio": cell.memory,
            "score_name": cell.score.name,
            **columns_of("score_change", cell.score_change),
            "outcome_first": cell.first.outcome or "ok",
            "outcome_other": cell.other.outcome or "ok",
            "no_ratio_because": cell.why_not,
            "doubted_by": "; ".join(cell.doubts),
            "not_known_to_be_equal": against_each_other(cell.unknown),
        }


def wide_table(comparison: Comparison, experiment: str) -> pd.DataFrame:
    """Return the ratios of one experiment: models and strategies by worker count."""
    cells = [c for c in comparison.cells if c.group.experiment == experiment]
    counts = sorted({c.group.gpus for c in cells})
    texts = ((c.group, ratio_text(c.time) if c.time else f"n/a ({c.why_not})") for c in cells)
    return table_by_count(counts, lines_by_model(texts), "worker")


def strategy_table(means: tuple[StrategyMean, ...]) -> pd.DataFrame:
    """Return the mean ratio of each strategy."""
    return pd.DataFrame(
        [[m.strategy, m.workers, ratio_text(m.time), m.models, m.cells] for m in means],
        columns=["strategy", "workers", "time ratio", "models", "cells"],
    )


def difference_table(comparison: Comparison) -> pd.DataFrame:
    """Return the differences: first those that prevent a ratio, then those that may explain ratios."""
    return pd.DataFrame(
        [
            [d.kind, d.path, shortened(d.first), shortened(d.other), d.cells, effect]
            for effect, listed in comparison.by_effect.items()
            for d in listed
        ],
        columns=["kind", "field", comparison.first.name, comparison.other.name, "cells", "effect"],
    )


def write_all(comparison: Comparison, out_dir: Path) -> None:
    """Write <out_dir>/<other>/: cells.csv, differences, strategies, and the ratios of each experiment."""
    folder = out_dir / comparison.other.name
    a, b = comparison.first.name, comparison.other.name
    safe_csv(pd.DataFrame(list(cell_rows(comparison))), folder / "cells.csv")
    write_table(
        difference_table(comparison), f"What differs between {a} and {b}.", folder / "differences"
    )
    write_table(
        strategy_table(comparison.strategies),
        f"Training time in {b} divided by that in {a}: geometric mean over cells within a model, then over "
        "models [95 % t interval over models; of one model by its repeats].",
        folder / "strategies",
    )
    for experiment in dict.fromkeys(cell.group.experiment for cell in comparison.cells):
        write_table(
            wide_table(comparison, experiment),
            f"Training time in {b} divided by that in {a}, experiment {experiment}: ratio of geometric means "
            "[95 % interval by Welch's t on logarithms, unpaired; without: fewer than two repeats].",
            folder / experiment / "time_ratio",
        )


def write_table(table: pd.DataFrame, title: str, stem: Path) -> None:
    """Write a table of texts as <stem>.csv, .md and .tex.

    Args:
        table: The table.
        title: Its title.
        stem: Path without an ending.
    """
    safe_csv(table, stem.with_suffix(".csv"))
    shown = table.map(lambda value: html.escape(str(value), quote=False))
    write_atomic(stem.with_suffix(".md"), markdown(shown, title))
    write_atomic(stem.with_suffix(".tex"), latex(table, title))


def safe_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a CSV file without formulas: a text that looks like one gets a leading '."""

    def plain(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    write_atomic(path, table.map(plain).to_csv(index=False))
