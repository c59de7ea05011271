"""Compares two result sets: a ratio per cell, a mean per strategy, and what changed between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd

from stratbench.analysis.records.collect import UNMEASURED
from stratbench.analysis.records.groups import Group, findings_by_group, rows_by_group
from stratbench.analysis.records.score import Score, score_of
from stratbench.analysis.tables.summary import describe_outcome, outcome_kinds
from stratbench.analysis.tables.usable import UsableGroups
from stratbench.cell.text.words import counted
from stratbench.sets.comparing.matching import (
    WORK,
    Difference,
    Match,
    differences,
    groups_with_data,
    matches,
    not_stated,
    together,
    why_not_comparable,
)
from stratbench.sets.reading import ResultSet
from stratbench.statistics.unpaired import (
    Estimate,
    difference_of_scores,
    mean_over_models,
    ratio_of_times,
)


@dataclass(frozen=True)
class ComparedCell:
    """A kind of cell in two sets. Times and scores are by repeat, without those that the audit rejects."""

    match: Match
    first_times: tuple[float, ...]
    other_times: tuple[float, ...]
    first_scores: tuple[float, ...]
    other_scores: tuple[float, ...]
    #: Median of peak memory in bytes; None if not known, or not measured alike.
    first_memory: float | None
    other_memory: float | None
    #: The outcomes of repeats that ran and did not end well; empty if all ended well.
    first_outcome: str
    other_outcome: str
    score: Score
    #: The reason why there is no ratio; empty if there is one.
    why_not: str
    #: Fields of the work that are not known to be equal.
    caution: str
    #: The audit's rules that doubt one of the times.
    doubts: tuple[str, ...] = ()
    #: Whether the work itself differs, whatever was measured.
    other_work: bool = False
    #: Whether a repeat of the other set finished, whatever the audit says of it.
    other_finished: bool = True

    @property
    def group(self) -> Group:
        """The cell's coordinates in the first set."""
        return self.match.first

    @cached_property
    def time(self) -> Estimate | None:
        """Training time in the other set, divided by that in the first; None if there is no ratio."""
        return None if self.why_not else ratio_of_times(self.other_times, self.first_times)

    @property
    def memory(self) -> float | None:
        """Peak memory in the other set, divided by that in the first; None if there is no ratio.

        It hardly scatters, so it has no interval.
        """
        if self.why_not or not self.first_memory or not self.other_memory:
            return None
        return self.other_memory / self.first_memory

    @cached_property
    def score_change(self) -> Estimate | None:
        """The score in the other set minus that in the first, as shown; None without a ratio or a score."""
        if self.why_not or not self.first_scores or not self.other_scores:
            return None
        return difference_of_scores(self.other_scores, self.first_scores)


@dataclass(frozen=True)
class StrategyMean:
    """A strategy's geometric mean ratio: over cells within a model, then over models."""

    strategy: str
    #: None: over all worker counts.
    gpus: int | None
    time: Estimate
    models: int
    cells: int


@dataclass(frozen=True)
class RankChange:
    """Two strategies that changed places on one model and worker count."""

    experiment: str
    model: str
    gpus: int
    #: The faster one in the first set, and in the other.
    was_first: str
    is_first: str
    #: Time of `is_first` divided by that of `was_first`, in each set.
    before: Estimate
    after: Estimate

    @property
    def is_clear(self) -> bool:
        """Whether both intervals exclude equality; a change measured once may be chance."""
        before, after = self.before, self.after
        return bool(before.low and after.high) and before.low > 1 > after.high


@dataclass(frozen=True, eq=False)
class Comparison:
    """The comparison of two sets: cells, differences, strategies, changed ranks."""

    first: ResultSet
    other: ResultSet
    cells: tuple[ComparedCell, ...]
    #: Differences in the place of training; differences in the work, because of which cells have no ratio;
    #: and what only one set states of the work.
    place: tuple[Difference, ...]
    work: tuple[Difference, ...]
    unknown: tuple[Difference, ...]
    strategies: tuple[StrategyMean, ...]
    rank_changes: tuple[RankChange, ...]
    #: Kinds of cells that only one of the sets has.
    only_first: int
    only_other: int
    #: Groups of the first set with a time, of which the other has no record.
    gone: tuple[Group, ...]

    @cached_property
    def with_ratio(self) -> list[ComparedCell]:
        return [cell for cell in self.cells if not cell.why_not]

    @cached_property
    def without_ratio(self) -> list[ComparedCell]:
        return [cell for cell in self.cells if cell.why_not]


