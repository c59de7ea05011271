"""Measures how wrong the planned time ratio of two configurations can be.

A public sweep is a published measurement of one model on some GPUs, in several configurations. The sweeps are
in workflow/reference/public_sweeps.csv. Each row names its source, and has the time that the plan predicts.
benchmarks/prediction/public_sweeps.py makes this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import permutations
from typing import NamedTuple

from stratbench.cell.files import read_csv_rows
from stratbench.cell.installation import REFERENCE
from stratbench.cell.text.words import format_count

PUBLIC_SWEEPS = REFERENCE / "public_sweeps.csv"
#: Kinds of differences between two configurations. Each has an amount, in this order: samples per
#: micro-batch, share of the forward pass that is computed again, ZeRO stage (0 to 3), degree of tensor
#: parallelism, number of pipeline stages. The amount of the last two is 1 if they are used, else 0.
KINDS = ("micro-batch", "checkpointing", "sharding", "tensor", "pipeline", "compile", "offload")
#: Approximate share of the forward pass that selective activation checkpointing computes again.
SELECTIVE_SHARE = 0.4
#: Probability that the plan's error in a new sweep is larger than the margin.
ERROR_PROBABILITY = 0.05
#: Fewest sweeps, and fewest sources of these sweeps, from which a margin is computed.
MIN_SWEEPS, MIN_SOURCES = 3, 2
#: Two measured times count as equal if their ratio is smaller than this.
MIN_DIFFERENT_TIME_RATIO = 1.03
#: Smallest margin, because few sweeps do not show rare errors. With 1.3, fewer simulated studies end near the
#: fastest combination (benchmarks/statistics/tune.py).
MIN_MARGIN = 1.5

#: Amount that a configuration has of each kind of difference, such as 2 for `tensor`.
Amounts = Mapping[str, float]


class Margin(NamedTuple):
    """Planned time ratio up to which the plan may confuse which configuration is faster.

    `sweeps` and `sources` are the numbers of sweeps and of sources from which the ratio was computed.
    """

    ratio: float
    sweeps: int
    sources: int


#: Margins by kind of difference, and by whether the configuration with the longer planned time has the larger
#: amount of this kind.
Margins = Mapping[tuple[str, bool], Margin]


class DropReason(NamedTuple):
    """Reason to drop a configuration: its planned time is too long relative to another."""

    #: Name of the faster configuration.
    faster: str
    #: Planned time of the dropped configuration, divided by that of the faster one.
    ratio: float
    #: Largest ratio at which the configuration would not be dropped.
    margin: float


def fit_margins_to_sweeps(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, bool], Margin]:
    """Return the margin of each kind of difference that is in enough sweeps.

    The margin follows from pairs of configurations that differ in one kind only, and whose measured order is
    the reverse of the planned order. It is the upper prediction bound of their planned ratios, over sweeps.

    Args:
        rows: Rows of the table of public sweeps.
    """
    worst: dict[tuple[str, bool], dict[str, float]] = {}
    sources: dict[tuple[str, bool], set[str]] = {}
    for sweep in group_rows_by_sweep(row for row in rows if row["measured"]).values():
        for slower, faster in permutations(sweep, 2):
            kinds = [kind for kind in KINDS if float(slower[kind]) != float(faster[kind])]
            planned = float(slower["planned"]) / float(faster["planned"])
            if len(kinds) != 1 or planned <= 1:
                continue
            key = kinds[0], float(slower[kinds[0]]) > float(faster[kinds[0]])
            is_wrong = float(slower["measured"]) * MIN_DIFFERENT_TIME_RATIO < float(
                faster["measured"]
            )
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


def compute_upper_prediction_bound(planned_ratios: list[float]) -> float:
    """Return the bound that a new value exceeds with probability ERROR_PROBABILITY.

    With few values, the bound is the largest value.
    """
    rank = math.ceil((1 - ERROR_PROBABILITY) * (len(planned_ratios) + 1))
    return sorted(planned_ratios)[min(rank, len(planned_ratios)) - 1]


def group_rows_by_sweep(
    sweep_rows: Iterable[Mapping[str, str]],
) -> dict[str, list[Mapping[str, str]]]:
    """Return the rows of each public sweep, by name of the sweep."""
    sweeps: dict[str, list[Mapping[str, str]]] = {}
    for row in sweep_rows:
        sweeps.setdefault(row["sweep"], []).append(row)
    return sweeps


def compute_margin_between(slower: Amounts, faster: Amounts, margins: Margins) -> float | None:
    """Return the planned time ratio above which the slower of two configurations is excluded.

    If the configurations differ in several kinds, the ratio is the product of these kinds' margins.

    Args:
        slower: Amounts of the configuration with the longer planned time.
        faster: Amounts of the other configuration.
        margins: Margins by kind of difference.

    Returns:
        The ratio, or None if a kind has no margin.
    """
    keys = [(kind, slower[kind] > faster[kind]) for kind in KINDS if slower[kind] != faster[kind]]
    if not keys or any(key not in margins for key in keys):
        return None
    return math.prod(margins[key].ratio for key in keys)


def find_configurations_to_drop(
    planned_times: Mapping[str, float], amounts: Mapping[str, Amounts], margins: Margins
) -> dict[str, DropReason]:
    """Return each configuration whose planned time is too long relative to another, with the reason.

    Args:
        planned_times: Planned time of each configuration, by name.
        amounts: Amounts of each configuration, by name.
        margins: Margins by kind of difference.
    """
    by_name: dict[str, DropReason] = {}
    for slower, faster in permutations(planned_times, 2):
        ratio = planned_times[slower] / planned_times[faster]
        margin = (
            compute_margin_between(amounts[slower], amounts[faster], margins) if ratio > 1 else None
        )
        if margin is not None and ratio > margin and ratio > by_name.get(slower, (None, 0.0))[1]:
            by_name[slower] = DropReason(faster, ratio, margin)
    return by_name


@cache
def read_public_sweeps() -> list[dict[str, str]]:
    """Return the rows of the table of public sweeps."""
    return read_csv_rows(PUBLIC_SWEEPS)


@cache
def fit_public_margins() -> dict[tuple[str, bool], Margin]:
    """Return the margins from all public sweeps, by kind of difference."""
    return fit_margins_to_sweeps(read_public_sweeps())


def describe_margins(margins: Margins) -> Iterator[str]:
    """Yield a line per kind of difference, with its margins and their evidence."""
    for kind in KINDS:
        lines = [
            f"factor {m.ratio:.2f} if the slower one has the {words} value "
            f"({format_count(m.sweeps, 'public sweep')} of {format_count(m.sources, 'source')})"
            for more, words in ((True, "larger"), (False, "smaller"))
            if (m := margins.get((kind, more))) is not None
        ]
        yield f"  {kind}: {', '.join(lines) or 'too few public sweeps, so that it drops no combination'}"
