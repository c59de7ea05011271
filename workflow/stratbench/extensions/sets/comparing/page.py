"""Makes the page of a comparison: differences between the sets, time ratios, changes and the decision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import Decision, build_answers_json
from stratbench.analysis.records.groups import map_base_strategies
from stratbench.analysis.report.answer_rows import build_first_screen_values
from stratbench.analysis.report.report import TEMPLATES as REPORT_TEMPLATES
from stratbench.cell.text import pages
from stratbench.cell.text.words import format_bytes, shorten_for_table
from stratbench.extensions.sets.check import describe_audit_findings, describe_workers_of_cells
from stratbench.extensions.sets.comparing.comparison import (
    ComparedCell,
    Comparison,
    describe_comparison,
    describe_differences,
)
from stratbench.extensions.sets.comparing.regression import RegressionOutcome
from stratbench.extensions.sets.comparing.tables import (
    format_mean_time,
    format_ratio,
    format_score_change,
)
from stratbench.extensions.sets.reading import ResultSet

TEMPLATES = Path(__file__).parent / "templates"
#: Changes of peak memory up to this share are not on the page.
MEMORY_CHANGE = 0.02
#: Largest number of differences per kind on the page. The table in the file next to the page has all of them.
MAX_DIFFERENCES = 12
#: Largest number of rank changes on the page. A rank change is a pair of strategies in another order.
MAX_RANK_CHANGES = 12


def iter_set_rows(sets: Sequence[ResultSet]) -> Iterator[dict[str, Any]]:
    """Yield the row of each set in the page's table of sets."""
    for one in sets:
        ok = int((one.cells["status"] == "ok").sum())
        yield {
            "name": one.name,
            "provenance": [(key, text) for key, text in one.provenance.items() if key != "sha256"],
            "sha256": (one.manifest or {}).get("sha256", ""),
            "cells": f"{ok} of {len(one.cells)} finished",
            "workers": describe_workers_of_cells(one.cells),
            "audit": next(describe_audit_findings(one.findings)).removeprefix("audit: "),
        }


def collect_comparison_section_values(
    comparison: Comparison, figures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the values of the page's section that compares a set with the first.

    Args:
        comparison: Comparison of the two sets.
        figures: What the page shows of each figure.
    """
    ranks = sorted(
        comparison.rank_changes,
        key=lambda r: (not r.is_beyond_noise, r.ratio_in_other.value / r.ratio_in_first.value),
    )
    hidden = ranks[MAX_RANK_CHANGES:]
    return {
        "name": comparison.other_set.name,
        "headline": describe_comparison(comparison),
        "differences": list(iter_difference_rows(comparison)),
        "strategies": comparison.strategy_means,
        "cells": comparison.cells_with_ratio,
        "has_memory": any(cell.memory_ratio is not None for cell in comparison.cells_with_ratio),
        "has_score": any(cell.score_change is not None for cell in comparison.cells_with_ratio),
        "has_caution": any(cell.unstated_differences for cell in comparison.cells_with_ratio),
        "has_doubts": any(cell.doubtful_rules for cell in comparison.cells_with_ratio),
        "unit": find_common_score_unit(comparison.cells_with_ratio),
        "without": comparison.cells_without_ratio,
        "ranks": ranks[:MAX_RANK_CHANGES],
        "more_ranks": len(hidden),
        "more_sure": sum(r.is_beyond_noise for r in hidden),
        "changes": list(iter_memory_and_score_changes(comparison)),
        "outcomes": [
            c
            for c in comparison.common_cells
            if c.first_measurements.failure_text != c.other_measurements.failure_text
        ],
        "figures": list(figures),
    }


def iter_difference_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the rows of the page's table of differences, the most serious kind first."""
    for effect, listed in comparison.differences_by_effect.items():
        for kind in dict.fromkeys(d.kind for d in listed):
            rows = [d for d in listed if d.kind == kind]
            yield {
                "kind": kind,
                "effect": effect,
                "rows": rows[:MAX_DIFFERENCES],
                "more": max(0, len(rows) - MAX_DIFFERENCES),
            }


def find_common_score_unit(cells: Sequence[ComparedCell]) -> str:
    """Return the unit of the cells' score changes, or an empty text if units differ."""
    units = {c.score.format_difference(0).partition(" ")[2] for c in cells}
    return units.pop() if len(units) == 1 else ""


def iter_memory_and_score_changes(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence on each large change of a cell's peak memory or score."""
    for cell in comparison.cells_with_ratio:
        if cell.memory_ratio is not None and abs(cell.memory_ratio - 1) > MEMORY_CHANGE:
            before, after = map(
                format_bytes,
                (cell.first_measurements.memory_bytes, cell.other_measurements.memory_bytes),
            )
            yield (
                f"{cell.coordinates_text}: peak memory changed by {cell.memory_ratio - 1:+.0%}, "
                f"from {before} to {after}."
            )
        change = cell.score_change
        if change is None or abs(change.value) <= cell.score.tolerance:
            continue
        amount = f"{format_score_change(cell)} {find_common_score_unit([cell])}"
        may_be_chance = "" if change.interval_excludes(0) else ", which may be chance"
        yield f"{cell.coordinates_text}: {cell.score.name} changed by {amount}{may_be_chance}."


def collect_comparison_page_values(
    sets: Sequence[ResultSet],
    sections: Sequence[dict[str, Any]],
    outcomes: Sequence[RegressionOutcome] | None,
    allowed_slowdown: float | None,
    decisions: Sequence[Decision],
    constraint_sentences: Sequence[str],
    constraints: Constraints,
    by_cost: bool = False,
) -> dict[str, Any]:
    """Return all values that the template of the page needs.

    Args:
        sets: The compared sets.
        sections: Values of the page's section on each set.
        outcomes: Outcomes of the search for slow-downs; None without a search.
        allowed_slowdown: Share by which a strategy may be slower; None without a limit.
        decisions: Decisions over all sets.
        constraint_sentences: Sentences on the constraints.
        constraints: Constraints of the decisions.
        by_cost: Whether strategies are ranked by cost.
    """
    decided = build_answers_json(decisions, [], constraints) | {
        "constraints": list(constraint_sentences),
        "by_cost": by_cost,
    }
    return {
        "names": [one.name for one in sets],
        "first": sets[0].name,
        "sets": list(iter_set_rows(sets)),
        "pairs": list(sections),
        "watched": outcomes,
        "allowed": allowed_slowdown,
        **build_first_screen_values(map_candidates_to_base_strategies(sets, decisions), decided),
    }


def map_candidates_to_base_strategies(
    sets: Sequence[ResultSet], decisions: Sequence[Decision]
) -> dict[str, str | None]:
    """Return the base strategy, such as `ddp`, of each candidate, such as `ddp (a100)`.

    The candidates are those of decisions over several sets.
    """
    known = map_base_strategies(pd.concat([one.cells for one in sets]))
    listed = {row["strategy"] for decision in decisions for row in decision.decision_csv_rows}
    return {name: known.get(name.partition(" (")[0]) for name in sorted(listed)}


def render_comparison_page(values: dict[str, Any]) -> str:
    """Return the page of a comparison as HTML.

    Args:
        values: Values that the template needs. They are escaped.
    """
    texts = (
        describe_differences,
        format_score_change,
        format_ratio,
        shorten_for_table,
        format_mean_time,
    )
    filters = {text.__name__: text for text in texts}
    page = pages.render_page(
        "compare.html.j2", TEMPLATES, REPORT_TEMPLATES, values=values, filters=filters
    )
    return re.sub(r"\n{3,}", "\n\n", page)