def compare(first: ResultSet, other: ResultSet) -> Comparison:
    """Compares the other set with the first."""
    found = matches(first, other)
    groups = [UsableGroups(one.cells, one.findings.to_dict("records")) for one in (first, other)]
    outcomes = [outcomes_of(one) for one in (first, other)]
    doubts = [doubts_on_times(one) for one in (first, other)]
    cells, place, work, unknown = [], [], [], []
    scored = {name: score_of(rows) for name, rows in first.cells.groupby("experiment")}
    for match in found:
        differing = list(differences(match, first, other))
        reasons = why_not_comparable(differing, first.is_published or other.is_published)
        cells.append(
            compared_cell(
                match, groups, outcomes, differing, reasons, scored[match.first.experiment]
            )
        )
        doubted = (*doubts[0][match.first], *doubts[1][match.other])
        cells[-1] = replace(cells[-1], doubts=tuple(dict.fromkeys(doubted)))
        work += reasons
        unknown += [d for d in not_stated(differing) if d not in reasons]
        place += [d for d in differing if d.kind not in WORK.values()]
    compared = tuple(cells)
    with_ratio = [cell for cell in compared if not cell.why_not]
    n_first, n_other = (len(set(usable.groups)) for usable in groups)
    return Comparison(
        first,
        other,
        compared,
        tuple(together(iter(place))),
        tuple(together(iter(work))),
        tuple(together(iter(unknown))),
        tuple(means_by_strategy(with_ratio)),
        tuple(rank_changes(with_ratio)),
        n_first - sum(match.first in groups[0].groups for match in found),
        n_other - sum(match.other in groups[1].groups for match in found),
        tuple(
            group
            for group in groups[0].groups
            if groups[0].values(group, "train_time_s", "time")
            and group not in {match.first for match in found}
        ),
    )


def doubts_on_times(found: ResultSet) -> dict[Group, list[str]]:
    """The audit's rules that call times doubtful, by group of cells."""
    told = [
        finding
        for finding in found.findings.to_dict("records")
        if finding["severity"] == "doubtful" and finding["affects"] in ("time", "all")
    ]
    return {
        group: list(dict.fromkeys(finding["rule"] for finding in on_it))
        for group, on_it in findings_by_group(told, groups_with_data(found))
    }


def outcomes_of(found: ResultSet) -> dict[Group, str]:
    """The outcomes of cells that ran and did not end well, by their group."""
    bad = found.cells[~found.cells["status"].isin(["ok", *UNMEASURED])]
    return {
        group: outcome_kinds(describe_outcome(rows)) for group, rows in rows_by_group(bad).items()
    }


def compared_cell(
    match: Match,
    groups: list[UsableGroups],
    outcomes: list[dict[Group, str]],
    differing: list[Difference],
    reasons: list[Difference],
    score: Score,
) -> ComparedCell:
    """A match with the measurements of both sets, and with the reason if there is no ratio."""
    sides = (match.first, match.other)
    times, scores, peaks = (
        [
            tuple(usable.values(group, column, concerns).values())
            for usable, group in zip(groups, sides, strict=True)
        ]
        for column, concerns in (
            ("train_time_s", "time"),
            ("score_final", "score"),
            ("peak_memory_bytes", "memory"),
        )
    )
    outcome = [told.get(group, "") for told, group in zip(outcomes, sides, strict=True)]
    why = "; ".join(f"{named(d.path)} {d.first} against {d.other}" for d in reasons)
    if not why and not all(times):
        told = [
            text or ("measured" if values else "rejected by the audit")
            for text, values in zip(outcome, times, strict=True)
        ]
        why = f"{told[0]} against {told[1]}"
    methods = any(d.path == "memory.method" for d in differing)
    on_cpu_and_gpu = any(d.path == "provenance.device" for d in differing)
    memory = [
        float(np.median(values)) if values and not (methods or on_cpu_and_gpu) else None
        for values in peaks
    ]
    unknown = [d for d in not_stated(differing) if d not in reasons]
    return ComparedCell(
        match,
        *times,
        *(tuple(score.factor * value for value in values) for values in scores),
        *memory,
        *outcome,
        score=score,
        why_not=why,
        caution="; ".join(f"{named(d.path)} {d.first} against {d.other}" for d in unknown),
        other_work=bool(reasons),
        other_finished=match.other in groups[1].groups,
    )


def named(path: str) -> str:
    """A path of a record for a text: without the part that all paths of its kind share."""
    parts = path.split(".")
    return ".".join(parts[1:] if parts[0] in ("settings", "worker", "batch") else parts)


