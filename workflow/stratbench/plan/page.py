"""plan.html: the plan on one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from stratbench.cell.files import write_atomic
from stratbench.plan.answers import PART_NAMES, answers
from stratbench.plan.figures import by_experiment, gib, span_hours, totals
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
    environment.filters |= {"gib": gib, "span": span_hours}
    page = environment.get_template("plan.html.j2").render(
        plan=plan,
        experiments=list(by_experiment(plan)),
        rows=table,
        answers=answers(plan),
        part_names=PART_NAMES,
        totals={name: totals(plan, plan.cells, name) for name in (plan.device, *plan.others)},
    )
    write_atomic(path, page)
