"""Makes the paper's tables 3 to 8 with the values of a study.

Tables 3 to 7 have texts of summary.csv. Table 8 of the paper rates each strategy in words. Our table 8 has
measured values instead, with the cells that they are from.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.groups import map_base_strategies
from stratbench.analysis.records.measures import (
    NO_CELL,
    Measure,
    append_dagger_if_flagged,
    format_number,
    map_measures_by_experiment,
)
from stratbench.analysis.tables.tables import describe_worker_devices, write_table
from stratbench.cell.files import write_text_atomically


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables 3 to 7: its strategies (with their variants) and its measures."""

    name: str
    title: str
    strategies: tuple[str, ...]
    measures: tuple[str, ...]
    #: Whether the table has only the largest worker count of each experiment.
    has_only_largest_worker_count: bool = False


# fmt: off
TABLES = {
    t.name: t
    for t in (
        PaperTable("table_3", "Training time of DDP and FSDP (s)", ("ddp", "fsdp"), ("training_time",)),
        PaperTable("table_4", "Test score of the synchronous and the asynchronous server",
            ("ps-sync", "ps-async"), ("score",)),
        PaperTable("table_5", "Training time of the synchronous and the asynchronous server (s)",
            ("ps-sync", "ps-async"), ("training_time",)),
        PaperTable("table_6",
            "Training time of the synchronous and the modified asynchronous server (s)",
            ("ps-sync", "ps-async-modified"), ("training_time",)),
        PaperTable("table_7", "Standard, modified and staleness-mitigated asynchronous server",
            ("ps-async", "ps-async-modified", "ps-dana", "ps-ormo", "ps-preview"),
            ("score", "training_time"), has_only_largest_worker_count=True),
    )
}
# fmt: on
#: Title of each of tables 3 to 8, by name of the table.
TITLES = {name: table.title for name, table in TABLES.items()} | {
    "table_8": "The strategies compared, each on the most workers of its experiment (range over models)"
}
#: Text in place of a table without rows.
NO_STRATEGIES = "The study has no such strategies."
#: Measures of summary.csv that are columns of table 8, with the column's heading.
TABLE_8_HEADINGS = {
    "speedup_vs_single": "speedup over single",
    "efficiency": "scaling efficiency",
    "time_vs_ddp": "time against ddp",
    "time_vs_sync": "time against ps-sync",
    "memory_reduction": "memory reduction against ddp",
    "score": "test score",
}


def make_paper_table(
    summary: pd.DataFrame,
    base_strategies: dict[str, str],
    measures: dict[str, dict[str, Measure]],
    table: PaperTable,
) -> pd.DataFrame:
    """Return one of tables 3 to 7 from the rows of summary.csv.

    The columns are experiment, strategy, model, measure, and one for each worker count. The table has no rows
    if the study has no such strategy.

    Args:
        summary: Rows of summary.csv.
        base_strategies: Strategy of each variant, by name of the variant; a plain strategy is its own.
        measures: Measures by name, by experiment.
        table: Table to make.
    """
    rows = summary[summary["measure"].isin(table.measures)]
    rows = rows[[base_strategies.get(name, name) in table.strategies for name in rows["strategy"]]]
    if table.has_only_largest_worker_count and len(rows):
        rows = rows[rows["gpus"] == rows.groupby("experiment")["gpus"].transform("max")]
    counts = sorted(rows["gpus"].unique())
    lines = []
    keys = ["experiment", "strategy", "model", "measure"]
    for key, line in rows.groupby(keys, sort=False):
        by_count = {row.gpus: format_summary_row(row) for row in line.itertuples()}
        cells = {f"{n} workers": by_count.get(n, NO_CELL) for n in counts}
        place = dict(zip(keys, key, strict=True)) | {
            "measure": measures[str(key[0])][key[3]].heading
        }
        lines.append(place | cells)
    columns = [*keys, *(f"{n} workers" for n in counts)]
    return pd.DataFrame(lines, columns=columns)


def format_summary_row(summary_row: Any) -> str:
    """Return the value of a row of summary.csv as text, as the paper prints it.

    A value that the audit doubts gets a dagger.
    A time limit has the form of the paper (`>3000`).
    """
    is_limit = summary_row.text.startswith(">")
    text = summary_row.text.replace(" s", "") if is_limit else summary_row.text
    return append_dagger_if_flagged(text, summary_row.flags)


