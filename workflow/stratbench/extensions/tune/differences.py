"""Measures errors of the plan's time ratios in public sweeps, by kind of difference.

A sweep is one model on one kind and number of GPUs, measured in several configurations. The sweeps are in
workflow/reference/public_sweeps.csv. Each row names its source and has the time that the plan predicts for
it. benchmarks/prediction/public_sweeps.py makes that file and checks each source against the others.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import permutations
from typing import NamedTuple

from stratbench.cell.installation import REFERENCE
from stratbench.cell.text.words import format_count

PUBLIC_SWEEPS = REFERENCE / "public_sweeps.csv"
#: Kinds of differences between configurations. Their amounts are, in order: samples that a GPU computes at
#: once, share of forward that is computed again, ZeRO stage, workers that divide the network's layers,
#: pipeline stages, and 0 or 1 for compile and offload.
KINDS = ("micro-batch", "checkpointing", "sharding", "tensor", "pipeline", "compile", "offload")
#: Share of forward that selective checkpointing computes again, approximately.
SELECTIVE_SHARE = 0.4
#: Allowed share of sweeps in which the plan errs by more than a margin.
TAIL = 0.05
#: With fewer sweeps or sources than this, a kind of difference drops no combination.
MIN_SWEEPS, MIN_SOURCES = 3, 2
#: Measured times whose ratio is below this count as equal.
ALIKE = 1.03
#: Minimum margin, since few sweeps do not show rare errors. With 1.3, 94 % of simulated studies
#: (benchmarks/statistics/tune.py) ended within 3 % of the fastest, for a sixth less of the cost.
MIN_MARGIN = 1.5

#: Amount of each kind of difference that a configuration has, such as 2 for `tensor`.
Amounts = Mapping[str, float]


class Margin(NamedTuple):
    """Largest planned time ratio at which the slower configuration may still be faster, with evidence."""

    ratio: float
    sweeps: int
    sources: int


#: Keys are a kind of difference, and whether the slower configuration has the larger amount of it.
Margins = Mapping[tuple[str, bool], Margin]


class Beaten(NamedTuple):
    """Reason to drop a configuration: its planned time over that of `faster` is above the margin."""

    faster: str
    ratio: float
    margin: float


def fit_margins(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, bool], Margin]:
    """Return the margins for which the sweeps give enough evidence.

    Only pairs of configurations that differ in one kind count. A margin is the maximum planned ratio of a
    pair whose slower configuration was measured faster.
    """
    worst: dict[tuple[str, bool], dict[str, float]] = {}
    sources: dict[tuple[str, bool], set[str]] = {}
    for sweep in group_by_sweep(row for row in rows if row["measured"]).values():
        for slower, faster in permutations(sweep, 2):
            kinds = [kind for kind in KINDS if float(slower[kind]) != float(faster[kind])]
            planned = float(slower["planned"]) / float(faster["planned"])
            if len(kinds) != 1 or planned <= 1:
                continue
            key = kinds[0], float(slower[kinds[0]]) > float(faster[kinds[0]])
            is_wrong = float(slower["measured"]) * ALIKE < float(faster["measured"])
            each = worst.setdefault(key, {})
            each[slower["sweep"]] = max(each.get(slower["sweep"], 1.0), planned * is_wrong)
            sources.setdefault(key, set()).add(slower["source"])
    return {
        key: Margin(
            max(MIN_MARGIN, compute_upper_prediction_bound(list(each.values()))),
            len(each),
            len(sources[key]),
        )
        for key, each in worst.items()
        if len(each) >= MIN_SWEEPS and len(sources[key]) >= MIN_SOURCES
    }


def compute_upper_prediction_bound(values: list[float]) -> float:
    """Return the value that a new value exceeds with probability TAIL.

    With few values it is the largest.
    """
    rank = math.ceil((1 - TAIL) * (len(values) + 1))
    return sorted(values)[min(rank, len(values)) - 1]


def group_by_sweep(rows: Iterable[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Return rows of public sweeps grouped by their sweep."""
    sweeps: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        sweeps.setdefault(row["sweep"], []).append(row)
    return sweeps


def combine_margins(slower: Amounts, faster: Amounts, margins: Margins) -> float | None:
    """Return the largest planned time ratio at which `slower` may still be faster in truth.

    If they differ in several kinds, the margins multiply.

    Args:
        slower: Amounts of the configuration with the longer planned time.
        faster: Amounts of the other configuration.
        margins: Margins by kind of difference.

    Returns:
        The ratio, or None without evidence for one of the kinds.
    """
    keys = [(kind, slower[kind] > faster[kind]) for kind in KINDS if slower[kind] != faster[kind]]
    if not keys or any(key not in margins for key in keys):
        return None
    return math.prod(margins[key].ratio for key in keys)


def find_beaten_configurations(
    times: Mapping[str, float], amounts: Mapping[str, Amounts], margins: Margins
) -> dict[str, Beaten]:
    """Return the configurations that another one beats by more than the margin between them.

    Args:
        times: Planned time of each configuration, by name.
        amounts: Amounts of each kind of difference, by name.
        margins: Margins by kind of difference.
    """
    by_name: dict[str, Beaten] = {}
    for slower, faster in permutations(times, 2):
        ratio = times[slower] / times[faster]
        margin = combine_margins(amounts[slower], amounts[faster], margins) if ratio > 1 else None
        if margin is not None and ratio > margin and ratio > by_name.get(slower, (None, 0.0))[1]:
            by_name[slower] = Beaten(faster, ratio, margin)
    return by_name


@cache
def read_public_sweeps() -> list[dict[str, str]]:
    """Return the rows of the table of public sweeps."""
    with PUBLIC_SWEEPS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def fit_public_margins() -> dict[tuple[str, bool], Margin]:
    """Return the margins that follow from all public sweeps."""
    return fit_margins(read_public_sweeps())


def describe_margins(margins: Margins) -> Iterator[str]:
    """Yield a line per kind with its planned ratio and the evidence for it.

    Combinations up to this planned ratio are retained.
    """
    for kind in KINDS:
        lines = [
            f"factor {m.ratio:.2f} if it has {words} of it ({format_count(m.sweeps, 'public sweep')} of "
            f"{format_count(m.sources, 'source')})"
            for more, words in ((True, "more"), (False, "less"))
            if (m := margins.get((kind, more))) is not None
        ]
        yield f"  {kind}: {', '.join(lines) or 'without evidence, so that it drops no combination'}"
