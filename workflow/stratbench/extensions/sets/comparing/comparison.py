"""Compares two result sets: a ratio per cell, a mean per strategy, and changed conditions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd

from stratbench.analysis.records.collect import UNMEASURED
from stratbench.analysis.records.groups import Group, Repeats, rows_by_group
from stratbench.analysis.records.score import Score, score_of
from stratbench.analysis.tables.summary import describe_outcome, doubts_by_group, outcome_kinds
from stratbench.cell.text.words import counted
from stratbench.extensions.sets.comparing.matching import (
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
from stratbench.extensions.sets.reading import ResultSet
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.moderated import ALPHA
from stratbench.statistics.unpaired import (
    difference_of_scores,
    mean_of_logs,
    ratio_of_times,
    slowdown_over_cells,
)

#: Fields that say how memory was measured.
MEMORY_METHOD = ("memory.method", "provenance.device")


@dataclass(frozen=True)
class Side:
    """A kind of cell in one of two sets.

    Times (s) and scores are those of its repeats, without those that the audit rejects.
    """

    times: tuple[float, ...]
    #: As shown.
    scores: tuple[float, ...] = ()
    #: Median of peak memory in bytes; None if not known.
    memory: float | None = None
    #: The outcomes of repeats that ran and did not end well; empty if all ended well.
    outcome: str = ""
    #: Whether a repeat finished, with or without findings of the audit.
    finished: bool = True
    #: The audit's rules with findings on the times.
    doubts: tuple[str, ...] = ()

    @property
    def time_outcome(self) -> str:
        """Text on the outcome of its training times."""
        return self.outcome or ("measured" if self.times else "rejected by the audit")


@dataclass(frozen=True)
class ComparedCell:
    """A kind of cell in two sets."""

    match: Match
    first: Side
    other: Side
    score: Score = field(default_factory=Score)
    #: Differences in the work, because of which there is no ratio; fields of the work that only one set has;
    #: and differences in the place of training.
    work: Sequence[Difference] = ()
    unknown: Sequence[Difference] = ()
    place: Sequence[Difference] = ()

    @property
    def group(self) -> Group:
        """The cell's coordinates in the first set."""
        return self.match.first

    @property
    def in_words(self) -> str:
        """The cell's coordinates for a sentence."""
        g = self.group
        return f"{g.strategy} on {g.gpus}, {g.model} ({g.experiment})"

    @property
    def doubts(self) -> tuple[str, ...]:
        """The audit's rules with findings on the times of either set."""
        return tuple(dict.fromkeys((*self.first.doubts, *self.other.doubts)))

    @cached_property
    def why_not(self) -> str:
        """The reason why there is no ratio, or empty."""
        if self.work or (self.first.times and self.other.times):
            return against_each_other(self.work)
        return f"{self.first.time_outcome} against {self.other.time_outcome}"

    @cached_property
    def time(self) -> IntervalEstimate | None:
        """Training time in the other set, divided by that in the first.

        None if there is no ratio.
        """
        return None if self.why_not else ratio_of_times(self.other.times, self.first.times)

    @property
    def memory(self) -> float | None:
        """Peak memory in the other set, divided by that in the first.

        None if there is no ratio.

        It hardly scatters, so it has no interval.
        """
        same_method = not any(d.path in MEMORY_METHOD for d in self.place)
        known = self.first.memory and self.other.memory and same_method
        return self.other.memory / self.first.memory if known and not self.why_not else None

    @cached_property
    def score_change(self) -> IntervalEstimate | None:
        """The score in the other set minus that in the first, as shown.

        None without a ratio or a score.
        """
        if self.why_not or not self.first.scores or not self.other.scores:
            return None
        return difference_of_scores(self.other.scores, self.first.scores)


@dataclass(frozen=True)
class StrategyMean:
    """A strategy's geometric mean ratio: over cells within a model, then over models."""

    strategy: str
    #: None: over all worker counts.
    gpus: int | None
    #: With the interval over models; of one model with that of the repeats.
    time: IntervalEstimate
    models: int
    cells: int
    #: Whether the noise of repeats excludes that training takes as long in both sets; None if unknown.
    is_apart: bool | None

    @property
    def workers(self) -> str:
        """The number of workers, for a table."""
        return "all" if self.gpus is None else str(self.gpus)


