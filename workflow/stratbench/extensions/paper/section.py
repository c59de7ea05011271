"""The report's section on the paper: its tables filled from the records, and a comparison."""

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
    """Make the section where a cell has a counterpart in the paper."""
    paper = paper_section(inputs.folder)
    if paper["with_counterpart"]:
        numbered = list(read_paper_tables(inputs.folder / "paper_tables"))
        html = render_section(TEMPLATE, paper=paper, numbered=numbered)
        yield Section("paper", html, "Against the paper")


def paper_section(folder: Path) -> dict[str, Any]:
    """Return the comparison with the paper, from the files of `against`: claims, and tables."""
    compared = pd.read_csv(folder / "against_cells.csv")
    judged = pd.read_csv(folder / "against_claims.csv", dtype=str, keep_default_na=False)
    return {
        "claims": judged.to_dict("records"),
        "tables": list(published_table_sections(compared)),
        "total": len(compared),
        "with_counterpart": int(compared["ours"].notna().sum()),
    }


def published_table_sections(compared: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield each published table: the number of cells with a counterpart, these cells, and explanations."""
    notes = published.explanations().set_index("about")["explanation"].to_dict()
    for (version, name), rows in compared.groupby(["version", "table"], sort=False):
        ours = rows[rows["ours"].notna()]
        yield {
            "title": f"Table {name} of {version}",
            "measure": "accuracy, %"
            if rows["kind"].iloc[0] == "difference"
            else "training time, s",
            "total": len(rows),
            "rows": [published_cell_line(row) for row in ours.to_dict("records")],
            "note": notes.get(f"{version} {name}", ""),
        }


def published_cell_line(row: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of a published cell; the columns of ratios may be empty."""
    is_difference = row["kind"] == "difference"

    def shown(value: float) -> str:
        return "" if pd.isna(value) else f"{value:+.2f}" if is_difference else f"{value:.2f}"

    texts = {name: row[name] for name in ("strategy", "model", "gpus", "experiment")}
    texts["published"] = "above its limit" if pd.isna(row["published"]) else f"{row['published']:g}"
    texts["ours"] = format_number(row["ours"], 2 if is_difference else None)
    for name in ("strategy", "gpus"):
        against = row[f"against_{name}"]
        texts[f"against_{name}"] = "" if pd.isna(against) else str(against).removesuffix(".0")
        for of in ("published", "our", "ratio"):
            texts[f"{of}_to_{name}"] = shown(row[f"{of}_to_{name}"])
    return texts


READING = Reading(sections=make_paper_sections)
