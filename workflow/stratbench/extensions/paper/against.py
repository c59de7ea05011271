"""Compares a study with the paper's values and claims.

The hardware differs, so ratios of times are compared instead of times: ratios between strategies, and between
numbers of GPUs. The result is against_cells.csv and against_claims.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import read_audit_findings
from stratbench.analysis.records.groups import Repeats
from stratbench.analysis.tables.summary import read_summary
from stratbench.cell.files import write_text_atomically
from stratbench.extensions.paper import published
from stratbench.extensions.paper.claims import judge_claims
from stratbench.extensions.paper.numbered import write_paper_tables

#: For each published measure: its column in cells.csv, and the factor from this column's unit to the paper's.
PUBLISHED_MEASURES = {
    "training_time_s": ("train_time_s", 1.0),
    "accuracy_percent": ("score_final", 100.0),
}
#: Columns by which a published value and our value of the same cell and measure are matched.
MATCHING_COLUMNS = ["measure", "dataset", "model", "strategy", "gpus"]
#: Reference strategy of each strategy: their times are compared as a ratio.
REFERENCE_STRATEGIES = {"fsdp": "ddp", "ps-async": "ps-sync", "ps-async-modified": "ps-sync"}
PUBLISHED_COLUMNS = (
    *("version", "table", "row", "strategy", "model", "dataset", "gpus", "measure"),
    *("published", "ours", "experiment", "kind"),
    *("against_strategy", "published_to_strategy", "our_to_strategy", "ratio_to_strategy"),
    *("against_gpus", "published_to_gpus", "our_to_gpus", "ratio_to_gpus"),
)


def compare_published_cells(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Return a row per published value, with our median and the comparison of both.

    Our median is NaN if we have not measured the cell. A value is divided by that of a reference strategy,
    and by that of the fewest GPUs, once for the paper and once for our records. The comparison is our ratio
    divided by the published ratio, which is 1 if both agree. Accuracies are compared by differences in points
    instead (`kind` is `difference`).

    Args:
        cells: Rows of cells.csv.
        findings: Rows of audit.csv.
    """
    ours = compute_medians_of_measured_cells(cells, findings)
    tables = published.read_published_tables().rename(columns={"value": "published"})
    theirs = tables[["version", "table", *MATCHING_COLUMNS, "published"]]
    tables = tables.merge(ours, how="left", on=MATCHING_COLUMNS).fillna({"experiment": ""})
    is_accuracy = tables["measure"] == "accuracy_percent"
    tables["kind"] = np.where(is_accuracy, "difference", "ratio")
    line = ["version", "table", *MATCHING_COLUMNS[:-1]]
    fewest = theirs.dropna(subset=["published"]).groupby(line)["gpus"].min().rename("fewest")
    fewest = tables.join(fewest, on=line)["fewest"]
    for name, baseline in {
        "strategy": tables["strategy"].map(REFERENCE_STRATEGIES),
        "gpus": fewest.where(fewest < tables["gpus"]),
    }.items():
        against = tables[["version", "table", *MATCHING_COLUMNS]].assign(**{name: baseline})
        against = against.merge(theirs, how="left").merge(ours, how="left", on=MATCHING_COLUMNS)
        tables[f"against_{name}"] = baseline
        theirs_to, ours_to = (
            compute_ratio_or_difference(is_accuracy, tables[whose], against[whose])
            for whose in ("published", "ours")
        )
        tables[f"published_to_{name}"], tables[f"our_to_{name}"] = theirs_to, ours_to
        tables[f"ratio_to_{name}"] = compute_ratio_or_difference(is_accuracy, ours_to, theirs_to)
    return tables[list(PUBLISHED_COLUMNS)]


def compute_medians_of_measured_cells(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Return our medians over repeats, per measured cell and measure in the paper.

    Medians have the paper's units. The columns are those in MATCHING_COLUMNS, `ours` and `experiment`.

    Args:
        cells: Rows of cells.csv.
        findings: Rows of audit.csv.
    """
    groups = Repeats(cells[published.mask_cells_in_paper(cells)], findings.to_dict("records"))
    rows = []
    for group, repeats in groups.ok.items():
        for measure, (column, scale) in PUBLISHED_MEASURES.items():
            median = groups.compute_median_of_repeats(
                group, column, "time" if scale == 1.0 else "score"
            )
            if median is not None:
                place = (repeats["dataset"].iloc[0], group.model, group.strategy, group.gpus)
                rows.append((measure, *place, scale * median, group.experiment))
    return pd.DataFrame(rows, columns=[*MATCHING_COLUMNS, "ours", "experiment"]).drop_duplicates(
        MATCHING_COLUMNS
    )


def compute_ratio_or_difference(
    is_accuracy: pd.Series, values: pd.Series, references: pd.Series
) -> pd.Series:
    """Return values divided by their references, or minus their references for accuracies.

    Args:
        is_accuracy: Whether each value is an accuracy.
        values: Values to compare.
        references: Values to compare with.
    """
    return (values - references).where(is_accuracy, values / references)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.paper.against", description=__doc__
    )
    parser.add_argument(
        "--cells", type=Path, required=True, help="path of the study's cells.csv, to read"
    )
    parser.add_argument(
        "--audit", type=Path, required=True, help="path of the study's audit.csv, to read"
    )
    parser.add_argument(
        "--cells-out",
        type=Path,
        required=True,
        help="CSV file to write, with each published value next to ours",
    )
    parser.add_argument(
        "--claims-out",
        type=Path,
        required=True,
        help="CSV file to write, with each claim of the paper and whether it holds",
    )
    parser.add_argument(
        "--summary", type=Path, required=True, help="path of the study's summary.csv, to read"
    )
    parser.add_argument(
        "--tables-out",
        type=Path,
        required=True,
        help="folder to write, with the paper's tables 3 to 8 and our values in them",
    )
    args = parser.parse_args(argv)
    cells, findings = read_cells(args.cells), read_audit_findings(args.audit)
    beside_ours, judged = compare_published_cells(cells, findings), judge_claims(cells, findings)
    write_text_atomically(args.cells_out, beside_ours.to_csv(index=False))
    write_text_atomically(args.claims_out, judged.to_csv(index=False))
    write_paper_tables(cells, read_summary(args.summary), args.tables_out)
    # `partial` prints this on the screen, where a study without the paper's cells has nothing to say of it.
    if num_counterparts := beside_ours["ours"].notna().sum():
        print(f"{num_counterparts} of {len(beside_ours)} published cells have a counterpart")
        counts = ", ".join(f"{n} {name}" for name, n in judged["holds"].value_counts().items())
        print(f"claims: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