def means_by_strategy(cells: list[ComparedCell]) -> Iterator[StrategyMean]:
    """The mean of each strategy over all worker counts and, if there are several, at each of them."""
    logs: dict[str, list[tuple[int, str, float]]] = defaultdict(list)
    for cell in cells:
        g = cell.group
        logs[g.strategy].append((g.gpus, g.model, math.log(cell.time.value)))
    for strategy, found in logs.items():
        counts = sorted({gpus for gpus, _, _ in found})
        for gpus in (None, *(counts if len(counts) > 1 else ())):
            here = [(model, log) for n, model, log in found if gpus in (None, n)]
            by_model = pd.DataFrame(here, columns=["model", "log"]).groupby("model")["log"].mean()
            mean = mean_over_models(by_model.tolist())
            yield StrategyMean(strategy, gpus, mean, len(by_model), len(here))


def rank_changes(cells: list[ComparedCell]) -> Iterator[RankChange]:
    """Pairs of strategies in which the faster one is not the same in both sets."""
    bouts: dict[tuple[str, str, str, int], list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        g = cell.group
        bouts[(g.experiment, cell.match.other.experiment, g.model, g.gpus)].append(cell)
    for (experiment, _, model, gpus), bout in bouts.items():
        for a, b in combinations(bout, 2):
            before = np.mean(np.log(b.first_times)) - np.mean(np.log(a.first_times))
            after = np.mean(np.log(b.other_times)) - np.mean(np.log(a.other_times))
            if before * after < 0:
                old, new = (a, b) if before > 0 else (b, a)
                yield RankChange(
                    *(experiment, model, gpus, old.group.strategy, new.group.strategy),
                    ratio_of_times(new.first_times, old.first_times),
                    ratio_of_times(new.other_times, old.other_times),
                )


def changed_outcomes(cells: tuple[ComparedCell, ...]) -> list[ComparedCell]:
    """Cells that ended differently in the other set: out of memory, too slow, diverged."""
    return [cell for cell in cells if cell.first_outcome != cell.other_outcome]


def answer_first(found: Comparison) -> Iterator[str]:
    """What came of the comparison: copied times, and the least and the largest mean ratio."""
    a, b, n = found.first.name, found.other.name, len(found.with_ratio)
    same = sum(cell.first_times == cell.other_times for cell in found.with_ratio)
    if same:
        copied = f"{same} of {n} are equal to the last digit, so they were not measured twice"
        yield f"{b} holds {a}'s times: {copied}."
    means = sorted((m for m in found.strategies if m.gpus is None), key=lambda m: m.time.value)
    if not means or same == n:
        return
    least, most = means[0], means[-1]
    text = f"Training in {b} takes {least.time.value:.2f} times as long as in {a} with {least.strategy}"
    if most is not least:
        text += f", {most.time.value:.2f} times with {most.strategy}"
        text += f", and {counted(len(means) - 2, 'other')} between them" if len(means) > 2 else ""
    yield f"{text}."


def headline_of(found: Comparison) -> str:
    """Sentences on what came out, on what differs between the sets, and on what may explain a ratio."""
    a, b = found.first.name, found.other.name
    if not found.cells:
        return (
            f"{a} and {b} share no cell of equal strategy, model, data set and number of workers."
        )
    kinds = list(dict.fromkeys(d.kind for d in found.place if d.kind not in ("hosts", "seeds")))
    told = " ".join(answer_first(found))
    if not kinds:
        told += (
            f" Of hardware, versions and flags nothing that both state differs between {a} and {b}."
        )
    elif len(kinds) == 1:
        [kind] = kinds
        paths = [named(d.path) for d in found.place if d.kind == kind]
        listed = ", ".join(dict.fromkeys(paths[:4]))
        told += f" Between {a} and {b} one thing differs that the records state: {kind} ({listed})."
    else:
        told += (
            f" Between {a} and {b} differ: {', '.join(kinds)}. "
            "No ratio can be put down to one of them alone."
        )
    if found.unknown:
        listed = ", ".join(dict.fromkeys(named(d.path) for d in found.unknown))
        told += f" Only one of them states: {listed}."
    doubted = [cell for cell in found.with_ratio if cell.doubts]
    if doubted:
        rules = ", ".join(dict.fromkeys(rule for cell in doubted for rule in cell.doubts))
        told += (
            f" The audit doubts times of {len(doubted)} of {len(found.with_ratio)} ratios: {rules}."
        )
    for name, alone in ((a, found.only_first), (b, found.only_other)):
        if alone:
            told += f" {counted(alone, 'kind')} of cells finished in {name} alone."
    if found.without_ratio:
        names = ", ".join(dict.fromkeys(cell.group.strategy for cell in found.without_ratio))
        told += (
            f" {len(found.without_ratio)} of {len(found.cells)} shared kinds of cells have no ratio: "
            f"of {names}."
        )
    return told.strip()
