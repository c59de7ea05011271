"""Says where a study's figures should not be believed: every rule of `rules.RULES` over all its cells.

Writes audit.csv: one row for each cell or comparison that trips a rule, with the figures that did.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.checks import Study
from stratbench.analysis.rules import RULES, SEVERITIES
from stratbench.analysis.summary import TEXT, read_cells

COLUMNS = (
    "rule",
    "severity",
    "affects",
    "experiment",
    "strategy",
    "model",
    "gpus",
    "repeat",
    "figures",
    "explanation",
)


def audit(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """The findings on the rows of cells.csv, the most severe first; keys are COLUMNS.

    A coordinate that is absent means all of them: a finding without `strategy` is on a comparison.
    """
    study = Study(cells)
    findings = [
        {
            "rule": rule.id,
            "severity": rule.severity,
            "affects": rule.affects,
            "explanation": rule.explanation,
        }
        | {"figures": found.figures}
        | found.where
        for rule in RULES
        for found in rule.check(study, rule.limit)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding["severity"]))


def read_audit(path: Path) -> pd.DataFrame:
    """audit.csv, as `main` wrote it."""
    types = TEXT | dict.fromkeys(("rule", "severity", "affects", "figures", "explanation"), str)
    types |= {"gpus": "Int64", "repeat": "Int64"}
    return pd.read_csv(path, dtype=types, keep_default_na=False, na_values=[""])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.audit", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--out", type=Path, required=True, help="the findings (CSV)")
    args = parser.parse_args(argv)
    findings = audit(read_cells(args.cells))
    with open(args.out, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        writer.writerows(findings)
    for severity in SEVERITIES:
        of_severity = [finding for finding in findings if finding["severity"] == severity]
        rules = ", ".join(sorted({finding["rule"] for finding in of_severity}))
        print(f"{len(of_severity)} {severity}" + (f": {rules}" if rules else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
