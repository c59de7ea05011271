"""The plan as people read it: a text for a terminal, and plan.html, one page without other files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.cell.installation import PACKAGE
from stratbench.cell.text.pages import as_json, hash_of_script, render
from stratbench.cell.text.words import (
    COLUMNS,
    bytes_text,
    counted,
    folded,
    hours_text,
    seconds_text,
    unit_for,
)
from stratbench.plan.pages.answers import PART_NAMES, answered_questions
from stratbench.plan.pages.check_text import lines_by_reason
from stratbench.plan.pages.what_fits import data_of
from stratbench.plan.quantities import cells_by_experiment, in_unit, span_text, totals
from stratbench.plan.schedule import Plan, Planned

TEMPLATES = Path(__file__).parent / "templates"
#: Of page.css, which all pages share.
REPORTS_STYLE = PACKAGE / "analysis" / "report" / "templates"
#: How far in the lines of a table stand.
INDENT = 5
#: So many strategies do not stand in one field of a table.
MANY_ALIKE = 3


def plan_text(plan: Plan) -> str:
    """What `snakemake plan` prints."""
    states = Counter(c.state for c in plan.cells)
    values = _values(plan) | {
        "workers_of": _workers,
        "unit_of_needed": lambda cells: _unit(cells, lambda c: c.fit.needed_bytes),
        "unit_of_sent": lambda cells: _unit(cells, lambda c: c.needs.wire_bytes),
        "matrix": _matrix,
        "needed": _needed,
        "time": _time,
        "sent": lambda c, unit: in_unit(c.needs.wire_bytes, unit),
        "states": ", ".join(f"{n} {state}" for state, n in states.items()),
        "reasons": _reasons(plan),
        "snapshots": max(
            (c for c in plan.cells if c.needs and c.needs.snapshot_bytes),
            key=lambda c: c.needs.snapshot_bytes,
            default=None,
        ),
        "scattered": [c for c in plan.cells if c.asked.tasks > 1 and c.cell.repeat == 0],
        "elastic": [c for c in plan.cells if c.asked.workers and c.cell.repeat == 0],
        "raised": sorted(
            (c for c in plan.cells if c.asked.gpus and c.asked.planned_mib),
            key=lambda c: -c.needs.host_bytes,
        ),
    }
    filters = {"counted": counted, "seconds": seconds_text} | FILTERS
    text = render("plan.txt.j2", TEMPLATES, values=values, filters=filters)
    return folded([text.rstrip()]) + "\n"


def network_text(plan: Plan) -> str:
    """What `stratbench plan --model NAME` prints: memory in the way to train with which the page begins."""
    first = plan.cells[0].subject.settings
    lines = [
        f"{plan.cells[0].cell.model} on {plan.device}, {first.precision}, global batch {first.global_batch}"
    ]
    for _, cells in cells_by_experiment(plan):
        s = cells[0].subject.settings
        if (s.precision, s.activation_checkpointing) == (first.precision, False):
            unit, n_bytes = _unit(cells, lambda c: c.fit.needed_bytes)
            workers = ", ".join(map(str, _workers(cells)))
            lines.append(f"   {unit} a worker that it needs, at {workers} workers (! does not fit)")
            lines.append(_matrix(cells, _needed, n_bytes))
    return folded(lines)


def write_html(plan: Plan, path: Path) -> None:
    """Render plan.html."""
    script = (TEMPLATES / "what_fits.js").read_text(encoding="utf-8")
    values = _values(plan) | {
        "part_names": PART_NAMES,
        "data": as_json(data_of(plan)),
        "script": script,
        "script_hash": hash_of_script(script),
    }
    page = render("plan.html.j2", TEMPLATES, REPORTS_STYLE, values=values, filters=FILTERS)
    write_atomic(path, page)


FILTERS = {"bytes": bytes_text, "span": span_text, "hours": hours_text}


def _values(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan,
        "experiments": list(cells_by_experiment(plan)),
        "answers": answered_questions(plan),
        "totals": {name: totals(plan, plan.cells, name) for name in (plan.device, *plan.others)},
    }


def _reasons(plan: Plan) -> dict[str, list[str]]:
    """Why cells are not trained, or were not, by what has become of them: a line for each reason."""
    told = {
        state: [c for c in plan.cells if c.state == state]
        for state in ("refused", "infeasible", "failed", "recorded")
    }
    told["not predicted"] = [c for c in plan.cells if not c.footprint and c.state != "refused"]
    return {state: lines_by_reason((c.cell, c.why) for c in cells) for state, cells in told.items()}


def _workers(cells: list[Planned]) -> list[int]:
    return sorted({c.cell.gpus for c in cells})


def _unit(cells: list[Planned], what: Callable[[Planned], float]) -> tuple[str, int]:
    """The unit of the largest amount, and its bytes."""
    return unit_for(max((what(c) for c in cells if c.footprint), default=0))


def _matrix(cells: list[Planned], show: Callable[..., str], *unit: int) -> str:
    """Rows are strategies, columns models, and in each field the worker counts side by side.

    Models that do not fit the terminal beside the others stand in a further table below. Strategies of
    which all fields are alike share a row; where they are many, a line below names them.
    """
    first = {
        (c.cell.strategy, c.cell.model, c.cell.gpus): c for c in reversed(cells) if c.footprint
    }
    models = list(dict.fromkeys(c.cell.model for c in cells))
    alike: dict[tuple[str, ...], list[str]] = {}
    for strategy in dict.fromkeys(c.cell.strategy for c in cells):
        found = [[first.get((strategy, model, n)) for n in _workers(cells)] for model in models]
        fields = tuple("  ".join(show(c, *unit) for c in there if c) or "-" for there in found)
        alike.setdefault(fields, []).append(strategy)
    rows = [["", *models], *([_names(names), *fields] for fields, names in alike.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "   ".join(row[i].ljust(widths[i]) for i in (0, *group))
        for group in side_by_side(widths)
        for row in rows
    ]
    lines += [f"alike: {', '.join(names)}" for names in alike.values() if len(names) >= MANY_ALIKE]
    return "\n".join(f"{' ' * INDENT}{line}".rstrip() for line in lines)


def side_by_side(widths: list[int]) -> list[list[int]]:
    """The columns from the second on, in groups that fit a terminal beside the first."""
    groups: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        together = sum(3 + widths[j] for j in (*groups[-1], i))
        if groups[-1] and INDENT + widths[0] + together > COLUMNS:
            groups.append([])
        groups[-1].append(i)
    return groups


def _names(strategies: list[str]) -> str:
    if len(strategies) < MANY_ALIKE:
        return ", ".join(strategies)
    return f"{strategies[0]} and {len(strategies) - 1} alike"


def _needed(c: Planned, unit: int) -> str:
    return in_unit(c.fit.needed_bytes, unit) + ("" if c.fit.fits else "!")


def _time(c: Planned) -> str:
    if c.fit.train is None:
        return "unknown"
    mark = {"no": "", "possible": "?", "certain": "!"}[c.fit.cut_off]
    return span_text(c.fit.train) + mark
