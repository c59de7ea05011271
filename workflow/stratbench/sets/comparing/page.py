"""Writes the page of a comparison: what differs first, then ratios, changes and the decision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import Decision, answers_as_json
from stratbench.analysis.report.answer_rows import first_screen, named_bases
from stratbench.analysis.report.report import TEMPLATES as REPORT_TEMPLATES
from stratbench.cell.text import pages
from stratbench.cell.text.words import MIB, shortened
from stratbench.sets.check import describe_audit, machines
from stratbench.sets.comparing.comparison import (
    ComparedCell,
    Comparison,
    changed_outcomes,
    headline_of,
)
from stratbench.sets.comparing.regression import Watched
from stratbench.sets.comparing.tables import change_text, ratio_text, times_text
from stratbench.sets.reading import ResultSet

TEMPLATES = Path(__file__).parent / "templates"
#: A memory ratio farther from 1 than this counts as a change.
MEMORY_CHANGE = 0.02
#: The number of differences shown of each kind; the others are counted, and are in the table's file.
MOST_DIFFERENCES = 12
#: The number of pairs with changed places that are shown; the others are counted.
MOST_RANK_CHANGES = 12


def set_lines(sets: Sequence[ResultSet]) -> Iterator[dict[str, Any]]:
    """A line for each set."""
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


def pair_section(found: Comparison, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The section of the page on one set against the first."""
    ranks = sorted(
        found.rank_changes, key=lambda r: (not r.is_clear, r.after.value / r.before.value)
    )
    hidden = ranks[MOST_RANK_CHANGES:]
    return {
        "name": found.other.name,
        "headline": headline_of(found),
        "differences": list(difference_lines(found)),
        "strategies": [
            {
                "strategy": m.strategy,
                "workers": "all" if m.gpus is None else m.gpus,
                "ratio": ratio_text(m.time),
                "value": m.time.value,
                "models": m.models,
                "cells": m.cells,
            }
            for m in found.strategies
        ],
        "cells": [cell_line(cell) for cell in found.with_ratio],
        "has_memory": any(cell.memory is not None for cell in found.with_ratio),
        "has_score": any(cell.score_change is not None for cell in found.with_ratio),
        "has_caution": any(cell.caution for cell in found.with_ratio),
        "has_doubts": any(cell.doubts for cell in found.with_ratio),
        "unit": unit_of(found.with_ratio),
        "without": [without_line(cell) for cell in found.without_ratio],
        "ranks": [
            {
                "place": f"{r.model}, {r.gpus} ({r.experiment})",
                "was": r.was_first,
                "now": r.is_first,
                "before": ratio_text(r.before),
                "after": ratio_text(r.after),
                "is_sure": r.is_clear,
            }
            for r in ranks[:MOST_RANK_CHANGES]
        ],
        "more_ranks": len(hidden),
        "more_sure": sum(r.is_clear for r in hidden),
        "changes": list(change_sentences(found)),
        "outcomes": [
            {
                "place": cell.in_words,
                "first": cell.first.outcome or "finished",
                "other": cell.other.outcome or "finished",
            }
            for cell in changed_outcomes(found.cells)
        ],
        "figures": list(figures),
    }


def difference_lines(found: Comparison) -> Iterator[dict[str, Any]]:
    """The differences by kind, the most serious first."""
    parts = (
        ("no ratio", found.work),
        ("not known to be equal", found.unknown),
        ("may explain ratios", found.place),
    )
    for effect, listed in parts:
        for kind in dict.fromkeys(d.kind for d in listed):
            rows = [d for d in listed if d.kind == kind]
            yield {
                "kind": kind,
                "effect": effect,
                "rows": [
                    {
                        "path": d.path,
                        "first": shortened(d.first),
                        "other": shortened(d.other),
                        "cells": d.cells,
                    }
                    for d in rows[:MOST_DIFFERENCES]
                ],
                "more": max(0, len(rows) - MOST_DIFFERENCES),
            }


def unit_of(cells: Sequence[ComparedCell]) -> str:
    """The unit of a change of score, if all cells have the same one; else empty."""
    units = {c.score.difference(0).partition(" ")[2] for c in cells}
    return units.pop() if len(units) == 1 else ""


def cell_line(cell: ComparedCell) -> dict[str, Any]:
    """The line in the table for a cell with a ratio."""
    return {
        "experiment": cell.group.experiment,
        "model": cell.group.model,
        "strategy": cell.group.strategy,
        "gpus": cell.group.gpus,
        "first": times_text(cell.first.times),
        "other": times_text(cell.other.times),
        "ratio": ratio_text(cell.time),
        "value": cell.time.value,
        "memory": "" if cell.memory is None else f"{cell.memory:.3f}",
        "score": change_text(cell.score_change, cell) if cell.score_change else "",
        "score_value": cell.score_change.value if cell.score_change else "",
        "caution": cell.caution,
        "doubts": ", ".join(cell.doubts),
    }


def without_line(cell: ComparedCell) -> dict[str, Any]:
    """The line in the list for a cell without a ratio: both times, beside the reason."""
    return {
        "place": cell.in_words,
        "first": times_text(cell.first.times),
        "other": times_text(cell.other.times),
        "why": cell.why_not,
    }


def change_sentences(found: Comparison) -> Iterator[str]:
    """Sentences on unusual changes of memory and score, one each."""
    for cell in found.with_ratio:
        if cell.memory is not None and abs(cell.memory - 1) > MEMORY_CHANGE:
            before, after = (m / MIB for m in (cell.first.memory, cell.other.memory))
            yield f"{cell.in_words}: peak memory {cell.memory - 1:+.0%} ({before:.0f} to {after:.0f} MiB)."
        change = cell.score_change
        if change is None or abs(change.value) <= cell.score.tolerance:
            continue
        sure = change.low is not None and change.low * change.high > 0
        chance = "" if sure else "; it may be chance"
        yield (
            f"{cell.in_words}: {cell.score.name} {change_text(change, cell)} "
            f"{cell.score.difference(0).partition(' ')[2]}{chance}."
        )


def page_values(
    sets: Sequence[ResultSet],
    pairs: Sequence[dict[str, Any]],
    watched: Sequence[Watched] | None,
    allowed: float | None,
    decisions: Sequence[Decision],
    constraints: Sequence[str],
    given: Constraints,
    by_cost: bool = False,
) -> dict[str, Any]:
    """All values that the template prints."""
    decided = answers_as_json(decisions, [], given) | {
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


def bases_of(
    sets: Sequence[ResultSet], decisions: Sequence[Decision]
) -> list[tuple[str, str | None]]:
    """Pairs of the strategies that decisions over sets name, `ddp (a100)`, and their base strategies."""
    known = {name: base for one in sets for name, base in named_bases(one.cells)}
    listed = {row["strategy"] for decision in decisions for row in decision.matrix}
    return [(name, known.get(name.partition(" (")[0])) for name in sorted(listed)]


def render(values: dict[str, Any]) -> str:
    """The page as HTML; all values in it are escaped."""
    page = pages.render("compare.html.j2", TEMPLATES, REPORT_TEMPLATES, values=values)
    return re.sub(r"\n{3,}", "\n\n", page)
