"""Compares a study with the paper: every published cell with ours, and every claim with our results.

Hardware differs, so no absolute times are compared, but ratios between strategies and between GPU counts.
Writes against_cells.csv and against_claims.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import read_audit
from stratbench.analysis.records.groups import Repeats
from stratbench.analysis.tables.summary import read_summary
from stratbench.cell.files import write_atomic
from stratbench.extensions.paper import published
from stratbench.extensions.paper.claims import judge_claims
from stratbench.extensions.paper.numbered import write_numbered_tables

#: The column of cells.csv for each published measure, with the factor to the published unit.
PUBLISHED_MEASURES = {
    "training_time_s": ("train_time_s", 1.0),
    "accuracy_percent": ("score_final", 100.0),
}
#: Columns that are equal in a published cell and in our cell that it is compared with.
PLACE = ["measure", "dataset", "model", "strategy", "gpus"]
#: The strategy with which a strategy is compared, by ratio.
REFERENCES = {"fsdp": "ddp", "ps-async": "ps-sync", "ps-async-modified": "ps-sync"}
PUBLISHED_COLUMNS = (
    *("version", "table", "row", "strategy", "model", "dataset", "gpus", "measure"),
    *("published", "ours", "experiment", "kind"),
    *("against_strategy", "published_to_strategy", "our_to_strategy", "ratio_to_strategy"),
    *("against_gpus", "published_to_gpus", "our_to_gpus", "ratio_to_gpus"),
)


def compare_published_cells(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Return every published cell with our median and ratios of ratios.

    Our median is NaN if there is none. A ratio of ratios is our ratio divided by the published one, so 1 if
    both agree. Accuracies are compared by differences in points instead of ratios (`kind` is `difference`).
    """
    ours = compute_our_medians(cells, findings)
    tables = published.read_published_tables().rename(columns={"value": "published"})
    theirs = tables[["version", "table", *PLACE, "published"]]
    tables = tables.merge(ours, how="left", on=PLACE).fillna({"experiment": ""})
    is_points = tables["measure"] == "accuracy_percent"
    tables["kind"] = np.where(is_points, "difference", "ratio")
    line = ["version", "table", *PLACE[:-1]]
    fewest = theirs.dropna(subset=["published"]).groupby(line)["gpus"].min().rename("fewest")
    fewest = tables.join(fewest, on=line)["fewest"]
    for name, baseline in {
        "strategy": tables["strategy"].map(REFERENCES),
        "gpus": fewest.where(fewest < tables["gpus"]),
    }.items():
        against = tables[["version", "table", *PLACE]].assign(**{name: baseline})
        against = against.merge(theirs, how="left").merge(ours, how="left", on=PLACE)
        tables[f"against_{name}"] = baseline
        theirs_to, ours_to = (
            compute_ratio_or_difference(is_points, tables[whose], against[whose])
            for whose in ("published", "ours")
        )
        tables[f"published_to_{name}"], tables[f"our_to_{name}"] = theirs_to, ours_to
        tables[f"ratio_to_{name}"] = compute_ratio_or_difference(is_points, ours_to, theirs_to)
    return tables[list(PUBLISHED_COLUMNS)]


def compute_our_medians(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Return the medians of measured cells that the paper also has, in the paper's units.

    The columns are PLACE, `ours` and `experiment`.
    """
    groups = Repeats(cells[published.mask_counterparts(cells)], findings.to_dict("records"))
    rows = []
    for group, repeats in groups.ok.items():
        for measure, (column, scale) in PUBLISHED_MEASURES.items():
            median = groups.compute_median(group, column, "time" if scale == 1.0 else "score")
            if median is not None:
                place = (repeats["dataset"].iloc[0], group.model, group.strategy, group.gpus)
                rows.append((measure, *place, scale * median, group.experiment))
    return pd.DataFrame(rows, columns=[*PLACE, "ours", "experiment"]).drop_duplicates(PLACE)


def compute_ratio_or_difference(
    is_points: pd.Series, one: pd.Series, other: pd.Series
) -> pd.Series:
    """Return the ratio one / other, or the difference one - other for accuracies.

    Args:
        is_points: Whether each value is an accuracy in points.
        one: Values.
        other: Values to compare with.
    """
    return (one - other).where(is_points, one / other)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with the arguments `argv`, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.paper.against", description=__doc__
    )
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--audit", type=Path, required=True, help="audit.csv")
    parser.add_argument(
        "--cells-out", type=Path, required=True, help="published cells to write (CSV)"
    )
    parser.add_argument(
        "--claims-out", type=Path, required=True, help="CSV file for the checked claims"
    )
    parser.add_argument("--summary", type=Path, required=True, help="summary.csv")
    parser.add_argument("--tables-out", type=Path, required=True, help="folder for tables 3 to 8")
    args = parser.parse_args(argv)
    cells, findings = read_cells(args.cells), read_audit(args.audit)
    beside_ours, judged = compare_published_cells(cells, findings), judge_claims(cells, findings)
    write_atomic(args.cells_out, beside_ours.to_csv(index=False))
    write_atomic(args.claims_out, judged.to_csv(index=False))
    write_numbered_tables(cells, read_summary(args.summary), args.tables_out)
    counts = ", ".join(f"{n} {name}" for name, n in judged["holds"].value_counts().items())
    print(
        f"{beside_ours['ours'].notna().sum()} of {len(beside_ours)} published cells have a counterpart"
    )
    print(f"claims: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
