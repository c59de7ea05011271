"""Compares a study with the paper: every published cell beside ours, and whether its claims hold.

Hardware differs, so absolute times cannot be compared, only ratios between strategies and between GPU
counts. Writes against_cells.csv, against_claims.csv and, of the published tables alone, paper_audit.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.paper import paper_audit, published
from stratbench.analysis.paper.claims import judge_claims
from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import read_audit
from stratbench.analysis.tables.usable import UsableGroups
from stratbench.cell.files import write_atomic

#: The column of cells.csv for each published measure, with the factor to the published unit.
COLUMNS_OF = {
    "training_time_s": ("train_time_s", 1.0),
    "accuracy_percent": ("score_final", 100.0),
}
#: The strategy by which others of its kind are divided.
REFERENCES = {"fsdp": "ddp", "ps-async": "ps-sync", "ps-async-modified": "ps-sync"}
PUBLISHED_COLUMNS = (
    *("version", "table", "row", "strategy", "model", "dataset", "gpus", "measure"),
    *("published", "ours", "experiment", "kind"),
    *("against_strategy", "published_to_strategy", "our_to_strategy", "ratio_to_strategy"),
    *("against_gpus", "published_to_gpus", "our_to_gpus", "ratio_to_gpus"),
)


def published_cells(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Every published cell with ours (NaN if there is none), and the comparison of their ratios.

    A ratio of ratios is ours over the published one: 1 if both agree. Accuracies are compared by
    differences in points instead of ratios (`kind` is `difference`).
    """
    groups = UsableGroups(cells[published.is_counterpart(cells)], findings.to_dict("records"))
    ours: dict[tuple[Any, ...], tuple[float, str]] = {}
    for key, rows in groups.groups.items():
        experiment, strategy, model, gpus = key
        for measure, (column, scale) in COLUMNS_OF.items():
            values = groups.values(key, column, "time" if scale == 1.0 else "score")
            if values:
                place = (measure, rows["dataset"].iloc[0], model, strategy, gpus)
                median = float(np.median(list(values.values())))
                ours.setdefault(place, (scale * median, experiment))
    tables = published.published_tables()
    theirs = {
        (r.version, r.table, r.measure, r.dataset, r.model, r.strategy, r.gpus): r.value
        for r in tables.itertuples()
    }
    return pd.DataFrame(
        [compared_cell(row, theirs, ours) for row in tables.itertuples()],
        columns=list(PUBLISHED_COLUMNS),
    )


def compared_cell(
    row: Any, theirs: dict[Any, float], ours: dict[Any, tuple[float, str]]
) -> dict[str, Any]:
    """A published cell and ours, both also against the reference strategy and the fewest GPUs."""
    place = (row.measure, row.dataset, row.model)
    counts = [
        key[-1] for key in theirs if key[:-1] == (row.version, row.table, *place, row.strategy)
    ]
    mine, experiment = ours.get((*place, row.strategy, row.gpus), (np.nan, ""))
    kind = "difference" if row.measure == "accuracy_percent" else "ratio"
    found = {name: getattr(row, name) for name in PUBLISHED_COLUMNS[:8]}
    found |= {"published": row.value, "ours": mine, "experiment": experiment, "kind": kind}
    fewest = next(
        (n for n in sorted(counts) if n < row.gpus and is_published(theirs, row, n)), None
    )
    for name, against in (
        ("strategy", (REFERENCES.get(row.strategy), row.gpus)),
        ("gpus", (row.strategy, fewest)),
    ):
        if None in against:
            continue
        reference = theirs.get((row.version, row.table, *place, *against), np.nan)
        my_reference = ours.get((*place, *against), (np.nan, ""))[0]
        pair = [
            ratio_or_difference(kind, row.value, reference),
            ratio_or_difference(kind, mine, my_reference),
        ]
        found[f"against_{name}"] = against[0] if name == "strategy" else against[1]
        found |= {f"published_to_{name}": pair[0], f"our_to_{name}": pair[1]}
        found[f"ratio_to_{name}"] = ratio_or_difference(kind, pair[1], pair[0])
    return found


def is_published(theirs: dict[Any, float], row: Any, gpus: int) -> bool:
    """Whether the same row of the published table has a number at `gpus`."""
    key = (row.version, row.table, row.measure, row.dataset, row.model, row.strategy, gpus)
    return not np.isnan(theirs.get(key, np.nan))


def ratio_or_difference(kind: str, one: float, other: float) -> float:
    """one / other; for a `difference` one - other."""
    return one - other if kind == "difference" else one / other


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.paper.against", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--audit", type=Path, required=True, help="audit.csv")
    parser.add_argument("--cells-out", type=Path, required=True, help="published cells (CSV)")
    parser.add_argument("--claims-out", type=Path, required=True, help="claims (CSV)")
    parser.add_argument(
        "--paper-audit-out", type=Path, required=True, help="findings on the paper (CSV)"
    )
    args = parser.parse_args(argv)
    cells, findings = read_cells(args.cells), read_audit(args.audit)
    beside_ours, judged = published_cells(cells, findings), judge_claims(cells, findings)
    write_atomic(args.cells_out, beside_ours.to_csv(index=False))
    write_atomic(args.claims_out, judged.to_csv(index=False))
    counts = ", ".join(f"{n} {name}" for name, n in judged["holds"].value_counts().items())
    print(
        f"{beside_ours['ours'].notna().sum()} of {len(beside_ours)} published cells have a counterpart"
    )
    print(f"claims: {counts}")
    paper_audit.write_paper_audit(args.paper_audit_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
