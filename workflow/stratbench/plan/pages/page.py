"""Writes plan.html: the whole plan on one page without other files."""

from __future__ import annotations

from pathlib import Path

from stratbench.cell.files import write_atomic
from stratbench.cell.text.pages import render
from stratbench.cell.text.words import bytes_text, hours_text
from stratbench.plan.pages.answers import PART_NAMES, answered_questions
from stratbench.plan.quantities import cells_by_experiment, span_text, totals
from stratbench.plan.schedule import Plan

TEMPLATES = Path(__file__).parent / "templates"


def write_html(plan: Plan, path: Path) -> None:
    """Render plan.html."""
    values = {
        "plan": plan,
        "experiments": list(cells_by_experiment(plan)),
        "answers": answered_questions(plan),
        "part_names": PART_NAMES,
        "totals": {name: totals(plan, plan.cells, name) for name in (plan.device, *plan.others)},
    }
    filters = {"bytes": bytes_text, "span": span_text, "hours": hours_text}
    write_atomic(path, render("plan.html.j2", TEMPLATES, values=values, filters=filters))
