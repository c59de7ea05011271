"""Writes a study's tables, one per experiment and metric: models and strategies by number of workers.

Writes summary.csv with a row per number, and each table as CSV, Markdown and LaTeX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import SEVERITIES, read_audit_findings
from stratbench.analysis.records.groups import GROUP, Group
from stratbench.analysis.records.measures import (
    DOUBT,
    NO_CELL,
    Measure,
    append_dagger_if_flagged,
    map_measures_by_name,
)
from stratbench.analysis.records.score import read_score
from stratbench.analysis.tables.summary import build_summary_table
from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import choose_noun_for_workers, format_count
from stratbench.statistics.intervals import QUARTILES_FROM

#: A line of a table: model, strategy, and the entries by number of workers.
TableLine = tuple[str, str, dict[int, Any]]

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    ">": r"$>$",
    "<": r"$<$",
    "×": r"$\times$",
    "–": "--",
    "†": r"$\dagger$",
}


def describe_worker_devices(cells: pd.DataFrame) -> str:
    """Return a sentence on the devices of the workers in rows of cells.csv.

    If no worker of a cell reported, as in a timeout, only the kind of device is known.
    """
    known = cells.dropna(subset=["device_kind", "device_name"])
    unnamed = set(cells["device_kind"].dropna()) - set(known["device_kind"])
    nouns = {"cuda": "one GPU", "cpu": "a CPU process"}
    parts = [
        f"a worker is {nouns.get(kind, kind)}, whose name no record has" for kind in sorted(unnamed)
    ]
    for (kind, name), rows in known.groupby(["device_kind", "device_name"], dropna=False):
        hosts = "; ".join(sorted(set(rows["host"].dropna())))
        if kind == "cuda":
            parts.append(f"a worker is one GPU ({name}; host {hosts})")
            continue
        cores = (
            ", ".join(f"{n:g}" for n in sorted(set(rows["cpu_cores"].dropna())))
            or "an unknown number of"
        )
        parts.append(
            f"a worker is a CPU process; the processes of a cell share {cores} cores of {hosts} "
            f"({name})"
        )
    if not parts:
        return "No record states the device of the workers."
    sentence = "; ".join(parts) + "."
    mixed = "" if len(parts) == 1 else "The cells ran on different devices and are not comparable: "
    return mixed + sentence if mixed else sentence[0].upper() + sentence[1:]


def describe_bracketed_intervals(cells: pd.DataFrame, measure: Measure) -> str:
    """Return the sentence below a table on what its square brackets contain.

    If the table has no brackets, the sentence says why.
    """
    num_repeats = cells.groupby(["strategy", "model", "gpus"]).size().max()
    if num_repeats < 2:
        return "The spread is unknown, since there is one repeat."
    if measure.baseline:
        return (
            f"Geometric mean over {num_repeats} paired repeats "
            "[pointwise 95 % interval by moderated t]."
        )
    if num_repeats < QUARTILES_FROM:
        return f"Median of {num_repeats} repeats [lowest value, highest value]."
    return (
        f"Median of {num_repeats} repeats [first quartile, third quartile; lowest and highest value if fewer "
        f"than {QUARTILES_FROM} repeats finished]."
    )


def format_table_heading(cells: pd.DataFrame, measure: Measure) -> str:
    """Return a table's heading: the metric, the experiment and the data set."""
    experiment, dataset = cells.iloc[0]["experiment"], cells.iloc[0]["dataset"]
    return f"{measure.heading}, experiment {experiment} on {dataset}."


def describe_table_numbers(cells: pd.DataFrame, measure: Measure, workers_sentence: str) -> str:
    """Return sentences on the numbers of a table: definition, intervals and workers.

    Args:
        cells: Rows of cells.csv.
        measure: The metric.
        workers_sentence: Sentence on workers.
    """
    parts = (
        measure.definition,
        describe_bracketed_intervals(cells, measure),
        describe_lowest_score(cells, measure),
        workers_sentence,
    )
    return " ".join(part for part in parts if part)


