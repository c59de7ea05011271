"""Writes the plan as text for a terminal, and as the self-contained page plan.html."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.pages import format_html_safe_json, read_page_script, render_page
from stratbench.cell.text.words import COLUMNS as WIDTH
from stratbench.cell.text.words import (
    choose_byte_unit_name_and_size,
    format_bytes,
    format_count,
    format_hours,
    format_seconds,
    wrap_lines,
)
from stratbench.extensions.plan.pages.answers import PART_NAMES, answer_user_questions
from stratbench.extensions.plan.pages.table import COLUMNS, RANGE
from stratbench.extensions.plan.pages.what_fits import collect_page_data
from stratbench.extensions.plan.quantities import (
    format_bytes_in_unit,
    format_compared_time,
    format_time_range,
    group_cells_by,
    list_assumed_rates,
    sort_by_compared_time,
    sum_plan_totals,
)
from stratbench.extensions.plan.schedule import DOES_NOT_FIT, FITS, TIGHT, Plan, PlannedCell
from stratbench.study.reasons import format_skip_reasons

TEMPLATES = Path(__file__).parent / "templates"
#: Indentation of a table's lines, in characters.
INDENT = 5
#: Minimum number of strategies with equal values that are named below the table instead of in it.
MANY_ALIKE = 3


def _format_fit_mark(c: PlannedCell) -> str:
    return {FITS: "", TIGHT: "?", DOES_NOT_FIT: "!"}[c.fit.memory_verdict]


def _format_time_mark(c: PlannedCell) -> str:
    return {"no": "", "possible": "?", "certain": "!"}[c.fit.time_limit_verdict]


#: Tables per experiment, by column of plan.csv: the title, and a function that returns a value's mark.
TABLES: dict[str, tuple[str, Callable[[PlannedCell], str]]] = {
    "needed_mib": (
        "{unit} per worker that {cell} needs, at {workers} workers (! does not fit, ? tight)",
        _format_fit_mark,
    ),
    "train_time_s": (
        "training time to compare by (range), at {workers} workers (! cut off, ? perhaps)",
        _format_time_mark,
    ),
    "wire_bytes_per_step": (
        "{unit} that a worker sends in a step, at {workers} workers",
        lambda _: "",
    ),
}


def format_plan(plan: Plan) -> str:
    """Return the text that `snakemake plan` prints."""
    states = Counter(c.state for c in plan.cells)
    values = _collect_template_values(plan) | {
        "tables": TABLES,
        "too_large_cells": plan.texts_on_too_large_cells,
        "mixed_gpu_types": plan.text_on_mixed_gpu_types,
        "lines_of": _format_quantity_table,
        "states": ", ".join(f"{n} {state}" for state, n in states.items()),
        "reasons": _list_reason_lines_by_state(plan),
        "snapshots": max(
            (c for c in plan.cells if c.needs and c.needs.snapshot_bytes),
            key=lambda c: c.needs.snapshot_bytes,
            default=None,
        ),
        "elastic": [c for c in plan.cells if c.job_request.workers and c.cell.repeat == 0],
        "raised": sorted(
            (c for c in plan.cells if c.job_request.gpus and c.job_request.is_memory_planned),
            key=lambda c: -c.needs.host_bytes,
        ),
    }
    filters = {"counted": format_count, "seconds": format_seconds} | FILTERS
    text = render_page("plan.txt.j2", TEMPLATES, values=values, filters=filters)
    return wrap_lines([text.rstrip()]) + "\n"


def format_single_model_plan(plan: Plan) -> str:
    """Return the text that `stratbench plan --model NAME` prints.

    The text has the memory for the settings with which the page begins.
    """
    first = plan.cells[0].subject.settings
    lines = [
        f"{plan.cells[0].cell.model} on {plan.device}, {plan.cells[0].cell.dataset}, {first.optimizer}, "
        f"{first.precision}, global batch {first.global_batch}"
    ]
    for cells in group_cells_by(plan.cells, "experiment").values():
        s = cells[0].subject.settings
        if (s.precision, s.activation_checkpointing) == (first.precision, False):
            lines.append(_format_quantity_table(cells, "needed_mib", "it"))
    lines += [
        f"   {state}: {line}"
        for state, told in _list_reason_lines_by_state(plan).items()
        for line in told
    ]
    return wrap_lines(lines)


def write_plan_html(plan: Plan, path: Path) -> None:
    """Render the plan as an HTML page, plan.html."""
    values = _collect_template_values(plan) | {
        "columns": COLUMNS,
        "part_names": PART_NAMES,
        "data": format_html_safe_json(collect_page_data(plan)),
        **read_page_script(TEMPLATES / "what_fits.js"),
    }
    page = render_page("plan.html.j2", TEMPLATES, values=values, filters=FILTERS)
    write_text_atomically(path, page)


FILTERS = {"bytes": format_bytes, "hours": format_hours}


def _collect_template_values(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan,
        "experiments": group_cells_by(sort_by_compared_time(plan.cells), "experiment").items(),
        "answers": answer_user_questions(plan),
        "assumed": list_assumed_rates(plan),
        "totals": {
            name: sum_plan_totals(plan, name) for name in (plan.device, *plan.compared_devices)
        },
    }


def _list_reason_lines_by_state(plan: Plan) -> dict[str, list[str]]:
    """Return lines with the reasons why cells are not trained or not predicted, by state."""
    told = {
        state: [c for c in plan.cells if c.state == state]
        for state in ("unsupported", "infeasible", "failed", "recorded")
    }
    told["not predicted"] = [c for c in plan.cells if not c.footprint and c.state != "unsupported"]
    return {
        state: format_skip_reasons((c.cell, c.reason) for c in cells)
        for state, cells in told.items()
    }


def _format_quantity_table(
    cells: list[PlannedCell], column_name: str, subject: str = "a cell"
) -> str:
    """Return a title and a table with one quantity of an experiment's cells.

    Rows are strategies, columns are models, and each field has the values of all worker counts. Models that
    do not fit the terminal's width are in a further table below. Strategies with equal fields share a row.
    If they are many, a line below names them.

    Args:
        cells: Cells of an experiment.
        column_name: Column of plan.csv.
        subject: Subject of the title.
    """
    title, mark = TABLES[column_name]
    column, workers = COLUMNS[column_name], sorted({c.cell.gpus for c in cells})
    first = {
        (c.cell.strategy, c.cell.model, c.cell.gpus): c for c in reversed(cells) if c.footprint
    }
    unit, n_bytes = "", 0
    if column.unit is not RANGE:
        most = max(map(column.get_value, first.values()), default=0)
        # If all values are 0, they have the unit that suits the model's weights.
        weights = COLUMNS["state_parameters_bytes"]
        unit, n_bytes = choose_byte_unit_name_and_size(
            most or max(map(weights.get_value, first.values()), default=0)
        )

    def format_cell_value(c: PlannedCell) -> str:
        if not n_bytes:
            return _format_training_time(c) + mark(c)
        return format_bytes_in_unit(column.get_value(c), n_bytes) + mark(c)

    models = list(dict.fromkeys(c.cell.model for c in cells))
    alike: dict[tuple[str, ...], list[str]] = {}
    for strategy in _sort_strategies_by_time(cells):
        found = [[first.get((strategy, model, n)) for n in workers] for model in models]
        fields = tuple(
            "  ".join(format_cell_value(c) for c in there if c) or "-" for there in found
        )
        alike.setdefault(fields, []).append(strategy)
    rows = [
        ["", *models],
        *([_format_strategy_names(names), *fields] for fields, names in alike.items()),
    ]
    widths = [max(map(len, fields)) for fields in zip(*rows, strict=True)]
    lines = [
        "   ".join(row[i].ljust(widths[i]) for i in (0, *group))
        for group in group_columns_by_width(widths)
        for row in rows
    ]
    lines += [
        f"equal values: {', '.join(names)}" for names in alike.values() if len(names) >= MANY_ALIKE
    ]
    told = title.format(unit=unit, cell=subject, workers=", ".join(map(str, workers)))
    return "\n".join([f"   {told}", *(f"{' ' * INDENT}{line}".rstrip() for line in lines)])


def _sort_strategies_by_time(cells: list[PlannedCell]) -> list[str]:
    """Return strategies sorted by their time for comparisons on the most workers.

    The other strategies follow in their order.
    """
    most = max(c.cell.gpus for c in cells)
    there = sort_by_compared_time(c for c in cells if c.cell.gpus == most)
    return list(dict.fromkeys(c.cell.strategy for c in [*there, *cells]))


def _format_training_time(c: PlannedCell) -> str:
    """Return a cell's training time as text: the comparison time and the range."""
    fit = c.fit
    if fit.train_span is None:
        return "unknown"
    if fit.train_span != fit.device_rate_span:
        return format_time_range(fit.train_span)
    return format_compared_time(fit.usual_s, fit.train_span)


def group_columns_by_width(widths: list[int]) -> list[list[int]]:
    """Divide a table's columns after the first into groups that fit the terminal's width."""
    groups: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        together = sum(3 + widths[j] for j in (*groups[-1], i))
        if groups[-1] and INDENT + widths[0] + together > WIDTH:
            groups.append([])
        groups[-1].append(i)
    return groups


def _format_strategy_names(strategies: list[str]) -> str:
    if len(strategies) < MANY_ALIKE:
        return ", ".join(strategies)
    return f"{strategies[0]} and {len(strategies) - 1} alike"
