"""Writes explore.html: all cells on one interactive page, with axes, filters and a table to choose from.

The page needs no network and no other file. Its data are JSON in the page, and its state is that of a form in
its HTML. Its script writes texts only as text, and a policy in the page forbids any other script and any
request.
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

from stratbench.analysis.figures.marks import FAMILIES, FILLS, corners, marks_by_strategy
from stratbench.analysis.records.columns import CELL_COLUMNS, COORDINATES, Column, Row
from stratbench.analysis.records.findings import SEVERITIES
from stratbench.analysis.records.groups import GROUP, bases_by_strategy
from stratbench.analysis.records.measures import FACTORS
from stratbench.analysis.records.reading import Reading, ReportInput
from stratbench.analysis.records.score import score_of
from stratbench.cell.coordinates import CELL_PATTERN, STATUSES
from stratbench.cell.text import pages
from stratbench.cell.text.words import WORKER_NOUNS, plural

TEMPLATES = Path(__file__).parent / "templates"
#: The column with the name of a cell's result set, for a page that shows several.
SET_COLUMN = Column("set", "text", "", None, "The result set that the cell is from.")
#: Numbers that name or count something: they are listed, not put on a continuous axis.
DISCRETE = ("gpus", "repeat")
#: The columns that come first among the filters.
FIRST = ("set", "experiment", "model", "strategy", "gpus", "repeat", "status", "audit")
#: The columns whose values are listed as they come, not sorted.
AS_THEY_COME = ("set", "experiment", "strategy", "model", "audit")
#: Columns with more values than this have no filter; fewer for measured numbers, none for coordinates.
MAX_LEVELS, MAX_NUMBER_LEVELS = 60, 8
#: The columns of the table at first: what tells cells apart and what was measured, as a screen has room for.
SHOWN = (
    *("set", "experiment", "strategy", "model", "gpus", "train_time_s", "score_final"),
    *("peak_memory_bytes", "throughput_samples_per_s", "status", "audit"),
)
#: A time axis is logarithmic at first where the longest time is more than this many times the shortest.
LOG_FROM = 20
#: Columns that are not shown: the study's name, and paths, which become links.
NOT_SHOWN = ("study", "record_path", "log_path")
#: Columns in the unit of the task's score.
SCORES = ("score_final", "score_best")
#: Digits kept of a measured value.
DIGITS = 6
#: Data with more characters are compressed, so that a page with 10,000 cells stays below 1 MiB.
MAX_PLAIN = 1 << 18


def label_of(name: str, unit: str) -> str:
    """A column's name in words, without the unit at its end."""
    if name == "gpus":
        return "workers"
    suffix = {"%": "pct", "FLOP/s": "flops_per_s"}.get(unit, unit.replace("/", "_per_"))
    words = name.removesuffix(f"_{suffix}") if suffix else name
    return words.replace("_", " ")


def shown_in(column: Column, cells: pd.DataFrame) -> tuple[str, float]:
    """The unit in which a column's values are shown, with the factor to it.

    Scores of different units are shown as in the records.
    """
    if column.name in SCORES and cells["score_unit"].dropna().nunique() <= 1:
        score = score_of(cells)
        return score.shown_unit, score.factor
    units = ((shown, by) for (own, shown), by in FACTORS.items() if own == column.unit)
    return next(units, (column.unit, 1.0))


def rounded(value: float) -> float | int:
    """A value rounded to DIGITS significant digits; whole numbers stay whole."""
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def natural_key(value: Any) -> tuple[Any, ...]:
    """Return the sort key of a level: numbers by value, texts by the numbers in them, absent ones last."""
    if not isinstance(value, str):
        return value is None, value
    parts = re.split(r"([0-9]+)", value.lower())
    return False, [int(part) if n % 2 else part for n, part in enumerate(parts)]