@dataclass(frozen=True)
class RankChange:
    """Two strategies whose order changed on one model and worker count."""

    experiment: str
    model: str
    gpus: int
    #: The faster one in the first set, and in the other.
    was_first: str
    is_first: str
    #: Time of `is_first` divided by that of `was_first`, in each set.
    before: IntervalEstimate
    after: IntervalEstimate

    @property
    def is_clear(self) -> bool:
        """Whether both intervals exclude equality; otherwise, the change may be chance."""
        return self.before.excludes(1) and self.after.excludes(1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The comparison of two sets: cells, differences, strategies, changed ranks."""

    first: ResultSet
    other: ResultSet
    cells: tuple[ComparedCell, ...]
    #: The differences of all cells, as a cell has them.
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

    @property
    def by_effect(self) -> dict[str, tuple[Difference, ...]]:
        """The differences by what they mean, the most serious first."""
        return {
            "no ratio": self.work,
            "not known to be equal": self.unknown,
            "may explain ratios": self.place,
        }

    @cached_property
    def with_ratio(self) -> list[ComparedCell]:
        return [cell for cell in self.cells if not cell.why_not]

    @cached_property
    def without_ratio(self) -> list[ComparedCell]:
        return [cell for cell in self.cells if cell.why_not]


class Measurements:
    """Measurements of a set, by group of repeats."""

    def __init__(self, result_set: ResultSet) -> None:
        findings = result_set.findings.to_dict("records")
        self.repeats = Repeats(result_set.cells, findings)
        bad = result_set.cells[~result_set.cells["status"].isin(["ok", *UNMEASURED])]
        #: The cells that ran and did not end well.
        self.bad = rows_by_group(bad)
        doubtful = [finding for finding in findings if finding["severity"] == "warning"]
        self.doubts = doubts_by_group(doubtful, groups_with_data(result_set))

    def side(self, group: Group, score: Score) -> Side:
        """Return a group's measurements, for comparison with those of another set."""
        times, scores = (
            tuple(self.repeats.values(group, column, concerns).values())
            for column, concerns in (("train_time_s", "time"), ("score_final", "score"))
        )
        bad = self.bad.get(group)
        return Side(
            times,
            tuple(score.factor * value for value in scores),
            self.repeats.median(group, "peak_memory_bytes", "memory"),
            "" if bad is None else outcome_kinds(describe_outcome(bad)),
            group in self.repeats.ok,
            tuple(self.doubts.get(("time", *group), ())),
        )


def compare(first: ResultSet, other: ResultSet) -> Comparison:
    """Compares the other set with the first."""
    matched = matches(first, other)
    measured = Measurements(first), Measurements(other)
    scored = {name: score_of(rows) for name, rows in first.cells.groupby("experiment")}
    cells = []
    for match in matched:
        score = scored[match.first.experiment]
        differing = list(differences(match, first, other))
        work = why_not_comparable(differing, first.is_published or other.is_published)
        cells.append(
            ComparedCell(
                match,
                measured[0].side(match.first, score),
                measured[1].side(match.other, score),
                score,
                work=work,
                unknown=[d for d in not_stated(differing) if d not in work],
                place=[d for d in differing if d.kind not in WORK.values()],
            )
        )
    with_ratio = [cell for cell in cells if not cell.why_not]
    in_first, in_other = (one.repeats.ok for one in measured)
    alone = [group for group in in_first if group not in {match.first for match in matched}]
    return Comparison(
        first,
        other,
        tuple(cells),
        place=together(d for cell in cells for d in cell.place),
        work=together(d for cell in cells for d in cell.work),
        unknown=together(d for cell in cells for d in cell.unknown),
        strategies=tuple(means_by_strategy(with_ratio)),
        rank_changes=tuple(rank_changes(with_ratio)),
        only_first=len(alone),
        only_other=len(in_other.keys() - {match.other for match in matched}),
        gone=tuple(g for g in alone if measured[0].repeats.values(g, "train_time_s", "time")),
    )


def against_each_other(differences: list[Difference]) -> str:
    """Differences in words: `lr 0.01 against 0.5; epochs 10 against not stated`."""
    return "; ".join(f"{named(d.path)} {d.first} against {d.other}" for d in differences)


def named(path: str) -> str:
    """Return a path of a record for a text, without the common prefix of its kind."""
    parts = path.split(".")
    return ".".join(parts[1:] if parts[0] in ("settings", "worker", "batch") else parts)


def means_by_strategy(cells: list[ComparedCell]) -> Iterator[StrategyMean]:
    """Yield the mean of each strategy over all worker counts, and at each of several counts."""
    by_strategy: dict[str, list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        by_strategy[cell.group.strategy].append(cell)
    for strategy, ratios in by_strategy.items():
        counts = sorted({cell.group.gpus for cell in ratios})
        for gpus in (None, *(counts if len(counts) > 1 else ())):
            here = [cell for cell in ratios if gpus in (None, cell.group.gpus)]
            rows = [(cell.group.model, math.log(cell.time.value)) for cell in here]
            by_model = pd.DataFrame(rows, columns=["model", "log"]).groupby("model")["log"].mean()
            mean = mean_of_logs(by_model.tolist())
            pairs = [(cell.other.times, cell.first.times) for cell in here]
            # All strategies together show a false difference in ALPHA of all comparisons at most.
            shared = slowdown_over_cells(pairs, ALPHA / 2 / len(by_strategy))
            apart = None if shared.low is None else shared.excludes(0.0)
            if len(by_model) == 1:
                ends = slowdown_over_cells(pairs, ALPHA / 2)[1:]
                mean = IntervalEstimate(
                    mean.value, *(end if end is None else 1 + end for end in ends)
                )
            yield StrategyMean(strategy, gpus, mean, len(by_model), len(here), apart)


def rank_changes(cells: list[ComparedCell]) -> Iterator[RankChange]:
    """Yield pairs of strategies whose order differs between both sets."""
    comparisons: dict[tuple[str, str, str, int], list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        g = cell.group
        comparisons[(g.experiment, cell.match.other.experiment, g.model, g.gpus)].append(cell)
    for (experiment, _, model, gpus), comparison in comparisons.items():
        for a, b in combinations(comparison, 2):
            before = np.mean(np.log(b.first.times)) - np.mean(np.log(a.first.times))
            after = np.mean(np.log(b.other.times)) - np.mean(np.log(a.other.times))
            if before * after < 0:
                old, new = (a, b) if before > 0 else (b, a)
                yield RankChange(
                    *(experiment, model, gpus, old.group.strategy, new.group.strategy),
                    ratio_of_times(new.first.times, old.first.times),
                    ratio_of_times(new.other.times, old.other.times),
                )


def answer_first(comparison: Comparison) -> Iterator[str]:
    """Yield the main results: copied times, and the minimum and maximum mean ratio beyond noise."""
    a, b, n = comparison.first.name, comparison.other.name, len(comparison.with_ratio)
    same = sum(cell.first.times == cell.other.times for cell in comparison.with_ratio)
    if same:
        copied = f"{same} of {n} are equal to the last digit, so they were not measured twice"
        yield f"{b} holds {a}'s times: {copied}."
    means = sorted((m for m in comparison.strategies if m.gpus is None), key=lambda m: m.time.value)
    if not means or same == n:
        return
    apart = [mean for mean in means if mean.is_apart]
    if not apart:
        ends = dict.fromkeys(f"{mean.time.value:.2f}" for mean in (means[0], means[-1]))
        known = any(mean.is_apart is not None for mean in means)
        reason = (
            "and the scatter of the repeats tells none of it apart from 1"
            if known
            else "by single repeats, whose scatter is not known"
        )
        yield f"Training in {b} takes {' to '.join(ends)} times as long as in {a} by strategy, {reason}."
        return
    similar = len(means) - len(apart)
    means, least, most = apart, apart[0], apart[-1]
    text = f"Training in {b} takes {least.time.value:.2f} times as long as in {a} with {least.strategy}"
    if most is not least:
        text += f", {most.time.value:.2f} times with {most.strategy}"
        text += f", and {counted(len(means) - 2, 'other')} between them" if len(means) > 2 else ""
    if similar:
        text += f"; {counted(similar, 'other')} cannot be told apart from 1"
    yield f"{text}."


def headline_of(comparison: Comparison) -> str:
    """Return sentences on the results, on differences between the sets, and on explanations."""
    a, b = comparison.first.name, comparison.other.name
    if not comparison.cells:
        return (
            f"{a} and {b} share no cell of equal strategy, model, data set and number of workers."
        )
    kinds = list(
        dict.fromkeys(d.kind for d in comparison.place if d.kind not in ("hosts", "seeds"))
    )
    text = " ".join(answer_first(comparison))
    if not kinds:
        text += (
            f" Of hardware, versions and flags nothing that both state differs between {a} and {b}."
        )
    elif len(kinds) == 1:
        [kind] = kinds
        paths = [named(d.path) for d in comparison.place if d.kind == kind]
        listed = ", ".join(dict.fromkeys(paths[:4]))
        text += f" Between {a} and {b} one thing differs that the records state: {kind} ({listed})."
    else:
        text += (
            f" Between {a} and {b} differ: {', '.join(kinds)}. "
            "No ratio can be put down to one of them alone."
        )
    if comparison.unknown:
        listed = ", ".join(dict.fromkeys(named(d.path) for d in comparison.unknown))
        text += f" Only one of them states: {listed}."
    doubted = [cell for cell in comparison.with_ratio if cell.doubts]
    if doubted:
        rules = ", ".join(dict.fromkeys(rule for cell in doubted for rule in cell.doubts))
        text += f" The audit doubts times of {len(doubted)} of {len(comparison.with_ratio)} ratios: {rules}."
    for name, alone in ((a, comparison.only_first), (b, comparison.only_other)):
        if alone:
            text += f" {counted(alone, 'kind')} of cells finished in {name} alone."
    if comparison.without_ratio:
        names = ", ".join(dict.fromkeys(cell.group.strategy for cell in comparison.without_ratio))
        text += (
            f" {len(comparison.without_ratio)} of {len(comparison.cells)} shared kinds of cells have no "
            f"ratio: of {names}."
        )
    return text.strip()
