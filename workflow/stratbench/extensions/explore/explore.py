"""Writes explore.html, an interactive page on all cells with a figure, filters and a table.

The page needs no network and no other file. Its data are JSON in the page, and its state is that of an HTML
form. Its script inserts texts only as text, and a content security policy forbids other scripts and all
requests.
"""

from __future__ import annotations

import base64
import gzip
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.figures.marks import (
    FAMILIES,
    FILLS,
    assign_marks_by_strategy,
    compute_shape_corners,
)
from stratbench.analysis.records.columns import CELL_COLUMNS, COORDINATES, Column, Row
from stratbench.analysis.records.findings import SEVERITIES
from stratbench.analysis.records.groups import GROUP, map_base_strategies
from stratbench.analysis.records.measures import FACTORS
from stratbench.analysis.records.reading import Reading, ReportInput
from stratbench.analysis.records.score import read_score
from stratbench.cell.coordinates import CELL_PATTERN, STATUSES
from stratbench.cell.text import pages
from stratbench.cell.text.words import WORKER_NOUNS, pluralize

TEMPLATES = Path(__file__).parent / "templates"
#: On a page that compares several sets of results: the column with the name of a cell's set.
SET_COLUMN = Column("set", "text", "", None, "The result set that the cell is from.")
#: Numeric columns whose values are shown as categories, and not on a continuous axis.
DISCRETE = ("gpus", "repeat")
#: Columns whose filters come first on the page.
FIRST = ("set", "experiment", "model", "strategy", "gpus", "repeat", "status", "audit")
#: Columns whose values are listed in the order of cells.csv. Values of other columns are sorted.
AS_THEY_COME = ("set", "experiment", "strategy", "model", "audit")
#: Maximum number of distinct values with which a column has a filter: for texts, and for measured numbers.
#: Coordinates of a cell always have a filter.
MAX_LEVELS, MAX_NUMBER_LEVELS = 60, 8
#: Columns that the table shows at first: coordinates and the main measurements.
SHOWN = (
    *("set", "experiment", "strategy", "model", "gpus", "train_time_s", "score_final"),
    *("peak_memory_bytes", "throughput_samples_per_s", "status", "audit"),
)
#: A column's axis is logarithmic at first if its largest number is more than this many times its smallest.
LOG_FROM = 20
#: Columns that are not shown: the name of the study, and paths, which become links.
NOT_SHOWN = ("study", "record_path", "log_path")
#: Columns with scores. Their unit depends on the task.
SCORES = ("score_final", "score_best")
#: Number of significant digits of a measured value.
DIGITS = 6
#: Texts with more characters are compressed, so that a page with 10,000 cells stays below 1 MiB.
MAX_PLAIN = 1 << 18


def make_column_label(name: str, unit: str) -> str:
    """Return a column's label: its name with blanks, without the unit at its end."""
    if name == "gpus":
        return "workers"
    suffix = {"%": "pct", "FLOP/s": "flops_per_s"}.get(unit, unit.replace("/", "_per_"))
    words = name.removesuffix(f"_{suffix}") if suffix else name
    return words.replace("_", " ")


def get_shown_unit_and_factor(column: Column, cells: pd.DataFrame) -> tuple[str, float]:
    """Return a column's unit on the page, and the factor to this unit.

    Scores with different units are shown in the units of the records.
    """
    if column.name in SCORES and cells["score_unit"].dropna().nunique() <= 1:
        score = read_score(cells)
        return score.shown_unit, score.display_factor
    units = ((shown, by) for (own, shown), by in FACTORS.items() if own == column.unit)
    return next(units, (column.unit, 1.0))


def round_to_significant_digits(value: float) -> float | int:
    """Round a measured value to six significant digits. Whole numbers are not changed."""
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def make_natural_sort_key(value: Any) -> tuple[Any, ...]:
    """Return a sort key by which the text `v2` comes before `v10`.

    Numbers in texts sort by value, and None comes last.
    """
    if not isinstance(value, str):
        return value is None, value
    parts = re.split(r"([0-9]+)", value.lower())
    return False, [int(part) if n % 2 else part for n, part in enumerate(parts)]


def encode_column_values(name: str, is_numeric: bool, values: Sequence[Any]) -> Row:
    """Return a column's values for the page's script: the distinct ones with indices, or all.

    Distinct values are called levels, and `at` has an index per cell. Columns with levels get a filter. A
    single level has no `at`.
    """
    levels = list(dict.fromkeys(values))
    most = MAX_NUMBER_LEVELS if is_numeric else MAX_LEVELS
    if len(levels) > most and name not in COORDINATES:
        return {"values": list(values)}
    if name not in AS_THEY_COME:
        levels.sort(key=make_natural_sort_key)
    if len(levels) == 1:
        return {"levels": levels}
    place = {level: n for n, level in enumerate(levels)}
    return {"levels": levels, "at": [place[value] for value in values]}


