"""Sums over the cells of a plan, and the texts of its quantities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stratbench.plan.duration import Span
from stratbench.plan.schedule import Plan, Planned


@dataclass(frozen=True)
class Totals:
    """Sums over the cells on one device. Time and cost: of the cells that are still to do."""

    cells: int
    unfit: int
    gpu_hours: tuple[float, float] | None
    cost: tuple[float, float] | None
    longest: Planned | None
    longest_high_s: float
    cut_off: int
    perhaps_cut_off: int
    sources: str


def totals(plan: Plan, cells: Iterable[Planned], device: str) -> Totals:
    """The sums for `device`. No cell counts for longer than its time limit."""
    fits = [(c, c.fits_on[device]) for c in cells if device in c.fits_on]
    open_ = [(c, v) for c, v in fits if c.state not in ("done", "recorded") and v.fits]
    timed = [(c, v) for c, v in open_ if v.total is not None]
    gpu_hours = cost = None
    if timed or not open_:
        low = sum(c.cell.gpus * _ended(c, v.total.low_s) for c, v in timed) / 3600
        high = sum(c.cell.gpus * _ended(c, v.total.high_s) for c, v in timed) / 3600
        gpu_hours = (low, high)
        price = plan.cluster["price_per_gpu_hour"]
        if price is not None and device != "CPU":
            cost = (low * price, high * price)
    longest = max(timed, key=lambda cv: _ended(cv[0], cv[1].total.high_s), default=None)
    return Totals(
        cells=len(fits),
        unfit=sum(not v.fits for _, v in fits),
        gpu_hours=gpu_hours,
        cost=cost,
        longest=longest[0] if longest else None,
        longest_high_s=_ended(longest[0], longest[1].total.high_s) if longest else 0.0,
        cut_off=sum(v.cut_off == "certain" for _, v in open_),
        perhaps_cut_off=sum(v.cut_off == "possible" for _, v in open_),
        sources=_sources(v.train.source for _, v in timed),
    )


def _ended(c: Planned, seconds: float) -> float:
    limit_s = c.subject.time_limit_s
    return seconds if limit_s is None else min(seconds, limit_s)


def _sources(sources: Iterable[str]) -> str:
    counted = Counter(sources)
    if len(counted) > 3:
        return f"{len(counted)} sources (see the column time_source)"
    return ", ".join(source for source, _ in counted.most_common())


def cells_by_experiment(plan: Plan) -> Iterator[tuple[str, list[Planned]]]:
    """The plan's cells by experiment, in the study's order."""
    for name in dict.fromkeys(c.cell.experiment for c in plan.cells):
        yield name, [c for c in plan.cells if c.cell.experiment == name]


def in_unit(n_bytes: float, unit: int) -> str:
    """The number of units as text, with three digits or more."""
    return f"{n_bytes / unit:.3g}" if n_bytes < 1000 * unit else f"{n_bytes / unit:.0f}"


def span_text(span: Span) -> str:
    """A range as text: `12-45 min`."""
    if span.high_s < 1:
        return "under 1 s"
    if span.high_s < 100:
        return f"{span.low_s:.0f}-{span.high_s:.0f} s"
    if span.high_s < 6000:
        return f"{span.low_s / 60:.1f}-{span.high_s / 60:.0f} min"
    return f"{span.low_s / 3600:.1f}-{span.high_s / 3600:.1f} h"
