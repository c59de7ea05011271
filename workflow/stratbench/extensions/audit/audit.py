"""The audit: runs every rule over all cells and records, and reports values that are not to be trusted.

There is one module per kind of evidence. A rule is a decorated function in such a module, where it is found
automatically.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import (
    AUDIT_COLUMNS,
    SEVERITIES,
    format_number_of_findings,
)
from stratbench.analysis.records.samples import Timeline, read_timeline
from stratbench.cell import record
from stratbench.cell.coordinates import INCOMPARABLE, STATUSES
from stratbench.cell.extensions import load_extensions
from stratbench.cell.files import write_csv_rows
from stratbench.cell.record import Record
from stratbench.extensions.audit import itself, memory, scores, speed, timelines, traffic, workers
from stratbench.extensions.audit.across_cells import comparability, confounding, machines, mixed
from stratbench.extensions.audit.rule import AuditData, CellKey, Finding, Rule, make_cell_key

#: Description of the program in its `--help`.
DESCRIPTION = (
    "Writes audit.csv: one row per finding of a rule on a cell or a comparison, with its values."
)
KINDS = (
    itself, workers, scores, traffic, memory, mixed, comparability, speed, confounding, machines,
    timelines,
)  # fmt: skip


def list_rules_of_module(module: ModuleType) -> list[Rule]:
    """Return the rules of a module, in the order of their definitions."""
    rules: list[Rule] = []
    for value in vars(module).values():
        listed = value if isinstance(value, tuple) else (value,)
        rules += [entry for entry in listed if isinstance(entry, Rule) and entry not in rules]
    return rules


def iter_rule_modules() -> Iterator[ModuleType]:
    """Yield the modules that define audit rules, first the audit's, then other extensions'."""
    yield from KINDS
    for extension in load_extensions().values():
        yield from map(import_module, extension.audit_modules)


RULES: tuple[Rule, ...] = tuple(
    found for module in iter_rule_modules() for found in list_rules_of_module(module)
)


def audit_cells(
    cells: pd.DataFrame,
    records: Sequence[Record] = (),
    accuracy_floors: dict[str, float] | None = None,
    timelines: Mapping[CellKey, Timeline] | None = None,
    study_dir: Path | None = None,
) -> list[dict[str, Any]]:
    """Run all rules, and return their findings as rows of audit.csv, the most severe first.

    A row that lacks a coordinate concerns all its values: a finding without `strategy` is on a comparison.

    Args:
        cells: Rows of cells.csv.
        records: The records.
        accuracy_floors: See `AuditData`.
        timelines: See `AuditData`.
        study_dir: See `AuditData`.
    """
    evidence = AuditData(cells, records, accuracy_floors, timelines, study_dir)
    findings = [
        {
            "rule": rule.id,
            "severity": rule.severity,
            "affects": rule.affects,
            "explanation": rule.explanation,
        }
        | {"figures": case.values_text}
        | case.coordinates
        for rule in RULES
        for case in run_rule(rule, evidence)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding["severity"]))


def run_rule(rule: Rule, evidence: AuditData) -> Iterator[Finding]:
    """Yield the findings of a rule. An error in the rule because of unexpected values is a finding itself."""
    try:
        yield from rule.check(evidence)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        yield Finding({}, f"this rule failed on the records ({type(e).__name__}: {e})")


def read_records(
    cells: pd.DataFrame,
    study_dir: Path,
    read: Callable[[Path], Record] = record.read_measured_record,
) -> list[Record]:
    """Read the usable records of the rows of cells.csv.

    Args:
        cells: Rows of cells.csv.
        study_dir: The folder results/<study>.
        read: Reads a record.
    """
    paths = cells.loc[cells["status"].isin([*STATUSES, INCOMPARABLE]), "record_path"].dropna()
    return [read(study_dir / path) for path in paths]


def read_timelines(cells: pd.DataFrame, study_dir: Path) -> dict[CellKey, Timeline]:
    """Read the timelines of the cells that ended well, by the cell's key.

    Unreadable timelines are left out.
    """
    timelines = {}
    for row in cells[cells["status"].eq("ok") & cells["record_path"].notna()].to_dict("records"):
        timeline = read_timeline((study_dir / row["record_path"]).with_name("timeline.csv"))
        if timeline is not None:
            timelines[make_cell_key(row)] = timeline
    return timelines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.audit.audit", description=DESCRIPTION
    )
    parser.add_argument("--cells", type=Path, required=True, help="path of cells.csv")
    parser.add_argument(
        "--study-dir", type=Path, help="folder results/<study>; default: the folder of cells.csv"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="path of the CSV file into which the findings are written",
    )
    args = parser.parse_args(argv)
    cells = read_cells(args.cells)
    study_dir = args.study_dir or args.cells.parent
    findings = audit_cells(
        cells,
        read_records(cells, study_dir),
        timelines=read_timelines(cells, study_dir),
        study_dir=study_dir,
    )
    write_csv_rows(args.out, AUDIT_COLUMNS, findings)
    for severity in SEVERITIES:
        of_severity = [finding for finding in findings if finding["severity"] == severity]
        rules = ", ".join(sorted({finding["rule"] for finding in of_severity}))
        print(
            f"audit: {format_number_of_findings(len(of_severity), severity)}"
            + (f": {rules}" if rules else "")
        )
    return 0