def make_table_8(cells: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's table 8 with a row per experiment, strategy and measure.

    A row is for the strategy's largest number of workers in the experiment.

    The column `text` has the range of values over the models. `models` is their number, and `records` are the
    paths of their cells. `outcomes` are those of cells that did not finish, and `flags` those of the audit.

    Args:
        cells: Rows of cells.csv.
        summary: Rows of summary.csv.
    """
    lines, measures = [], map_measures_by_experiment(cells)
    most = summary.groupby(["experiment", "strategy"], sort=False)["gpus"].transform("max")
    largest = summary[summary["gpus"] == most]
    for (experiment, strategy), rows in largest.groupby(["experiment", "strategy"], sort=False):
        workers = int(rows["gpus"].iloc[0])
        of = f"{experiment}/{strategy}/{{}}/{workers}gpu"
        listed = rows.to_dict("records")
        for measure, quality in TABLE_8_HEADINGS.items():
            line = [row for row in listed if row["measure"] == measure]
            known = [row for row in line if pd.notna(row["value"])]
            lines.append(
                {
                    "experiment": experiment,
                    "strategy": strategy,
                    "workers": workers,
                    "property": quality,
                    "text": format_value_range(
                        [row["value"] for row in known], measures[str(experiment)][measure]
                    ),
                    "models": len(known),
                    "records": " ".join(of.format(row["model"]) for row in known),
                    "outcomes": "; ".join(
                        f"{row['model']}: {row['outcome']}" for row in line if row["outcome"] != ""
                    ),
                    "flags": "; ".join(sorted({row["flags"] for row in known if row["flags"]})),
                }
            )
    return pd.DataFrame(lines)


def format_value_range(values: list[float], measure: Measure) -> str:
    """Return the range of a measure's values as text, such as `1.2 to 1.5 x`.

    If both ends have the same text, the range is one number.
    """
    if not values:
        return NO_CELL
    ends = [format_number(end, measure.decimals) for end in (min(values), max(values))]
    return f"{ends[0] if ends[0] == ends[1] else ' to '.join(ends)} {measure.unit}".rstrip()


def pivot_table_8(table_8: pd.DataFrame) -> pd.DataFrame:
    """Return table 8 with a row per strategy, and a column per measure.

    Args:
        table_8: Result of `make_table_8`, with a row per strategy and measure.
    """
    lines = []
    for (experiment, strategy), rows in table_8.groupby(["experiment", "strategy"], sort=False):
        texts = {
            row.property: append_dagger_if_flagged(row.text, row.flags) for row in rows.itertuples()
        }
        first = rows.iloc[0]
        place = {"experiment": experiment, "strategy": strategy, "workers": str(first["workers"])}
        lines.append(place | texts | {"not finished": first["outcomes"] or NO_CELL})
    return pd.DataFrame(lines)


def iter_paper_tables(
    cells: pd.DataFrame, summary: pd.DataFrame, table_8: pd.DataFrame
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the texts of each of tables 3 to 8. A table may have no rows.

    Args:
        cells: Rows of cells.csv.
        summary: Rows of summary.csv.
        table_8: Result of `make_table_8`.
    """
    bases = map_base_strategies(cells)
    measures = map_measures_by_experiment(cells)
    for table in TABLES.values():
        yield table.name, make_paper_table(summary, bases, measures, table)
    yield "table_8", pivot_table_8(table_8)


def write_paper_tables(cells: pd.DataFrame, summary: pd.DataFrame, out_dir: Path) -> None:
    """Write the paper's tables 3 to 8 with our values, and table 8's sources.

    Args:
        cells: Rows of cells.csv.
        summary: Rows of summary.csv.
        out_dir: Folder to write to.
    """
    table_8 = make_table_8(cells, summary)
    for name, table in iter_paper_tables(cells, summary, table_8):
        table = table if len(table) else pd.DataFrame([{"": NO_STRATEGIES}])
        caption = (
            f"Table {name.removeprefix('table_')}. {TITLES[name]}. {describe_worker_devices(cells)}"
        )
        write_table(table, caption, out_dir / name)
    write_text_atomically(out_dir / "table_8_sources.csv", table_8.to_csv(index=False))


def read_paper_tables(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each of our tables 3 to 8 that has rows, as a dict.

    The keys are id, title, columns and rows (of texts).

    Args:
        folder: Folder to which the tables were written.
    """
    for name, title in TITLES.items():
        with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as f:
            columns, *rows = csv.reader(f)
        if rows != [[NO_STRATEGIES]]:
            yield {"id": name, "title": title, "columns": columns, "rows": rows}
