"""Sums over the cells of a plan, and formats its quantities as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from stratbench.extensions.plan.device_rates import NETWORK_GB_PER_S
from stratbench.extensions.plan.duration import Span
from stratbench.extensions.plan.schedule import FITS, TIGHT, Plan, PlannedCell, compute_cost_range
from stratbench.telemetry.machine.hardware import list_datasheets


def sum_plan_totals(plan: Plan, device: str) -> dict[str, Any]:
    """Return the plan's totals on a device: counts of cells, GPU-hours and cost.

    Time and cost cover the cells that are still to do. No cell counts for longer than its time limit.
    `unknown` counts cells without predicted memory, which are in no other count. `gpu_hours` and `cost` (at
    best, at worst) are None if unknown.
    """
    fits = [(c, c.fits_on[device]) for c in plan.cells if device in c.fits_on]
    open_ = [(c, v) for c, v in fits if not c.has_record and v.may_run]
    timed = [
        (c, _limit_to_time_limit(c, v.total_span)) for c, v in open_ if v.total_span is not None
    ]
    unknown = [c for c in plan.cells if not (c.fits_on or c.has_record or c.state == "unsupported")]
    gpu_hours = cost = None
    if timed or not (open_ or unknown):
        low = sum(c.cell.gpus * span.low_s for c, span in timed) / 3600
        high = sum(c.cell.gpus * span.high_s for c, span in timed) / 3600
        gpu_hours, cost = (low, high), compute_cost_range(low, high, plan.cluster, device != "CPU")
    longest, its_span = max(timed, key=lambda t: t[1].high_s, default=(None, Span(0.0, 0.0, "")))
    return {
        "cells": len(fits) + len(unknown),
        "fit": sum(v.memory_verdict == FITS for _, v in fits),
        "tight": sum(v.memory_verdict == TIGHT for _, v in fits),
        "unfit": sum(not v.may_run for _, v in fits),
        "unknown": len(unknown),
        "gpu_hours": gpu_hours,
        "cost": cost,
        "longest": longest,
        "longest_high_s": its_span.high_s,
        "cut_off": sum(v.time_limit_verdict == "certain" for _, v in open_),
        "perhaps_cut_off": sum(v.time_limit_verdict == "possible" for _, v in open_),
        "sources": _summarise_time_sources(span.source for _, span in timed),
    }


def list_assumed_rates(plan: Plan) -> list[str]:
    """Return texts on the link rates that the plan assumes, since the config has none.

    Only links that some cell uses are listed.
    """
    cells = [c for c in plan.cells if c.needs is not None]
    rates = []
    sheet = next((gpu for gpu in list_datasheets() if gpu.name == plan.device), None)
    linked = any(c.cell.gpus > 1 and c.subject.request.is_on_cuda for c in cells)
    if sheet and linked and not plan.cluster["link_gb_per_s"]:
        rates.append(
            f"{sheet.link_gb_per_s:g} GB/s between GPUs of a node ({sheet.link}; "
            "cluster.link_gb_per_s)"
        )
    if not plan.cluster["network_gb_per_s"] and any(c.needs.nodes > 1 for c in cells):
        rates.append(f"{NETWORK_GB_PER_S:g} GB/s between nodes (cluster.network_gb_per_s)")
    return rates


def _limit_to_time_limit(c: PlannedCell, span: Span) -> Span:
    limit_s = c.subject.time_limit_s or math.inf
    return Span(*(min(end_s, limit_s) for end_s in span), span.source)


def _summarise_time_sources(sources: Iterable[str]) -> str:
    counted = Counter(sources)
    if len(counted) > 3:
        return f"{len(counted)} sources (see the column time_source)"
    return ", ".join(source for source, _ in counted.most_common())


def group_cells_by(cells: Iterable[PlannedCell], *coordinates: str) -> dict[Any, list[PlannedCell]]:
    """Group cells by coordinates such as `experiment` and `model`, in order of occurrence."""
    value_of = attrgetter(*coordinates)
    by_key: dict[Any, list[PlannedCell]] = {}
    for c in cells:
        by_key.setdefault(value_of(c.cell), []).append(c)
    return by_key


def sort_by_compared_time(cells: Iterable[PlannedCell]) -> list[PlannedCell]:
    """Sort cells by their time for comparisons, separately per experiment and model.

    A group has one experiment, model, worker count and repeat. Unknown times come last. Groups, and cells of
    equal times, keep their order.
    """
    groups = group_cells_by(cells, "experiment", "model", "gpus", "repeat").values()
    return [c for group in groups for c in sorted(group, key=_get_compared_time_s)]


def _get_compared_time_s(c: PlannedCell) -> float:
    return math.inf if c.fit is None or c.fit.usual_s is None else c.fit.usual_s


def format_bytes_in_unit(n_bytes: float, unit_bytes: int) -> str:
    """Return a number of bytes in a unit as text, with three digits or more."""
    return (
        f"{n_bytes / unit_bytes:.3g}"
        if n_bytes < 1000 * unit_bytes
        else f"{n_bytes / unit_bytes:.0f}"
    )


def format_time_range(span: Span) -> str:
    """Return a range as text, such as `12-45 min`."""
    if span.high_s < 1:
        return "under 1 s"
    if span.high_s < 100:
        return f"{span.low_s:.0f}-{span.high_s:.0f} s"
    if span.high_s < 6000:
        return f"{span.low_s / 60:.1f}-{span.high_s / 60:.0f} min"
    return f"{span.low_s / 3600:.1f}-{span.high_s / 3600:.1f} h"


def format_compared_time(usual_s: float, span: Span) -> str:
    """Return the time for comparisons and its range as text, such as `20.5 (12-45 min)`."""
    if span.high_s < 1:
        return format_time_range(span)
    unit_s, digits = (1, 0) if span.high_s < 100 else (60, 1) if span.high_s < 6000 else (3600, 1)
    return f"{usual_s / unit_s:.{digits}f} ({format_time_range(span)})"