def get_column_values(column: Column, cells: pd.DataFrame) -> list[Any] | None:
    """Return a column's values in its unit on the page. None if all values are missing."""
    series = cells[column.name]
    if not series.notna().any():
        return None
    if column.value_kind == "number":
        by = get_shown_unit_and_factor(column, cells)[1]
        return [
            None if v is None else round_to_significant_digits(v * by)
            for v in list_series_values(series.astype(float))
        ]
    return [None if v is None else str(v) for v in list_series_values(series)]


def list_series_values(series: pd.Series) -> list[Any]:
    """Return the values of a series as a list, with None for missing values."""
    return series.astype(object).where(series.notna(), None).tolist()


def iter_page_columns(cells: pd.DataFrame) -> Iterator[Row]:
    """Yield each column of cells.csv that has a value, as the page's script reads it."""
    for column in (SET_COLUMN, *CELL_COLUMNS):
        if column.name not in cells or column.name in NOT_SHOWN or column.value_kind == "json":
            continue
        if (values := get_column_values(column, cells)) is None:
            continue
        yield make_page_column(
            column.name,
            values,
            label=make_column_label(column.name, column.unit),
            unit=get_shown_unit_and_factor(column, cells)[0],
            is_numeric=column.value_kind == "number" and column.name not in DISCRETE,
            definition=column.definition,
        )


def make_page_column(
    name: str,
    values: Sequence[Any],
    *,
    label: str,
    definition: str,
    unit: str = "",
    is_numeric: bool = False,
) -> Row:
    """Return a column as the page's script reads it: label, unit, definition and values."""
    return {
        "name": name,
        "label": label,
        "unit": unit,
        "heading": f"{label} ({unit})" if unit else label,
        "number": is_numeric,
        "definition": definition,
        **encode_column_values(name, is_numeric, values),
    }


def iter_severity_columns(audit: Row, num_cells: int) -> Iterator[Row]:
    """Yield one column with the severity of each cell's worst audit finding.

    An audit without findings has no column.
    """
    if not audit["rules"]:
        return
    graded = [SEVERITIES.index(rule["severity"]) for rule in audit["rules"]]
    worst = {
        number: SEVERITIES[min(graded[r] for r in rules)]
        for number, rules in audit["cells"].items()
    }
    yield make_page_column(
        "audit",
        [worst.get(number, "no finding") for number in range(num_cells)],
        label="audit",
        definition="Severity of the worst finding of the audit on the cell: unusable, warning or note.",
    )


def iter_finding_indices_per_cell(
    cells: pd.DataFrame, findings: Sequence[Row]
) -> Iterator[list[int]]:
    """Yield the indices of the audit's findings on each cell, per row of cells.csv.

    A finding that lacks coordinates is on all cells that share its other coordinates. Without any, it is on
    none.
    """
    names = [name for name in ("set", *GROUP, "repeat") if name in cells]
    placed: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for place, finding in enumerate(findings):
        where = tuple((n, finding[n]) for n in names if pd.notna(finding.get(n)))
        placed.setdefault(where, []).append(place)
    patterns = {tuple(name for name, _ in where) for where in placed}
    kept = [c for n in range(1, len(names) + 1) for c in combinations(names, n) if c in patterns]
    for row in cells[names].to_dict("records"):
        yield list(
            chain.from_iterable(
                placed.get(tuple((name, row[name]) for name in pattern), ()) for pattern in kept
            )
        )


def collect_audit_data(cells: pd.DataFrame, findings: Sequence[Row]) -> Row:
    """Return the audit rules that have findings, and the indices of each cell's rules."""
    rules: dict[tuple[str, str, str, str], int] = {}
    rule_at = [
        rules.setdefault((f["rule"], f["severity"], f["affects"], f["explanation"]), len(rules))
        for f in findings
    ]
    found = zip(cells["status"], iter_finding_indices_per_cell(cells, findings), strict=True)
    by_cell = {
        number: sorted({rule_at[place] for place in places})
        for number, (status, places) in enumerate(found)
        if places and status in STATUSES  # cells without a result are left out
    }
    keys = ("id", "severity", "affects", "explanation")
    return {
        "severities": SEVERITIES,
        "rules": [dict(zip(keys, rule, strict=True)) for rule in rules],
        "cells": by_cell,
    }


def collect_cell_links(cells: pd.DataFrame, study_dir: Path, page_dir: Path) -> Row:
    """Return the links to the records and logs of the cells.

    Each link lists the indices of the cells that have this file.
    """
    folder = Path(os.path.relpath(study_dir, page_dir)).as_posix()
    paths = {"record": f"cells/{CELL_PATTERN}/record.json", "log": f"logs/{CELL_PATTERN}.log"}
    return {
        kind: {
            "path": f"{folder}/{path}",
            "cells": [
                number
                for number, there in enumerate(list_series_values(cells[f"{kind}_path"]))
                if there is not None and (study_dir / there).exists()
            ],
        }
        for kind, path in paths.items()
    }


