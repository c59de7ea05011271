"""The audit: runs every rule over all cells and records, and flags values not to trust.

There is one module for each kind of evidence. A rule is a decorated function in one of them; the modules are
searched for their rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import AUDIT_COLUMNS, SEVERITIES, format_tally
from stratbench.analysis.records.samples import Timeline, read_timeline
from stratbench.cell import record
from stratbench.cell.coordinates import INCOMPARABLE, STATUSES
from stratbench.cell.extensions import installed
from stratbench.cell.files import write_rows
from stratbench.cell.record import Record
from stratbench.extensions.audit import itself, memory, scores, speed, timelines, traffic, workers
from stratbench.extensions.audit.across_cells import comparability, confounding, machines, mixed
from stratbench.extensions.audit.rule import AuditData, Found, Key, Rule, key_of

#: The description on the command line.
DESCRIPTION = (
    "Writes audit.csv: one row for each cell or comparison that trips a rule, with its figures."
)
KINDS = (
    itself, workers, scores, traffic, memory, mixed, comparability, speed, confounding, machines,
    timelines,
)  # fmt: skip


def rules_of(module: Any) -> list[Rule]:
    """Return the rules of a module, in the order of their definitions."""
    rules: list[Rule] = []
    for value in vars(module).values():
        listed = value if isinstance(value, tuple) else (value,)
        rules += [entry for entry in listed if isinstance(entry, Rule) and entry not in rules]
    return rules


def modules_of_rules() -> Iterator[Any]:
    """Yield the modules that have rules: those of the audit, then those of other extensions."""
    yield from KINDS
    for extension in installed().values():
        yield from map(import_module, extension.audited)


RULES: tuple[Rule, ...] = tuple(
    found for module in modules_of_rules() for found in rules_of(module)
)


def audit(
    cells: pd.DataFrame,
    records: Sequence[Record] = (),
    floors: dict[str, float] | None = None,
    timelines: Mapping[Key, Timeline] | None = None,
    study_dir: Path | None = None,
) -> list[dict[str, Any]]:
    """Return the findings on cells and records, the most severe first.

    Keys are AUDIT_COLUMNS.

    A missing coordinate means all its values: a finding without `strategy` is on a comparison.

    Args:
        cells: Rows of cells.csv.
        records: The records.
        floors: See `AuditData`.
        timelines: See `AuditData`.
        study_dir: See `AuditData`.
    """
    evidence = AuditData(cells, records, floors, timelines, study_dir)
    findings = [
        {
            "rule": rule.id,
            "severity": rule.severity,
            "affects": rule.affects,
            "explanation": rule.explanation,
        }
        | {"figures": case.figures}
        | case.where
        for rule in RULES
        for case in found_by(rule, evidence)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding["severity"]))


def found_by(rule: Rule, evidence: AuditData) -> Iterator[Found]:
    """Yield the findings of a rule. If odd values make it fail, that is a finding."""
    try:
        yield from rule.check(evidence)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        yield Found({}, f"this rule cannot judge the records ({type(e).__name__}: {e})")


def read_records(
    cells: pd.DataFrame, study_dir: Path, read: Callable[[Path], Record] = record.read_measured
) -> list[Record]:
    """Return the usable records of the rows of cells.csv.

    Args:
        cells: Rows of cells.csv.
        study_dir: The folder results/<study>.
        read: Reads a record.
    """
    paths = cells.loc[cells["status"].isin([*STATUSES, INCOMPARABLE]), "record_path"].dropna()
    return [read(study_dir / path) for path in paths]


def read_timelines(cells: pd.DataFrame, study_dir: Path) -> dict[Key, Timeline]:
    """The timelines of the cells that ended well, by `key_of` their cell.

    Unreadable ones are left out.
    """
    timelines = {}
    for row in cells[cells["status"].eq("ok") & cells["record_path"].notna()].to_dict("records"):
        timeline = read_timeline((study_dir / row["record_path"]).with_name("timeline.csv"))
        if timeline is not None:
            timelines[key_of(row)] = timeline
    return timelines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.audit.audit", description=DESCRIPTION
    )
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--study-dir", type=Path, help="where records are (that of cells.csv)")
    parser.add_argument("--out", type=Path, required=True, help="the findings (CSV)")
    args = parser.parse_args(argv)
    cells = read_cells(args.cells)
    study_dir = args.study_dir or args.cells.parent
    findings = audit(
        cells,
        read_records(cells, study_dir),
        timelines=read_timelines(cells, study_dir),
        study_dir=study_dir,
    )
    write_rows(args.out, AUDIT_COLUMNS, findings)
    for severity in SEVERITIES:
        of_severity = [finding for finding in findings if finding["severity"] == severity]
        rules = ", ".join(sorted({finding["rule"] for finding in of_severity}))
        print(
            f"audit: {format_tally(len(of_severity), severity)}" + (f": {rules}" if rules else "")
        )
    return 0
