"""Writes the report as a self-contained HTML page, together with the pages of extensions."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from stratbench.analysis.records.columns import CELL_COLUMNS, Row, read_cells
from stratbench.analysis.records.findings import read_audit_findings
from stratbench.analysis.records.groups import map_base_strategies
from stratbench.analysis.records.measures import MEASURES, NO_CELL, Measure, map_measures_by_name
from stratbench.analysis.records.reading import (
    Reading,
    ReportInput,
    Section,
    map_readings_by_extension,
)
from stratbench.analysis.records.score import read_score
from stratbench.analysis.report.answer_rows import build_first_screen_values
from stratbench.analysis.report.sections import (
    iter_strategy_rows,
    list_machine_and_software_rows,
)
from stratbench.analysis.report.shown import iter_shown_figures
from stratbench.analysis.tables.summary import read_summary
from stratbench.analysis.tables.tables import (
    build_worker_counts_and_table_lines,
    describe_bracketed_intervals,
    describe_table_daggers,
    describe_worker_devices,
    group_rules_by_severity,
    has_any_value_for_table,
)
from stratbench.cell.files import write_text_atomically
from stratbench.cell.text import pages
from stratbench.cell.text.words import MIB, choose_noun_for_workers, format_count, pluralize

TEMPLATES = Path(__file__).parent / "templates"
STATUS_WORDS = {
    "ok": "finished",
    "oom": "out of memory (OOM)",
    "timeout": "stopped at the time limit",
    "diverged": "diverged (div.)",
    "unsupported": "unsupported: the strategy cannot train the network",
    "infeasible": "skipped, since the plan says that they do not fit",
    "error": "failed",
    "missing": "without a record yet",
    "incomparable": "did other work than the cells to compare with, or did not report their work",
}


#: The column of cells.csv below each heading of the report's table of runs.
RUNS = {
    "data set": "dataset", "strategies": "strategy", "models": "model", "workers": "gpus",
    "repeats": "repeat", "task": "task", "epochs or steps": "epochs", "global batch": "global_batch",
    "precision": "precision", "device": "device_name", "host": "host", "torch": "torch",
}  # fmt: skip


def format_distinct_values(rows: pd.DataFrame, column: str) -> str:
    """Return the distinct values of a column as a text, separated by commas."""
    texts = [str(v).removesuffix(".0") for v in rows[column].dropna().unique()]
    return ", ".join(texts) or "not recorded"


def list_experiment_rows(cells: pd.DataFrame) -> list[dict[str, str]]:
    """Return a row per experiment for the table of runs.

    The row has the training's models, strategies and settings, and its devices and hosts.
    """
    lines = []
    for experiment, rows in cells.groupby("experiment", sort=False):
        noun = choose_noun_for_workers(rows["device_kind"])
        values = {words: format_distinct_values(rows, column) for words, column in RUNS.items()}
        values["workers"] += f" {pluralize(noun)}"
        values["repeats"] = str(rows["repeat"].nunique())
        values["epochs or steps"] = format_training_length(rows)
        lines.append({"experiment": str(experiment)} | values)
    return lines


def format_training_length(rows: pd.DataFrame) -> str:
    """Return as text how long an experiment trains: in epochs, or in steps without evaluation."""
    if rows["steps"].notna().any():
        return f"{format_distinct_values(rows, 'steps')} steps, no score"
    return format_distinct_values(rows, "epochs")


def iter_built_in_notices(cells: pd.DataFrame, partial: bool) -> Iterator[str]:
    """Yield the notices of the core, which precede all numbers of the report."""
    known = cells.dropna(subset=["device_kind"])
    cpu = known[known["device_kind"] == "cpu"]
    if partial and cells["status"].isin(["missing", "error"]).any():
        yield "This report is partial: cells without a usable record are marked, not left out."
    if 0 < len(cpu) < len(known):
        yield (
            f"Some cells ran without a GPU. {describe_worker_devices(cpu)} Their times, speedups and memory "
            "do not apply to GPUs, since more CPU processes share the same hardware."
        )
    if known["synthetic_data"].astype(str).eq("True").any():
        yield "Some cells train on generated data: their scores have no meaning outside this study."
    for column, devices_or_versions in (
        ("device_name", "devices"),
        ("torch", "torch versions"),
        ("revision", "revisions of the code"),
    ):
        distinct = sorted(known[column].dropna().unique())
        if len(distinct) > 1:
            names = ", ".join(distinct)
            yield f"The records come from different {devices_or_versions}: {names}. Compare with care."


def list_report_notices(
    cells: pd.DataFrame, findings: Sequence[Row], readings: Iterable[Reading], partial: bool
) -> list[str]:
    """Return all notices of the report, from the core and from extensions.

    Args:
        cells: Rows of cells.csv.
        findings: Findings of the audit.
        readings: Additions of extensions.
        partial: Whether the report is an interim one.
    """
    notices = list(iter_built_in_notices(cells, partial))
    for reading in readings:
        if reading.list_notices is not None:
            notices += reading.list_notices(cells, findings)
    return notices


def describe_devices(cells: pd.DataFrame) -> str:
    """Return a text on the devices that ran the cells. It also has the number of finished cells."""
    known = cells.dropna(subset=["device_kind"])
    kinds = set(known["device_kind"])
    ended = known[known["status"] == "ok"] if (known["status"] == "ok").any() else known
    devices = ", ".join(sorted(set(ended["device_name"].dropna()))) or "an unknown device"
    hosts = {host for text in ended["host"].dropna() for host in str(text).split("; ")}
    if kinds == {"cpu"}:
        cores = ended["cpu_cores"].max()
        that_share_cores = f" that share {cores:.0f} cores" if pd.notna(cores) else ""
        machines = "one machine" if len(hosts) < 2 else f"{len(hosts)} machines"
        text = f"CPU processes{that_share_cores} of {machines} ({devices}); not valid for GPUs."
    elif kinds:
        text = f"up to {format_count(int(known['gpus'].max()), 'worker')} with {devices} on "
        text += f"{format_count(len(hosts), 'host')}, {format_distinct_values(known, 'precision')}."
    else:
        text = "nothing yet."
    counts = cells["status"].value_counts()
    others = [
        f"{counts[s]} {words}" for s, words in STATUS_WORDS.items() if s in counts and s != "ok"
    ]
    num_finished, num_cells = counts.get("ok", 0), len(cells)
    other_outcomes = f": {', '.join(others)}" if others else ""
    return f"{text} {num_finished} of {num_cells} cells finished{other_outcomes}."


def describe_experiment_size(rows: pd.DataFrame) -> str:
    """Return a line on the size of an experiment.

    Example: `6 epochs, global batch 128 · 10 strategies on 4 GPUs · 3 repeats`.
    """
    noun = pluralize(choose_noun_for_workers(rows["device_kind"]))
    steps = rows["steps"].notna().any()
    length = (
        format_training_length(rows)
        if steps
        else f"{format_distinct_values(rows, 'epochs')} epochs"
    )
    batch = format_distinct_values(rows, "global_batch")
    return " · ".join(
        [
            f"{length}, global batch {batch}",
            f"{format_count(rows['strategy'].nunique(), 'strategy')} on "
            f"{format_distinct_values(rows, 'gpus')} {noun}",
            format_count(rows["repeat"].nunique(), "repeat"),
        ]
    )


def describe_experiment_conditions(rows: pd.DataFrame) -> str:
    """Return a note on the conditions under which an experiment's cells trained.

    It names the workers' devices, their slowdowns, and the number of steps if there was no evaluation.
    """
    slowdowns = "; ".join(sorted(set(rows["slowdown"].dropna())))
    note = f" Workers were slowed down on purpose: {slowdowns}." if slowdowns else ""
    if rows["steps"].notna().any():
        steps = format_distinct_values(rows, "steps")
        note += f" The cells trained for {steps} steps without evaluation."
    return describe_worker_devices(rows) + note


def find_clearly_best_row(
    summary_rows: list[Row], measure: Measure, equivalence_margin: float
) -> Row | None:
    """Return the row whose value is clearly the best one. None if no value is.

    There is no clear best if it leads by less than `equivalence_margin`, if spreads overlap, if some of its
    repeats have no value, or if the audit calls it unusable.

    Args:
        summary_rows: Rows of summary.csv.
        measure: The metric.
        equivalence_margin: Fraction within which values are equal.
    """
    valued = [row for row in summary_rows if pd.notna(row["value"])]
    if measure.better is None or len(valued) < 2:
        return None
    best, *others = sorted(valued, key=lambda r: r["value"], reverse=measure.better == "higher")

    def is_tied_with_best(row: Row) -> bool:
        if abs(row["value"] - best["value"]) <= equivalence_margin * abs(best["value"]):
            return True
        # Without an interval, `low` and `high` are NaN, so both comparisons are False.
        return bool(row["low"] <= best["high"] and best["low"] <= row["high"])

    unusable = "unusable" in group_rules_by_severity([best["flags"]])
    partial = best["ok"] < best["cells"]
    return None if unusable or partial or any(map(is_tied_with_best, others)) else best


def build_table_cell_values(summary_row: Row | None, best_row: Row | None) -> dict[str, Any]:
    """Return the values that the template shows in a table cell.

    Args:
        summary_row: Row of summary.csv; None if the study has no such cell.
        best_row: The clearly best row, if any.
    """
    if summary_row is None:
        return {"text": NO_CELL, "rest": "", "sort": "", "kind": "none", "flags": ""}
    text, rest, sort, kind = summary_row["text"], "", "", "failed"
    if pd.notna(summary_row["value"]):
        text, _, rest = text.partition(" ")
        sort, kind = summary_row["value"], "best" if summary_row is best_row else ""
    return {"text": text, "rest": rest, "sort": sort, "kind": kind, "flags": summary_row["flags"]}


def build_table_values(
    cell_rows: pd.DataFrame, summary: pd.DataFrame, measure: Measure, equivalence_margin: float
) -> dict[str, Any]:
    """Return the template's values for a metric's table. The best value is marked.

    Args:
        cell_rows: Rows of cells.csv.
        summary: Rows of summary.csv.
        measure: The metric.
        equivalence_margin: Fraction within which values are equal.
    """
    counts, lines = build_worker_counts_and_table_lines(cell_rows, summary, measure)
    best = {
        (model, count): find_clearly_best_row(
            [
                by_count[count]
                for other, _, by_count in lines
                if other == model and count in by_count
            ],
            measure,
            equivalence_margin,
        )
        for model in {model for model, _, _ in lines}
        for count in counts
    }
    body = [
        {
            "model": model,
            "strategy": strategy,
            "cells": [build_table_cell_values(by_count.get(n), best[model, n]) for n in counts],
        }
        for model, strategy, by_count in lines
    ]
    noun = choose_noun_for_workers(cell_rows["device_kind"])
    return {
        "id": measure.name,
        "title": measure.heading,
        "caption": describe_bracketed_intervals(cell_rows, measure) + describe_table_daggers(lines),
        "columns": [format_count(n, noun) for n in counts],
        "body": body,
    }


def iter_cell_table_rows(
    cells: pd.DataFrame, study_dir: Path, page_dir: Path
) -> Iterator[dict[str, Any]]:
    """Yield a row per cell of the study, with links to its record and log.

    Args:
        cells: Rows of cells.csv.
        study_dir: The folder results/<study>.
        page_dir: Folder of the page.
    """

    def build_link_if_file_exists(path: object) -> str | None:
        if not isinstance(path, str) or not (study_dir / path).exists():
            return None
        return quote(Path(os.path.relpath(study_dir / path, page_dir)).as_posix())

    scores = {name: read_score(rows) for name, rows in cells.groupby("experiment", sort=False)}
    for row in cells.itertuples():
        score = scores[row.experiment]
        yield {
            "status": row.status,
            "experiment": row.experiment,
            "strategy": row.strategy,
            "model": row.model,
            "gpus": row.gpus,
            "repeat": row.repeat,
            "time": "" if pd.isna(row.train_time_s) else f"{row.train_time_s:.2f}",
            "score": ""
            if pd.isna(row.score_final)
            else score.format_score(score.display_factor * row.score_final),
            "reason": row.reason if isinstance(row.reason, str) else "",
            "record": build_link_if_file_exists(row.record_path),
            "log": build_link_if_file_exists(row.log_path),
        }


def iter_experiment_values(
    inputs: ReportInput,
) -> Iterator[dict]:
    """Yield the values that the template shows for each experiment: models, figures and tables."""
    cells, decided, folder = inputs.cells, inputs.answers_json, inputs.folder
    summary = read_summary(folder / "summary.csv")
    margin = decided["equivalence_margin"]
    figures = list(iter_shown_figures(folder / "plots"))
    headings = {
        (a["experiment"], a["model"]): a["headline"].rstrip(".") for a in decided["answers"]
    }
    for name, rows in cells.groupby("experiment", sort=False):
        models = [
            {
                "name": str(model),
                "heading": headings.get((str(name), str(model)), ""),
                "figures": [
                    f for f in figures if (f["experiment"], f["model"]) == (str(name), str(model))
                ],
            }
            for model in dict.fromkeys(rows["model"])
        ]
        yield {
            "name": str(name),
            "dataset": format_distinct_values(rows, "dataset"),
            "matrix": describe_experiment_size(rows),
            "about": describe_experiment_conditions(rows),
            "models": models,
            "tables": [
                build_table_values(rows, summary, measure, margin)
                for measure in map_measures_by_name(rows).values()
                if has_any_value_for_table(rows, summary, measure)
            ],
        }


def build_page_values(
    inputs: ReportInput, notices: Sequence[str], sections: Iterable[Section]
) -> dict[str, Any]:
    """Return all values that the report's template shows.

    Args:
        inputs: Input of the report.
        notices: Notices before any number.
        sections: Sections of extensions.
    """
    cells, decided, folder = inputs.cells, inputs.answers_json, inputs.folder
    return {
        "study": str(cells["study"].iloc[0]),
        "notices": notices,
        "measured": describe_devices(cells),
        **build_first_screen_values(map_base_strategies(cells), decided),
        "strategies": list(iter_strategy_rows(cells)),
        "experiments": list(iter_experiment_values(inputs)),
        "sections": list(sections),
        "total": len(cells),
        "runs": list_experiment_rows(cells),
        "machines": list_machine_and_software_rows(cells),
        "cells": list(iter_cell_table_rows(cells, inputs.study_dir, folder)),
        "measures": list(MEASURES.values()),
        "columns": CELL_COLUMNS,
    }


def read_report_input(
    folder: Path, study_dir: Path, audit: Path | None, evidence: Iterable[str] = ()
) -> ReportInput:
    """Read the tables and files that a report shows.

    Args:
        folder: Folder with the files of the other stages.
        study_dir: The folder results/STUDY.
        audit: audit.csv, if there is one.
        evidence: Files of extensions, as EXTENSION=FILE.
    """
    return ReportInput(
        folder=folder,
        study_dir=study_dir,
        cells=read_cells(folder / "cells.csv"),
        findings=read_audit_findings(audit),
        answers_json=json.loads((folder / "answers.json").read_text(encoding="utf-8")),
        evidence=dict(pair.split("=", 1) for pair in evidence),
    )


def write_pages(
    inputs: ReportInput, readings: Sequence[Reading], partial: bool, description: str
) -> Iterator[Path]:
    """Write the report and the pages of extensions, and yield their paths.

    Args:
        inputs: Input of the report.
        readings: Additions of extensions.
        partial: Whether the report is an interim one.
        description: Description of the study.
    """
    notices = list_report_notices(
        inputs.cells, inputs.findings.to_dict("records"), readings, partial
    )
    sections = (s for r in readings if r.list_sections is not None for s in r.list_sections(inputs))
    values = build_page_values(inputs, notices, sections) | {"description": description}
    values["pages"] = [
        (r.page_file_name, r.page_link_title) for r in readings if r.render_page is not None
    ]
    report = inputs.folder / "report.html"
    write_text_atomically(report, pages.render_page("report.html.j2", TEMPLATES, values=values))
    yield report
    above = [f"Measured on {values['measured']}", *notices]
    for reading in readings:
        if reading.render_page is not None:
            page = inputs.folder / reading.page_file_name
            write_text_atomically(page, reading.render_page(inputs, above))
            yield page


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of the report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.report.report", description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="the folder with the tables, figures and answers to show",
    )
    parser.add_argument(
        "--study-dir",
        type=Path,
        required=True,
        help="the folder results/<study>, to link to records",
    )
    parser.add_argument("--audit", type=Path, help="the file audit.csv, if there is one")
    parser.add_argument(
        "--evidence",
        nargs="*",
        default=[],
        metavar="EXTENSION=FILE",
        help="a file that an extension shows, such as verdict=verdict.json",
    )
    parser.add_argument(
        "--description", default="", help="description of the study, to show in the report"
    )
    parser.add_argument(
        "--partial", action="store_true", help="add a notice that cells may be missing"
    )
    args = parser.parse_args(argv)
    inputs = read_report_input(args.folder, args.study_dir, args.audit, args.evidence)
    for page in write_pages(
        inputs, list(map_readings_by_extension().values()), args.partial, args.description
    ):
        print(f"{page} ({page.stat().st_size / MIB:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
