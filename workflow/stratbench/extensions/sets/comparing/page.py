"""Writes the page of a comparison: what differs first, then ratios, changes and the decision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import Decision, answers_as_json
from stratbench.analysis.records.groups import bases_by_strategy
from stratbench.analysis.report.answer_rows import first_screen
from stratbench.analysis.report.report import TEMPLATES as REPORT_TEMPLATES
from stratbench.cell.text import pages
from stratbench.cell.text.words import bytes_text, shortened
from stratbench.extensions.sets.check import describe_audit, machines
from stratbench.extensions.sets.comparing.comparison import (
    ComparedCell,
    Comparison,
    against_each_other,
    headline_of,
)
from stratbench.extensions.sets.comparing.regression import Watched
from stratbench.extensions.sets.comparing.tables import change_text, ratio_text, times_text
from stratbench.extensions.sets.reading import ResultSet

TEMPLATES = Path(__file__).parent / "templates"
#: A memory ratio farther from 1 than this counts as a change.
MEMORY_CHANGE = 0.02
#: Maximum number of differences of each kind on the page; all are in the table's file.
MAX_DIFFERENCES = 12
#: Maximum number of pairs with changed order on the page.
MAX_RANK_CHANGES = 12


def set_lines(sets: Sequence[ResultSet]) -> Iterator[dict[str, Any]]:
    """Yield a line for each set."""
    for one in sets:
        ok = int((one.cells["status"] == "ok").sum())
        yield {
            "name": one.name,
            "provenance": [(key, text) for key, text in one.provenance.items() if key != "sha256"],
            "sha256": (one.manifest or {}).get("sha256", ""),
            "cells": f"{ok} of {len(one.cells)} finished",
            "workers": machines(one.cells),
            "audit": next(describe_audit(one.findings)).removeprefix("audit: "),
        }


def pair_section(comparison: Comparison, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the section of the page on one set against the first."""
    ranks = sorted(
        comparison.rank_changes, key=lambda r: (not r.is_clear, r.after.value / r.before.value)
    )
    hidden = ranks[MAX_RANK_CHANGES:]
    return {
        "name": comparison.other.name,
        "headline": headline_of(comparison),
        "differences": list(difference_lines(comparison)),
        "strategies": comparison.strategies,
        "cells": comparison.with_ratio,
        "has_memory": any(cell.memory is not None for cell in comparison.with_ratio),
        "has_score": any(cell.score_change is not None for cell in comparison.with_ratio),
        "has_caution": any(cell.unknown for cell in comparison.with_ratio),
        "has_doubts": any(cell.doubts for cell in comparison.with_ratio),
        "unit": unit_of(comparison.with_ratio),
        "without": comparison.without_ratio,
        "ranks": ranks[:MAX_RANK_CHANGES],
        "more_ranks": len(hidden),
        "more_sure": sum(r.is_clear for r in hidden),
        "changes": list(change_sentences(comparison)),
        "outcomes": [c for c in comparison.cells if c.first.outcome != c.other.outcome],
        "figures": list(figures),
    }


def difference_lines(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the differences by kind, the most serious first."""
    for effect, listed in comparison.by_effect.items():
        for kind in dict.fromkeys(d.kind for d in listed):
            rows = [d for d in listed if d.kind == kind]
            yield {
                "kind": kind,
                "effect": effect,
                "rows": rows[:MAX_DIFFERENCES],
                "more": max(0, len(rows) - MAX_DIFFERENCES),
            }


def unit_of(cells: Sequence[ComparedCell]) -> str:
    """Return the unit of a change of score, if all cells have the same one.

    Else empty.
    """
    units = {c.score.difference(0).partition(" ")[2] for c in cells}
    return units.pop() if len(units) == 1 else ""


def change_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on unusual changes of memory and score, one each."""
    for cell in comparison.with_ratio:
        if cell.memory is not None and abs(cell.memory - 1) > MEMORY_CHANGE:
            before, after = map(bytes_text, (cell.first.memory, cell.other.memory))
            yield f"{cell.in_words}: peak memory {cell.memory - 1:+.0%} ({before} to {after})."
        change = cell.score_change
        if change is None or abs(change.value) <= cell.score.tolerance:
            continue
        chance = "" if change.excludes(0) else "; it may be chance"
        yield (f"{cell.in_words}: {cell.score.name} {change_text(cell)} {unit_of([cell])}{chance}.")


def page_values(
    sets: Sequence[ResultSet],
    pairs: Sequence[dict[str, Any]],
    watched: Sequence[Watched] | None,
    allowed: float | None,
    decisions: Sequence[Decision],
    constraints: Sequence[str],
    limits: Constraints,
    by_cost: bool = False,
) -> dict[str, Any]:
    """Return all values that the template prints.

    Args:
        sets: The sets.
        pairs: Sections on pairs of sets.
        watched: Outcomes of the regression watch, or None without.
        allowed: Allowed slow-down, if configured.
        decisions: Decisions over all sets.
        constraints: Sentences on constraints.
        limits: The constraints.
        by_cost: Whether the ranking is by cost.
    """
    decided = answers_as_json(decisions, [], limits) | {
        "constraints": list(constraints),
        "by_cost": by_cost,
    }
    return {
        "names": [one.name for one in sets],
        "first": sets[0].name,
        "sets": list(set_lines(sets)),
        "pairs": list(pairs),
        "watched": watched,
        "allowed": allowed,
        **first_screen(bases_of(sets, decisions), decided),
    }


def bases_of(sets: Sequence[ResultSet], decisions: Sequence[Decision]) -> dict[str, str | None]:
    """Return the base strategies of those that decisions over sets name, such as `ddp (a100)`."""
    known = bases_by_strategy(pd.concat([one.cells for one in sets]))
    listed = {row["strategy"] for decision in decisions for row in decision.matrix}
    return {name: known.get(name.partition(" (")[0]) for name in sorted(listed)}


def render(values: dict[str, Any]) -> str:
    """Return the page as HTML; all values in it are escaped."""
    texts = (against_each_other, change_text, ratio_text, shortened, times_text)
    filters = {text.__name__: text for text in texts}
    page = pages.render(
        "compare.html.j2", TEMPLATES, REPORT_TEMPLATES, values=values, filters=filters
    )
    return re.sub(r"\n{3,}", "\n\n", page)