def make_page_data(cells: pd.DataFrame, findings: Sequence[Row] = ()) -> dict[str, Any]:
    """Return all data of the page: cells, columns, colours, links and audit findings.

    Args:
        cells: Rows of cells.csv, with a column `set` if there are several sets.
        findings: Rows of audit.csv, with `set` as well if there are several sets.
    """
    bases = map_base_strategies(cells)
    marks = assign_marks_by_strategy((name, bases.get(name)) for name in cells["strategy"].unique())
    hues = {
        name: [hue.full_and_quiet_light_colours[0], hue.full_and_quiet_dark_colours[0]]
        for name, hue in FAMILIES.items()
    }
    audit = collect_audit_data(cells, findings)
    return {
        "cells": len(cells),
        "columns": [*iter_page_columns(cells), *iter_severity_columns(audit, len(cells))],
        "coordinates": [name for name in ("set", *COORDINATES[1:]) if name in cells],
        # Each strategy's colour (a pair for light and dark mode) and marker (a shape with a fill).
        "styles": {name: [hues[m.family], m.shape_and_filling] for name, m in marks.items()},
        "colours": list(hues.values())[1:],
        "markers": [f"{hue.shape} {fill}" for fill in FILLS for hue in FAMILIES.values()],
        "fills": FILLS,
        "shapes": {
            hue.shape: [[round(x, 3), round(y, 3)] for x, y in compute_shape_corners(hue.shape)]
            for hue in FAMILIES.values()
        },
        "audit": audit,
        "nouns": {
            kind: [noun, pluralize(noun)] for kind, noun in (("", "worker"), *WORKER_NOUNS.items())
        },
        "files": {},
    }


def compress_text(text: str) -> str:
    """Compress a long text by gzip and base64; a short text is returned unchanged.

    The page's script recognizes a compressed text by its first character.
    """
    if len(text) <= MAX_PLAIN:
        return text
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def collect_page_controls(data: Row) -> Row:
    """Return the columns that each control of the page's form offers."""
    columns = {c["name"]: c for c in data["columns"]}
    numbers = [c for c in columns.values() if c["number"]]
    names = [c for c in columns.values() if "levels" in c and not c["number"]]
    filters = [
        {**c, "counts": Counter(c["at"])}
        for c in map(columns.get, dict.fromkeys([*FIRST, *columns]))
        if c is not None and sum(level is not None for level in c.get("levels", ())) > 1
    ]
    y = columns.get("train_time_s") or next(iter(numbers), columns["status"])
    shown = dict.fromkeys(n for n in (*SHOWN, *data["coordinates"]) if n in columns)
    return {
        "axes": {"names": names, "numbers": numbers},
        "looks": {"names": names, "numbers": [c for c in numbers if "levels" in c]},
        "chosen": {"x": "gpus", "y": y["name"], "colour": "strategy",
                   "marker": "set" if "set" in columns else "strategy"},
        "logarithmic": {"x": False, "y": has_wide_range(y)},
        "filters": [c for c in filters if c["name"] in FIRST],
        "more_filters": [c for c in filters if c["name"] not in FIRST],
        "shown": shown,
        "table": [columns[name] for name in dict.fromkeys([*shown, *columns])],
    }  # fmt: skip


def has_wide_range(column: Row) -> bool:
    """Return whether a column needs a logarithmic axis: positive numbers over a wide range."""
    values = column.get("values") or column["levels"]
    known = [v for v in values if isinstance(v, (int, float))]
    return bool(known) and 0 < LOG_FROM * min(known) < max(known)


def render_explore_page(
    data: dict[str, Any], title: str, notices: Sequence[str], report_link: str | None
) -> str:
    """Return the interactive page on cells as HTML.

    Args:
        data: Result of `make_page_data`.
        title: Title of the page.
        notices: Sentences that a reader must know before any number.
        report_link: Relative link to the report, or None.
    """
    values = {
        "title": title,
        "notices": notices,
        "back": report_link,
        "data": compress_text(pages.format_html_safe_json(data)),
        **collect_page_controls(data),
        **pages.read_page_script(TEMPLATES / "explore.js"),
    }
    return pages.render_page("explore.html.j2", TEMPLATES, values=values)


def make_study_page(inputs: ReportInput, notices: Sequence[str]) -> str:
    """Return the page of one study as HTML, with links to files below results/<study>."""
    data = make_page_data(inputs.cells, inputs.findings.to_dict("records"))
    data["files"] = collect_cell_links(inputs.cells, inputs.study_dir, inputs.folder)
    return render_explore_page(data, str(inputs.cells["study"].iloc[0]), notices, "report.html")


READING = Reading(
    render_page=make_study_page, page_file_name="explore.html", page_link_title="Explore the cells"
)
