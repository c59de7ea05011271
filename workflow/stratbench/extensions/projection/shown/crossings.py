"""Finds the fastest strategy per worker count in a projection.csv, and where the fastest changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stratbench.cell.text.words import format_count, pluralize


@dataclass(frozen=True)
class CountStepTime:
    """Seconds per step of a strategy on a number of workers, with its interval.

    For measured counts the interval is the range of repeats.
    """

    workers: int
    interval_low_s: float
    step_s: float
    interval_high_s: float
    is_measured: bool


#: Step times of each strategy, in ascending order of workers.
Lines = dict[str, Sequence[CountStepTime]]


@dataclass(frozen=True)
class Crossing:
    """Worker count at which the fastest strategy changes from `strategy_before` to `strategy_after`.

    Attributes:
        strategy_before: Fastest strategy below the crossing.
        strategy_after: Fastest strategy above the crossing.
        crossing_workers: Number of workers with equal projected times.
        clear_below: Largest count below, at which the intervals do not overlap; None if there is none.
        clear_above: Smallest count above, at which the intervals do not overlap; None if there is none.
    """

    strategy_before: str
    strategy_after: str
    crossing_workers: float
    clear_below: int | None
    clear_above: int | None

    def describe_crossing(self, noun: str) -> str:
        """Return a sentence on the worker count at which the fastest strategy changes."""
        apart = [
            f"{name} is clearly faster on {count}"
            for name, count in (
                (self.strategy_before, self.clear_below),
                (self.strategy_after, self.clear_above),
            )
            if count is not None
        ]
        sure = (
            " and ".join(apart)
            or "their intervals overlap on all counts, so that either may be faster"
        )
        return (
            f"From about {format_count(round(self.crossing_workers), noun)} on, {self.strategy_after} is "
            f"faster than {self.strategy_before}; by the intervals of 80 %, {sure}."
        )


def find_crossings(lines: Lines) -> list[Crossing]:
    """Return the worker counts between which the fastest strategy changes.

    Only neighbouring counts with times of both strategies are compared.
    """
    by_count: dict[int, dict[str, CountStepTime]] = {}
    for strategy, counts in lines.items():
        for count in counts:
            by_count.setdefault(count.workers, {})[strategy] = count
    ordered = [by_count[n] for n in sorted(by_count)]
    changes = []
    for here, there in pairwise(ordered):
        both = here.keys() & there.keys()
        before, after = (min(at, key=lambda s, at=at: at[s].step_s) for at in (here, there))
        if before != after and {before, after} <= both:
            changes.append(_intersect_lines(lines, before, after, here, there))
    return changes


def _intersect_lines(
    lines: Lines,
    before: str,
    after: str,
    here: dict[str, CountStepTime],
    there: dict[str, CountStepTime],
) -> Crossing:
    """Return where two strategies' step times cross, by straight lines on logarithmic axes."""
    ahead = [math.log(at[after].step_s / at[before].step_s) for at in (here, there)]
    low, high = (math.log(at[after].workers) for at in (here, there))
    meet = math.exp(low + (high - low) * ahead[0] / (ahead[0] - ahead[1]))
    pairs = [(a, b) for a in lines[before] for b in lines[after] if a.workers == b.workers]
    below = [
        a.workers for a, b in pairs if a.interval_high_s < b.interval_low_s and a.workers < meet
    ]
    above = [
        b.workers for a, b in pairs if b.interval_high_s < a.interval_low_s and b.workers > meet
    ]
    return Crossing(before, after, meet, max(below, default=None), min(above, default=None))


def describe_crossings(lines: Lines, noun: str) -> list[str]:
    """Return sentences on changes of the fastest strategy, or on one that is fastest everywhere."""
    projected = {s: c for s, c in lines.items() if any(not count.is_measured for count in c)}
    if len(projected) < 2:
        return []
    if changes := find_crossings(projected):
        return [crossing.describe_crossing(noun) for crossing in changes]
    shared = set.intersection(*({c.workers for c in counts} for counts in projected.values()))
    leaders = {
        min(projected, key=lambda s, n=n: next(c.step_s for c in projected[s] if c.workers == n))
        for n in shared
    }
    if len(leaders) != 1:
        return []
    [leader], most = leaders, max(shared)
    at = {s: next(c for c in projected[s] if c.workers == most) for s in projected}
    open_ones = [
        s for s in at if s != leader and at[s].interval_low_s <= at[leader].interval_high_s
    ]
    sure = (
        f"; on {most} its interval of 80 % overlaps that of {' and '.join(open_ones)}"
        if open_ones
        else ""
    )
    return [f"{leader} is the fastest on all counts up to {most} {pluralize(noun)}{sure}."]
