"""Writes the plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from stratbench.cell.text.words import bytes_text, counted, hours_text, seconds_text, unit_for
from stratbench.plan.pages.answers import answered_questions
from stratbench.plan.pages.check_text import lines_by_reason
from stratbench.plan.quantities import (
    Totals,
    cells_by_experiment,
    in_unit,
    span_text,
    totals,
)
from stratbench.plan.schedule import Plan, Planned

#: So many strategies do not stand in one field of a table.
MANY_ALIKE = 3


def plan_text(plan: Plan) -> str:
    """What `snakemake plan` prints."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield f"Study {plan.study}: {counted(len(plan.cells), 'cell')}, planned for {_device(plan)}"
    yield ""
    for name, cells in cells_by_experiment(plan):
        yield from _experiment(name, cells)
    yield from _verdicts(plan)
    for question, sentences in answered_questions(plan):
        yield question
        yield from (f"  {sentence}" for sentence in sentences)
        yield ""


def _device(plan: Plan) -> str:
    if plan.named:
        return plan.device
    return f"{plan.device} (name yours: cluster.gpu in config.yaml)"


def _experiment(name: str, cells: list[Planned]) -> Iterator[str]:
    s = cells[0].subject.settings
    repeats = 1 + max(c.cell.repeat for c in cells)
    batch = f"global batch {s.global_batch}"
    length = counted(s.steps, "step") if s.steps else counted(s.epochs, "epoch")
    yield (
        f"== {name}: {cells[0].cell.dataset}, {s.precision}, {batch}, {length}, "
        f"{counted(len(cells), 'cell')} ({counted(repeats, 'repeat')})"
    )
    workers = sorted({c.cell.gpus for c in cells})
    header = ", ".join(map(str, workers))
    known = [c for c in cells if c.footprint]
    unit, n_bytes = unit_for(max((c.fit.needed_bytes for c in known), default=0))
    yield f"   {unit} a worker that a cell needs, at {header} workers (! does not fit)"
    yield from _matrix(cells, workers, lambda c: _needed(c, n_bytes))
    yield f"   training time, at {header} workers (! cut off by the time limit, ? perhaps)"
    yield from _matrix(cells, workers, _time)
    unit, sent_bytes = unit_for(max((c.needs.wire_bytes for c in known), default=0))
    yield f"   {unit} that a worker sends in a step, at {header} workers"
    yield from _matrix(cells, workers, lambda c: in_unit(c.needs.wire_bytes, sent_bytes))
    yield ""


def _matrix(
    cells: list[Planned], workers: list[int], show: Callable[[Planned], str]
) -> Iterator[str]:
    """Rows are strategies, columns models, and in each field the worker counts side by side.

    Strategies of which all fields are alike share a row; where they are many, a line below names them.
    """
    first = {
        (c.cell.strategy, c.cell.model, c.cell.gpus): c for c in reversed(cells) if c.footprint
    }
    models = list(dict.fromkeys(c.cell.model for c in cells))
    alike: dict[tuple[str, ...], list[str]] = {}
    for strategy in dict.fromkeys(c.cell.strategy for c in cells):
        found = [[first.get((strategy, model, n)) for n in workers] for model in models]
        fields = tuple("  ".join(show(c) for c in there if c) or "-" for there in found)
        alike.setdefault(fields, []).append(strategy)
    rows = [["", *models], *([_names(names), *fields] for fields, names in alike.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "     " + "   ".join(padded).rstrip()
    for names in alike.values():
        if len(names) >= MANY_ALIKE:
            yield f"     alike: {', '.join(names)}"


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


def _verdicts(plan: Plan) -> Iterator[str]:
    yield "== In all"
    states: dict[str, int] = {}
    for c in plan.cells:
        states[c.state] = states.get(c.state, 0) + 1
    yield "   " + ", ".join(f"{count} {state}" for state, count in states.items())
    most = plan.cluster["cells_per_job"]
    if most > 1 and plan.jobs:
        yield f"   on SLURM {counted(plan.jobs, 'job')}: up to {most} cells share one (cells_per_job)"
    for name in (plan.device, *plan.others):
        yield from _on(plan, name)
    for state in ("refused", "infeasible", "failed", "recorded"):
        yield from _listed(state, [c for c in plan.cells if c.state == state])
    unknown = [c for c in plan.cells if c.footprint is None and c.state != "refused"]
    yield from _listed("not predicted", unknown)
    for sentence in plan.unheld:
        yield f"   no node can hold: {sentence}"
    served = [c for c in plan.cells if c.needs and c.needs.snapshot_bytes]
    if served:
        most = max(served, key=lambda c: c.needs.snapshot_bytes)
        yield (
            f"   disk: {bytes_text(most.needs.snapshot_bytes)} for the servers' snapshots of {most.cell}, "
            "until they are evaluated: in the temporary folder of its node, or with the results if it "
            "spans several"
        )
    raised = [c for c in plan.cells if c.asked.gpus and c.asked.planned_mib]
    if raised:
        most = max(raised, key=lambda c: c.needs.host_bytes)
        yield (
            f"   {len(raised)} cells need more of a node's memory than config.yaml says and will ask for "
            f"it: {most.cell} for {bytes_text(most.needs.host_bytes)}"
        )
    yield ""


def _on(plan: Plan, name: str) -> Iterator[str]:
    t: Totals = totals(plan, plan.cells, name)
    fit = "all cells fit" if not t.unfit else f"{t.unfit} of {t.cells} cells do not fit"
    yield f"   {name}: {fit} (margin {plan.cluster['memory_margin']:.0%})"
    if t.gpu_hours is None:
        yield "      its rate at this precision is not known, so no time can be told"
        return
    low, high = t.gpu_hours
    cost = ""
    if t.cost is not None:
        cost = f", cost {t.cost[0]:,.2f} to {t.cost[1]:,.2f}"
    noun = "GPU-hours" if name != "CPU" else "hours of a worker's CPU"
    if t.sources:
        yield f"      {hours_text(low)} to {hours_text(high)} {noun} still to do{cost}; from {t.sources}"
    else:
        yield "      nothing left to do"
    if t.longest is not None:
        yield f"      the longest: {t.longest.cell}, up to {seconds_text(t.longest_high_s)}"
    if t.cut_off:
        yield f"      the time limit will cut off {counted(t.cut_off, 'cell')} for certain"
    if t.perhaps_cut_off:
        yield f"      the time limit may cut off {counted(t.perhaps_cut_off, 'cell')}"


def _listed(state: str, cells: Iterable[Planned]) -> Iterator[str]:
    """Cells in one state by reason, a line each."""
    for line in lines_by_reason((c.cell, c.why) for c in cells):
        yield f"   {state}: {line}"
