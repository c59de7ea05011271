"""Makes the report's section on the paper: its tables with our values, and both compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.measures import format_number
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.extensions.paper import published
from stratbench.extensions.paper.numbered import read_paper_tables

TEMPLATE = Path(__file__).parent / "templates" / "paper.html.j2"


def make_paper_sections(inputs: ReportInput) -> Iterator[Section]:
    """Yield the report's section on the paper. Yield nothing if the paper has no measured cell."""
    paper = collect_paper_section_values(inputs.folder)
    if paper["with_counterpart"]:
        numbered = list(read_paper_tables(inputs.folder / "paper_tables"))
        html = render_section(TEMPLATE, paper=paper, numbered=numbered)
        yield Section("paper", html, "Against the paper")


def collect_paper_section_values(folder: Path) -> dict[str, Any]:
    """Return the values that the template of the report's section on the paper needs.

    Args:
        folder: Folder with against_cells.csv and against_claims.csv.
    """
    compared = pd.read_csv(folder / "against_cells.csv")
    judged = pd.read_csv(folder / "against_claims.csv", dtype=str, keep_default_na=False)
    return {
        "claims": judged.to_dict("records"),
        "tables": list(iter_published_tables(compared)),
        "total": len(compared),
        "with_counterpart": int(compared["ours"].notna().sum()),
    }


def iter_published_tables(compared_cells: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield each table of the paper that has cells which we have measured, too.

    An item has the rows of these cells, the number of all cells, and an explanation of differences.

    Args:
        compared_cells: Rows of against_cells.csv.
    """
    notes = published.read_explanations().set_index("about")["explanation"].to_dict()
    for (version, name), rows in compared_cells.groupby(["version", "table"], sort=False):
        ours = rows[rows["ours"].notna()]
        yield {
            "title": f"Table {name} of {version}",
            "measure": "accuracy, %"
            if rows["kind"].iloc[0] == "difference"
            else "training time, s",
            "total": len(rows),
            "rows": [make_published_cell_row(row) for row in ours.to_dict("records")],
            "note": notes.get(f"{version} {name}", ""),
        }


def make_published_cell_row(compared_row: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of a row in a table of published cells, by column.

    Args:
        compared_row: Row of against_cells.csv.
    """
    is_difference = compared_row["kind"] == "difference"

    def format_ratio_or_difference(value: float) -> str:
        return "" if pd.isna(value) else f"{value:+.2f}" if is_difference else f"{value:.2f}"

    texts = {name: compared_row[name] for name in ("strategy", "model", "gpus", "experiment")}
    texts["published"] = (
        "above its limit"
        if pd.isna(compared_row["published"])
        else f"{compared_row['published']:g}"
    )
    texts["ours"] = format_number(compared_row["ours"], 2 if is_difference else None)
    for name in ("strategy", "gpus"):
        against = compared_row[f"against_{name}"]
        texts[f"against_{name}"] = "" if pd.isna(against) else str(against).removesuffix(".0")
        for of in ("published", "our", "ratio"):
            texts[f"{of}_to_{name}"] = format_ratio_or_difference(compared_row[f"{of}_to_{name}"])
    return texts


READING = Reading(list_sections=make_paper_sections)
