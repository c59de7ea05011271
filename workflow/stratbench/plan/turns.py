"""At which speed of the links the order of two strategies turns: measured times, with what the plan adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.plan.duration import Step
from stratbench.plan.quantities import cells_by
from stratbench.plan.schedule import Plan

#: How much slower or faster links are looked at, and by which factors.
MOST, STEP = 1000.0, 1.05
HEADER = (
    *("experiment", "model", "gpus", "faster", "slower", "link_gb_per_s"),
    *("turns_at_gb_per_s_low", "turns_at_gb_per_s_high"),
)


def turn_rows(plan: Plan, records: Mapping[Cell, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each pair of strategies on as many workers, the speeds of the links at which their order turns.

    `faster` is quicker as measured. The speeds are those by the two ends of the plan's range; one way
    alone is looked at: slower links, or faster ones where slower ones would not turn the order.
    """
    timed = [c for c in plan.cells if c.fit and c.fit.by_device and _train_s(records.get(c.cell))]
    places = cells_by(timed, "experiment", "model", "gpus")
    for (experiment, model, gpus), alike in sorted(places.items(), key=lambda item: item[0]):
        by_strategy = cells_by(alike, "strategy")
        if gpus == 1:
            continue
        means = {
            name: fmean(_train_s(records[c.cell]) / c.subject.steps for c in cells)
            for name, cells in by_strategy.items()
        }
        for fast, slow in combinations(sorted(means, key=means.get), 2):
            one, other = by_strategy[fast][0].fit, by_strategy[slow][0].fit
            found = _factors(means[slow] - means[fast], one.steps, other.steps)
            if found:
                speeds = sorted(one.link_bytes_per_s / 1e9 / k for k in found)
                values = (experiment, model, gpus, fast, slow, one.link_bytes_per_s / 1e9)
                yield dict(zip(HEADER, (*values, speeds[0], speeds[-1]), strict=True))


def _train_s(record: Mapping[str, Any] | None) -> float | None:
    return record["time"]["train_time_s"] if record and record["status"] == "ok" else None


def _factors(gap_s: float, fast: tuple[Step, Step], slow: tuple[Step, Step]) -> list[float]:
    """How many times slower the links are where the order turns, at each end of the range where it does."""

    def lead_s(end: int) -> Callable[[float], float]:
        """By how much the faster one still leads, with links so many times slower."""

        def lead(k: float) -> float:
            ours, theirs = (s[end].seconds(k) - s[end].seconds() for s in (fast, slow))
            return gap_s + theirs - ours

        return lead

    for base in (STEP, 1 / STEP):
        found = [k for end in (0, 1) if (k := first_zero(lead_s(end), base)) is not None]
        if found:
            return found
    return []


def first_zero(f: Callable[[float], float], base: float) -> float | None:
    """Of the factors from 1 on in steps of `base`, where `f` first falls below 0; None: nowhere."""
    k, each = 1.0, [1.0]
    while 1 / MOST < k < MOST:
        k *= base
        each.append(k)
    for one, other in pairwise(each):
        low, high = f(one), f(other)
        if high < 0 <= low:
            return one + (other - one) * low / (low - high)  # it is straight between bends
    return None
