"""Finds in a projection.csv from which worker count on another strategy is the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stratbench.cell.text.words import format_count, pluralize


@dataclass(frozen=True)
class CountStepTime:
    """Step time of a strategy on a number of workers, with its interval.

    On measured worker counts the interval is the range of repeats.
    """

    workers: int
    interval_low_s: float
    step_s: float
    interval_high_s: float
    is_measured: bool


#: Step times by name of the strategy, in ascending order of workers.
StepTimesByStrategy = dict[str, Sequence[CountStepTime]]


@dataclass(frozen=True)
class Crossing:
    """Worker count from which on another strategy is the fastest.

    Attributes:
        strategy_before: Fastest strategy on fewer workers than at the crossing.
        strategy_after: Fastest strategy on more workers than at the crossing.
        workers_at_crossing: Number of workers on which both strategies have the same projected step time.
        largest_workers_without_overlap_below: Largest worker count below the crossing on which the intervals
            of both do not overlap, if any.
        smallest_workers_without_overlap_above: Smallest worker count above the crossing on which the
            intervals of both do not overlap, if any.
    """

    strategy_before: str
    strategy_after: str
    workers_at_crossing: float
    largest_workers_without_overlap_below: int | None
    smallest_workers_without_overlap_above: int | None

    def describe_crossing(self, worker_noun: str) -> str:
        """Return a sentence on the worker count from which on another strategy is the fastest."""
        apart = [
            f"{name} is clearly faster on {count}"
            for name, count in (
                (self.strategy_before, self.largest_workers_without_overlap_below),
                (self.strategy_after, self.smallest_workers_without_overlap_above),
            )
            if count is not None
        ]
        sure = (
            " and ".join(apart)
            or "their intervals overlap on all counts, so that either may be faster"
        )
        return (
            f"From about {format_count(round(self.workers_at_crossing), worker_noun)} on, "
            f"{self.strategy_after} is faster than {self.strategy_before}; by the intervals of 80 %, {sure}."
        )


def find_crossings(times_by_strategy: StepTimesByStrategy) -> list[Crossing]:
    """Return the worker counts from which on another strategy is the fastest.

    A change is found between neighbouring worker counts that have step times of both strategies.
    """
    by_count: dict[int, dict[str, CountStepTime]] = {}
    for strategy, counts in times_by_strategy.items():
        for count in counts:
            by_count.setdefault(count.workers, {})[strategy] = count
    ordered = [by_count[n] for n in sorted(by_count)]
    changes = []
    for below, above in pairwise(ordered):
        both = below.keys() & above.keys()
        before, after = (min(at, key=lambda s, at=at: at[s].step_s) for at in (below, above))
        if before != after and {before, after} <= both:
            changes.append(
                _find_crossing_of_strategies(times_by_strategy, before, after, below, above)
            )
    return changes


def _find_crossing_of_strategies(
    times_by_strategy: StepTimesByStrategy,
    strategy_before: str,
    strategy_after: str,
    times_below: dict[str, CountStepTime],
    times_above: dict[str, CountStepTime],
) -> Crossing:
    """Return where two strategies have equal step times, between two neighbouring worker counts.

    Step times are interpolated by straight lines on logarithmic axes.
    """
    before, after = strategy_before, strategy_after
    neighbours = (times_below, times_above)
    ahead = [math.log(at[after].step_s / at[before].step_s) for at in neighbours]
    low, high = (math.log(at[after].workers) for at in neighbours)
    meet = math.exp(low + (high - low) * ahead[0] / (ahead[0] - ahead[1]))
    pairs = [
        (a, b)
        for a in times_by_strategy[before]
        for b in times_by_strategy[after]
        if a.workers == b.workers
    ]
    below = [
        a.workers for a, b in pairs if a.interval_high_s < b.interval_low_s and a.workers < meet
    ]
    above = [
        b.workers for a, b in pairs if b.interval_high_s < a.interval_low_s and b.workers > meet
    ]
    return Crossing(before, after, meet, max(below, default=None), min(above, default=None))


def describe_crossings(times_by_strategy: StepTimesByStrategy, worker_noun: str) -> list[str]:
    """Return sentences on which strategy is the fastest, and from which worker count on."""
    projected = {
        s: c for s, c in times_by_strategy.items() if any(not count.is_measured for count in c)
    }
    if len(projected) < 2:
        return []
    if changes := find_crossings(projected):
        return [crossing.describe_crossing(worker_noun) for crossing in changes]
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
    return [f"{leader} is the fastest on all counts up to {most} {pluralize(worker_noun)}{sure}."]