def encoded(name: str, number: bool, values: Sequence[Any]) -> Row:
    """Return a column's values: `levels` with the index into them for each cell (`at`), or `values`.

    Columns with levels can be filtered by. Where there is one level, there is no `at`.
    """
    levels = list(dict.fromkeys(values))
    most = MAX_NUMBER_LEVELS if number else MAX_LEVELS
    if len(levels) > most and name not in COORDINATES:
        return {"values": list(values)}
    if name not in AS_THEY_COME:
        levels.sort(key=natural_key)
    if len(levels) == 1:
        return {"levels": levels}
    place = {level: n for n, level in enumerate(levels)}
    return {"levels": levels, "at": [place[value] for value in values]}


def column_values(column: Column, cells: pd.DataFrame) -> list[Any] | None:
    """A column's values for JSON, in the unit in which they are shown; None if no cell has any."""
    series = cells[column.name]
    if not series.notna().any():
        return None
    if column.kind == "number":
        by = shown_in(column, cells)[1]
        return [None if v is None else rounded(v * by) for v in present(series.astype(float))]
    return [None if v is None else str(v) for v in present(series)]


def present(series: pd.Series) -> list[Any]:
    """The values of a series, with None for absent ones."""
    return series.astype(object).where(series.notna(), None).tolist()


def columns_of(cells: pd.DataFrame) -> Iterator[Row]:
    """The columns in which some cell has a value, in the form that the page's script reads."""
    for column in (SET_COLUMN, *CELL_COLUMNS):
        if column.name not in cells or column.name in NOT_SHOWN or column.kind == "json":
            continue
        if (values := column_values(column, cells)) is None:
            continue
        yield column_data(
            column.name,
            values,
            label=label_of(column.name, column.unit),
            unit=shown_in(column, cells)[0],
            number=column.kind == "number" and column.name not in DISCRETE,
            definition=column.definition,
        )


def column_data(
    name: str,
    values: Sequence[Any],
    *,
    label: str,
    definition: str,
    unit: str = "",
    number: bool = False,
) -> Row:
    """Return a column in the form that the page's script reads."""
    return {
        "name": name,
        "label": label,
        "unit": unit,
        "heading": f"{label} ({unit})" if unit else label,
        "number": number,
        "definition": definition,
        **encoded(name, number, values),
    }


def audit_column(audit: Row, count: int) -> Iterator[Row]:
    """The worst finding on each cell, as a column; none where the audit has no findings."""
    if not audit["rules"]:
        return
    graded = [SEVERITIES.index(rule["severity"]) for rule in audit["rules"]]
    worst = {
        number: SEVERITIES[min(graded[r] for r in rules)]
        for number, rules in audit["cells"].items()
    }
    yield column_data(
        "audit",
        [worst.get(number, "no finding") for number in range(count)],
        label="audit",
        definition="The worst that the audit found on the cell: unusable, warning or note.",
    )


def findings_by_cell(cells: pd.DataFrame, findings: Sequence[Row]) -> Iterator[list[int]]:
    """For each row of cells.csv, the indices of the audit's findings on it.

    A finding without some coordinates is on all cells that share its others; without any, on none.
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


def audit_of(cells: pd.DataFrame, findings: Sequence[Row]) -> Row:
    """The audit's rules that have findings, and the indices of these rules for each cell."""
    rules: dict[tuple[str, str, str, str], int] = {}
    rule_at = [
        rules.setdefault((f["rule"], f["severity"], f["affects"], f["explanation"]), len(rules))
        for f in findings
    ]
    found = zip(cells["status"], findings_by_cell(cells, findings), strict=True)
    by_cell = {
        number: sorted({rule_at[place] for place in places})
        for number, (status, places) in enumerate(found)
        if places and status in STATUSES  # a cell without figures has none to doubt
    }
    keys = ("id", "severity", "affects", "explanation")
    return {
        "severities": SEVERITIES,
        "rules": [dict(zip(keys, rule, strict=True)) for rule in rules],
        "cells": by_cell,
    }


