"""Errors of the plan's time ratios by the differences between configurations, from public sweeps.

A sweep is one model on one kind and number of GPUs, measured in several configurations. The sweeps are in
workflow/reference/public_sweeps.csv, restated from the source that each row names, with the plan's one time
of each row; benchmarks/prediction/public_sweeps.py makes that file and checks each source against the others.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import permutations
from typing import NamedTuple

from stratbench.cell.installation import REFERENCE
from stratbench.cell.text.words import counted

PUBLIC_SWEEPS = REFERENCE / "public_sweeps.csv"
#: In these configurations may differ. Micro-batch: samples that a GPU computes on at once; checkpointing: the
#: share of forward that is computed again; sharding: as ZeRO's stages; tensor, pipeline: workers that hold a
#: network between them; compile, offload: 0 or 1.
KINDS = ("micro-batch", "checkpointing", "sharding", "tensor", "pipeline", "compile", "offload")
#: What selective checkpointing counts for among shares: about what it computes again.
SELECTIVE_SHARE = 0.4
#: The share of sweeps in which the plan may be wrong beyond a margin.
TAIL = 0.05
#: Evidence of fewer sweeps, or of one source alone, drops nothing.
MIN_SWEEPS, MIN_SOURCES = 3, 2
#: Times nearer than this are alike.
ALIKE = 1.03
#: No margin is smaller: a few sweeps do not show errors that are rarer. With 1.3, 94 % of simulated studies
#: (benchmarks/statistics/tune.py) ended within 3 % of the fastest, for a sixth less of the cost.
MIN_MARGIN = 1.5

#: The amount of each kind that a configuration has.
Amounts = Mapping[str, float]


class Margin(NamedTuple):
    """Maximum planned ratio at which the slower configuration stays, and the evidence for it."""

    ratio: float
    sweeps: int
    sources: int


#: By kind, and whether the slower configuration has more of it.
Margins = Mapping[tuple[str, bool], Margin]


class Beaten(NamedTuple):
    """Reason to drop a configuration: its planned ratio to `faster` is above the margin."""

    faster: str
    ratio: float
    margin: float


def fit_margins(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, bool], Margin]:
    """Return the margins for which these sweeps have evidence.

    Only pairs of a sweep that differ in one kind count. A margin is the maximum planned ratio of a pair whose
    slower configuration was measured faster.
    """
    worst: dict[tuple[str, bool], dict[str, float]] = {}
    sources: dict[tuple[str, bool], set[str]] = {}
    for sweep in by_sweep(row for row in rows if row["measured"]).values():
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
        key: Margin(max(MIN_MARGIN, quantile(list(each.values()))), len(each), len(sources[key]))
        for key, each in worst.items()
        if len(each) >= MIN_SWEEPS and len(sources[key]) >= MIN_SOURCES
    }


def quantile(values: list[float]) -> float:
    """Return the value that a new one exceeds with a chance of TAIL.

    It is the largest of a few values.
    """
    rank = math.ceil((1 - TAIL) * (len(values) + 1))
    return sorted(values)[min(rank, len(values)) - 1]


def by_sweep(rows: Iterable[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Return the rows of each sweep."""
    sweeps: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        sweeps.setdefault(row["sweep"], []).append(row)
    return sweeps


def margin_between(slower: Amounts, faster: Amounts, margins: Margins) -> float | None:
    """Return the planned ratio up to which `slower` may be faster, or None without evidence.

    If they differ in several kinds, the plan may be wrong in each.

    Args:
        slower: Amounts of the configuration that is planned slower.
        faster: Amounts of the other.
        margins: Margins by kind.
    """
    keys = [(kind, slower[kind] > faster[kind]) for kind in KINDS if slower[kind] != faster[kind]]
    if not keys or any(key not in margins for key in keys):
        return None
    return math.prod(margins[key].ratio for key in keys)


def beaten(
    times: Mapping[str, float], amounts: Mapping[str, Amounts], margins: Margins
) -> dict[str, Beaten]:
    """Return the configurations that another one beats by more than the margin between them.

    Args:
        times: The planned time of each, by name.
        amounts: What each has of each kind.
        margins: The evidence.
    """
    by_name: dict[str, Beaten] = {}
    for slower, faster in permutations(times, 2):
        ratio = times[slower] / times[faster]
        margin = margin_between(amounts[slower], amounts[faster], margins) if ratio > 1 else None
        if margin is not None and ratio > margin and ratio > by_name.get(slower, (None, 0.0))[1]:
            by_name[slower] = Beaten(faster, ratio, margin)
    return by_name


@cache
def read_sweeps() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with PUBLIC_SWEEPS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def public_margins() -> dict[tuple[str, bool], Margin]:
    """Return the margins of all sweeps."""
    return fit_margins(read_sweeps())


def evidence_lines(margins: Margins) -> Iterator[str]:
    """Yield a line for each kind: the planned ratio up to which combinations stay, and its evidence."""
    for kind in KINDS:
        lines = [
            f"{m.ratio:.2f} times with {words} of it ({counted(m.sweeps, 'public sweep')} of "
            f"{counted(m.sources, 'source')})"
            for more, words in ((True, "more"), (False, "less"))
            if (m := margins.get((kind, more))) is not None
        ]
        yield f"  {kind}: {', '.join(lines) or 'no evidence, nothing is dropped by it'}"