def describe_lowest_score(cells: pd.DataFrame, measure: Measure) -> str:
    """Return a sentence on the lowest possible score. Empty if that score is unknown."""
    if measure.title_source != "score":
        return ""
    score = read_score(cells)
    if score.best_possible_score is None:
        return ""
    lowest_score = score.format_score(score.best_possible_score)
    return f"The lowest possible {score.name} on this data set is {lowest_score}."


def build_worker_counts_and_table_lines(
    cells: pd.DataFrame, summary: pd.DataFrame, measure: Measure
) -> tuple[list[int], list[TableLine]]:
    """Return the columns of a metric's table, which are numbers of workers, and its lines.

    Entries of a line are rows of summary.csv. The lines of a model are adjacent, in the order of the config.

    Args:
        cells: The experiment's rows of cells.csv.
        summary: Rows of summary.csv.
        measure: The metric.
    """
    rows = summary[summary["measure"] == measure.name]
    rows = rows[rows["experiment"] == cells["experiment"].iloc[0]]
    counts = sorted({int(n) for n in rows["gpus"]})
    listed = rows.to_dict("records")
    return counts, build_table_lines((Group(*(row[name] for name in GROUP)), row) for row in listed)


def build_table_lines(
    entries: Iterable[tuple[Group, Any]],
) -> list[TableLine]:
    """Return the lines of one experiment's table. There is an entry per group of repeats."""
    by_model: dict[str, dict[str, dict[int, Any]]] = {}
    for group, entry in entries:
        by_model.setdefault(group.model, {}).setdefault(group.strategy, {})[int(group.gpus)] = entry
    return [(model, *line) for model, lines in by_model.items() for line in lines.items()]


def describe_table_daggers(lines: Iterable[TableLine]) -> str:
    """Return a sentence that explains a table's daggers by audit rules. Empty without daggers."""
    by_severity = group_rules_by_severity(row["flags"] for _, _, by in lines for row in by.values())
    severities_and_rules = " or ".join(
        f"{severity} ({', '.join(rules)})" for severity, rules in by_severity.items()
    )
    return f" {DOUBT}: the audit reports {severities_and_rules}." if by_severity else ""


def group_rules_by_severity(flags: Iterable[str]) -> dict[str, list[str]]:
    """Return the audit rules in the column `flags` of summary.csv by severity, worst first."""
    named = dict.fromkeys(rule for flag in flags if flag for rule in flag.split("; "))
    by_severity: dict[str, list[str]] = {}
    for rule in named:
        severity, _, name = rule.partition(": ")
        by_severity.setdefault(severity, []).append(name)
    return {name: by_severity[name] for name in SEVERITIES if name in by_severity}


def build_summary_text_table(
    cells: pd.DataFrame,
    counts: Sequence[int],
    lines: Iterable[TableLine],
) -> pd.DataFrame:
    """Return a metric's table as texts: model, strategy, and a column per number of workers.

    Args:
        cells: Rows of cells.csv.
        counts: Numbers of workers, as `build_worker_counts_and_table_lines` returns them.
        lines: Lines of the table, as `build_worker_counts_and_table_lines` returns them.
    """
    texts = (
        (
            model,
            strategy,
            {n: append_dagger_if_flagged(row["text"], row["flags"]) for n, row in by_count.items()},
        )
        for model, strategy, by_count in lines
    )
    return build_text_table(counts, texts, choose_noun_for_workers(cells["device_kind"]))


def build_text_table(
    counts: Sequence[int], lines: Iterable[TableLine], worker_noun: str
) -> pd.DataFrame:
    """Return lines of texts as a table.

    Its columns are the model, the strategy, and one per number of workers.

    Args:
        counts: Numbers of workers.
        lines: Lines whose entries are texts.
        worker_noun: Noun for a worker.
    """
    return pd.DataFrame(
        [[*names, *(texts.get(n, NO_CELL) for n in counts)] for *names, texts in lines],
        columns=["model", "strategy", *(format_count(n, worker_noun) for n in counts)],
    )


