"""Writes plan.html: the whole plan on one page without other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from stratbench.cell.files import write_atomic
from stratbench.plan.answers import PART_NAMES, answered_questions
from stratbench.plan.figures import bytes_text, cells_by_experiment, span_text, totals
from stratbench.plan.schedule import Plan

TEMPLATES = Path(__file__).parent / "templates"


def write_html(plan: Plan, table: list[dict[str, Any]], path: Path) -> None:
    """Render plan.html from the plan and the rows of plan.csv."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"gib": bytes_text, "span": span_text}
    page = environment.get_template("plan.html.j2").render(
        plan=plan,
        experiments=list(cells_by_experiment(plan)),
        rows=table,
        answers=answered_questions(plan),
        part_names=PART_NAMES,
        totals={name: totals(plan, plan.cells, name) for name in (plan.device, *plan.others)},
    )
    write_atomic(path, page)