def files_of(cells: pd.DataFrame, study_dir: Path, page_dir: Path) -> Row:
    """The links to each cell's record and log, and which cells have one."""
    folder = Path(os.path.relpath(study_dir, page_dir)).as_posix()
    paths = {"record": f"cells/{CELL_PATTERN}/record.json", "log": f"logs/{CELL_PATTERN}.log"}
    return {
        kind: {
            "path": f"{folder}/{path}",
            "cells": [
                number
                for number, there in enumerate(present(cells[f"{kind}_path"]))
                if there is not None and (study_dir / there).exists()
            ],
        }
        for kind, path in paths.items()
    }


def page_data(cells: pd.DataFrame, findings: Sequence[Row] = ()) -> dict[str, Any]:
    """All data that the page's script shows.

    `cells`: rows of cells.csv, with a column `set` if there are several sets; `findings`: rows of
    audit.csv, also with `set` if there are several.
    """
    bases = bases_by_strategy(cells)
    marks = marks_by_strategy((name, bases.get(name)) for name in cells["strategy"].unique())
    hues = {name: [hue.light[0], hue.dark[0]] for name, hue in FAMILIES.items()}
    audit = audit_of(cells, findings)
    return {
        "cells": len(cells),
        "columns": [*columns_of(cells), *audit_column(audit, len(cells))],
        "coordinates": [name for name in ("set", *COORDINATES[1:]) if name in cells],
        # Colours are pairs, for light and for dark paper; a marker is a shape and its filling.
        "styles": {name: [hues[m.family], m.alone] for name, m in marks.items()},
        "colours": list(hues.values())[1:],
        "markers": [f"{hue.shape} {fill}" for fill in FILLS for hue in FAMILIES.values()],
        "fills": FILLS,
        "shapes": {
            hue.shape: [[round(x, 3), round(y, 3)] for x, y in corners(hue.shape)]
            for hue in FAMILIES.values()
        },
        "audit": audit,
        "nouns": {
            kind: [noun, plural(noun)] for kind, noun in (("", "worker"), *WORKER_NOUNS.items())
        },
        "files": {},
    }


def packed(text: str) -> str:
    """The text, compressed if it is long (gzip, base64); the script tells by the first character."""
    if len(text) <= MAX_PLAIN:
        return text
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def controls_of(data: Row) -> Row:
    """Return what the form offers: columns for axes, looks, filters and the table, and the first choice."""
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
        "logarithmic": {"x": False, "y": is_wide(y)},
        "filters": [c for c in filters if c["name"] in FIRST],
        "more_filters": [c for c in filters if c["name"] not in FIRST],
        "shown": shown,
        "table": [columns[name] for name in dict.fromkeys([*shown, *columns])],
    }  # fmt: skip


def is_wide(column: Row) -> bool:
    """Whether a column's numbers are all positive and far apart."""
    values = column.get("values") or column["levels"]
    known = [v for v in values if isinstance(v, (int, float))]
    return bool(known) and 0 < LOG_FROM * min(known) < max(known)


def render(data: dict[str, Any], title: str, notices: Sequence[str], back: str | None) -> str:
    """The page as HTML. `notices`: what a reader must know before any number; `back`: link to the report."""
    values = {
        "title": title,
        "notices": notices,
        "back": back,
        "data": packed(pages.as_json(data)),
        **controls_of(data),
        **pages.script_values(TEMPLATES / "explore.js"),
    }
    return pages.render("explore.html.j2", TEMPLATES, values=values)


def make_page(given: ReportInput, notices: Sequence[str]) -> str:
    """Return explore.html of one study; its links lead to the files below results/<study>."""
    data = page_data(given.cells, given.findings.to_dict("records"))
    data["files"] = files_of(given.cells, given.study_dir, given.folder)
    return render(data, str(given.cells["study"].iloc[0]), notices, "report.html")


READING = Reading(page=make_page, page_name="explore.html", page_link="Explore the cells")