def format_markdown_table(table: pd.DataFrame, title: str) -> str:
    """Return a table as Markdown, with its title above."""
    header = list(table.columns)
    lines = [f"**{title}**", "", "| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join([" --- "] * 2 + [" ---: "] * (len(header) - 2)) + "|")
    for row in table.itertuples(index=False):
        lines.append("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Return a text in which LaTeX's special characters are escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def format_latex_table(table: pd.DataFrame, title: str) -> str:
    """Return a table as a LaTeX float, which needs the package booktabs."""
    columns = "ll" + "r" * (len(table.columns) - 2)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(title)}}}"]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines.append(" & ".join(escape_latex(name) for name in table.columns) + r" \\")
    lines.append(r"\midrule")
    for row in table.itertuples(index=False):
        lines.append(" & ".join(escape_latex(str(cell)) for cell in row) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def has_any_value_for_table(rows: pd.DataFrame, summary: pd.DataFrame, measure: Measure) -> bool:
    """Return whether an experiment has a table of a metric. A table needs at least one value.

    The training time always has a table, because it also shows the outcomes of cells.

    Args:
        rows: The experiment's rows of cells.csv.
        summary: Rows of summary.csv.
        measure: The metric.
    """
    here = summary["experiment"] == rows["experiment"].iloc[0]
    values = summary.loc[here & (summary["measure"] == measure.name), "value"]
    return measure.name == "training_time" or bool(values.notna().any())


def write_table(table: pd.DataFrame, title: str, stem: Path) -> None:
    """Write a table as <stem>.csv, <stem>.md and <stem>.tex.

    Args:
        table: The table.
        title: Title of the table.
        stem: Path without an ending.
    """
    write_text_atomically(stem.with_suffix(".csv"), table.to_csv(index=False))
    write_text_atomically(stem.with_suffix(".md"), format_markdown_table(table, title))
    write_text_atomically(stem.with_suffix(".tex"), format_latex_table(table, title))


def write_and_count_tables(cells: pd.DataFrame, summary: pd.DataFrame, out_dir: Path) -> int:
    """Write each table as <out_dir>/<experiment>/<metric>.{csv,md,tex}, and return their number.

    A metric without values has no table, and its old table is removed.

    Args:
        cells: Rows of cells.csv.
        summary: Rows of summary.csv.
        out_dir: Folder to write to.
    """
    written = 0
    for experiment, rows in cells.groupby("experiment", sort=False):
        folder = out_dir / str(experiment)
        workers, here = describe_worker_devices(rows), summary[summary["experiment"] == experiment]
        for measure in map_measures_by_name(rows).values():
            if not has_any_value_for_table(rows, here, measure):
                for kind in ("csv", "md", "tex"):
                    (folder / f"{measure.name}.{kind}").unlink(missing_ok=True)
                continue
            counts, lines = build_worker_counts_and_table_lines(rows, here, measure)
            table = build_summary_text_table(rows, counts, lines)
            title = f"{format_table_heading(rows, measure)} {describe_table_numbers(rows, measure, workers)}"
            title += describe_table_daggers(lines)
            write_table(table, title, folder / measure.name)
            written += 1
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.tables.tables", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="the file cells.csv to read")
    parser.add_argument("--audit", type=Path, help="the file audit.csv, if there is one")
    parser.add_argument(
        "--summary-out",
        type=Path,
        required=True,
        help="the file summary.csv to write, with a row per number",
    )
    parser.add_argument("--out-dir", type=Path, required=True, help="the folder to write tables to")
    args = parser.parse_args(argv)
    cells = read_cells(args.cells)
    summary = build_summary_table(cells, read_audit_findings(args.audit))
    write_text_atomically(args.summary_out, summary.to_csv(index=False))
    print(f"{write_and_count_tables(cells, summary, args.out_dir)} tables in {args.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
