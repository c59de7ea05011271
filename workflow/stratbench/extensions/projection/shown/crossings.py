"""The fastest strategy by worker count in a projection.csv, and where two of them cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stratbench.cell.text.words import counted, plural


@dataclass(frozen=True)
class Count:
    """A strategy's step on a number of workers, in s; for measured ones the range of repeats."""

    workers: int
    low_s: float
    step_s: float
    high_s: float
    measured: bool


#: The counts of each strategy, in ascending order.
Lines = dict[str, Sequence[Count]]


@dataclass(frozen=True)
class Crossing:
    """Change of the lead from `before` to `after`.

    `workers`: where their middle times are equal, between `low` and `high`: the nearest counts below and
    above at which their intervals are apart, or None.
    """

    before: str
    after: str
    workers: float
    low: int | None
    high: int | None

    def sentence(self, noun: str) -> str:
        apart = [
            f"{name} is told apart as the faster one on {count}"
            for name, count in ((self.before, self.low), (self.after, self.high))
            if count is not None
        ]
        sure = (
            " and ".join(apart) or "their intervals overlap on all counts, so that either may lead"
        )
        return (
            f"From about {counted(round(self.workers), noun)} on {self.after} takes the lead in time "
            f"from {self.before}; at 80 % {sure}."
        )


def crossings(lines: Lines) -> list[Crossing]:
    """Return the changes of the lead between neighbouring counts that both strategies have."""
    by_count: dict[int, dict[str, Count]] = {}
    for strategy, counts in lines.items():
        for count in counts:
            by_count.setdefault(count.workers, {})[strategy] = count
    ordered = [by_count[n] for n in sorted(by_count)]
    changes = []
    for here, there in pairwise(ordered):
        both = here.keys() & there.keys()
        before, after = (min(at, key=lambda s, at=at: at[s].step_s) for at in (here, there))
        if before != after and {before, after} <= both:
            changes.append(_crossing(lines, before, after, here, there))
    return changes


def _crossing(
    lines: Lines, before: str, after: str, here: dict[str, Count], there: dict[str, Count]
) -> Crossing:
    """Return the intersection of lines through two counts, on logarithmic axes."""
    ahead = [math.log(at[after].step_s / at[before].step_s) for at in (here, there)]
    low, high = (math.log(at[after].workers) for at in (here, there))
    meet = math.exp(low + (high - low) * ahead[0] / (ahead[0] - ahead[1]))
    pairs = [(a, b) for a in lines[before] for b in lines[after] if a.workers == b.workers]
    below = [a.workers for a, b in pairs if a.high_s < b.low_s and a.workers < meet]
    above = [b.workers for a, b in pairs if b.high_s < a.low_s and b.workers > meet]
    return Crossing(before, after, meet, max(below, default=None), min(above, default=None))


def sentences_on_crossings(lines: Lines, noun: str) -> list[str]:
    """Return sentences on changes of the lead, or on a permanent leader of several strategies."""
    projected = {s: c for s, c in lines.items() if any(not count.measured for count in c)}
    if len(projected) < 2:
        return []
    if changes := crossings(projected):
        return [crossing.sentence(noun) for crossing in changes]
    shared = set.intersection(*({c.workers for c in counts} for counts in projected.values()))
    leaders = {
        min(projected, key=lambda s, n=n: next(c.step_s for c in projected[s] if c.workers == n))
        for n in shared
    }
    if len(leaders) != 1:
        return []
    [leader], most = leaders, max(shared)
    at = {s: next(c for c in projected[s] if c.workers == most) for s in projected}
    open_ones = [s for s in at if s != leader and at[s].low_s <= at[leader].high_s]
    sure = (
        f"; on {most} its interval of 80 % overlaps {' and '.join(open_ones)}'s"
        if open_ones
        else ""
    )
    return [
        f"{leader} has the lead on all counts up to {most} {plural(noun)}: no lines cross{sure}."
    ]
