"""Compares two result sets: time ratios of cells, mean ratios of strategies, and different conditions."""

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
from stratbench.analysis.records.groups import Group, Repeats, map_rows_by_group
from stratbench.analysis.records.score import Score, read_score
from stratbench.analysis.tables.summary import (
    describe_outcomes_of_cells,
    find_rule_severities_of_each_group,
    remove_outcome_counts,
)
from stratbench.cell.text.words import format_count
from stratbench.extensions.sets.comparing.matching import (
    WORK_DIFFERENCES,
    Difference,
    Match,
    iter_differences,
    map_groups_to_data_sets,
    match_cells,
    merge_equal_differences,
    select_differences_preventing_ratio,
    select_differences_stated_by_one_set,
)
from stratbench.extensions.sets.reading import ResultSet
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.moderated import ALPHA
from stratbench.statistics.unpaired import (
    compute_geometric_mean_with_interval,
    compute_mean_slowdown,
    compute_score_difference,
    compute_time_ratio,
)

#: Paths of record fields that say how memory was measured.
MEMORY_METHOD = ("memory.method", "provenance.device")


@dataclass(frozen=True)
class CellMeasurements:
    """Measurements of a cell's repeats in one set. Repeats that the audit rejects are left out."""

    #: Training times of the repeats in seconds.
    train_times_s: tuple[float, ...]
    #: Scores of the repeats, in the unit of the report, such as percent.
    scores: tuple[float, ...] = ()
    #: Median over repeats of the peak memory in bytes, or None if unknown.
    memory_bytes: float | None = None
    #: Outcomes of the failed repeats as text; empty if no repeat failed.
    failure_text: str = ""
    #: Whether at least one repeat finished, even if the audit rejects it.
    has_finished_repeat: bool = True
    #: Names of the audit's rules whose findings make the training times doubtful.
    doubtful_rules: tuple[str, ...] = ()

    @property
    def time_availability_text(self) -> str:
        """Text on the training times: `measured`, or the reason why there are none."""
        return self.failure_text or ("measured" if self.train_times_s else "rejected by the audit")


@dataclass(frozen=True)
class ComparedCell:
    """A cell that is in both sets, with the measurements of its repeats in each set."""

    match: Match
    first_measurements: CellMeasurements
    other_measurements: CellMeasurements
    score: Score = field(default_factory=Score)
    #: Differences in the trained work, such as the batch size, with which a time ratio has no meaning.
    work_differences: Sequence[Difference] = ()
    #: Fields on the trained work that only one of the two sets has.
    unstated_differences: Sequence[Difference] = ()
    #: Differences in hardware, software and flags, which may explain a time ratio.
    machine_differences: Sequence[Difference] = ()

    @property
    def group(self) -> Group:
        """Coordinates of the cell in the first set, without its repeats."""
        return self.match.first_group

    @property
    def coordinates_text(self) -> str:
        """Strategy, worker count, model and experiment as text, such as `ddp on 4, vgg16 (main)`."""
        g = self.group
        return f"{g.strategy} on {g.gpus}, {g.model} ({g.experiment})"

    @property
    def doubtful_rules(self) -> tuple[str, ...]:
        """Names of the audit's rules that doubt the training times in one of the sets."""
        return tuple(
            dict.fromkeys(
                (*self.first_measurements.doubtful_rules, *self.other_measurements.doubtful_rules)
            )
        )

    @cached_property
    def no_ratio_reason(self) -> str:
        """Reason for the missing time ratio of the cell. Empty if the cell has a time ratio."""
        if self.work_differences or (
            self.first_measurements.train_times_s and self.other_measurements.train_times_s
        ):
            return describe_differences(self.work_differences)
        first, other = self.first_measurements, self.other_measurements
        return f"{first.time_availability_text} in one set, {other.time_availability_text} in the other"

    @cached_property
    def time_ratio(self) -> IntervalEstimate | None:
        """Training time in the other set, divided by that in the first set.

        The ratio is None if the cells are not comparable.
        """
        return (
            None
            if self.no_ratio_reason
            else compute_time_ratio(
                self.other_measurements.train_times_s, self.first_measurements.train_times_s
            )
        )

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory in the other set, divided by that in the first set.

        The ratio is None if the cells are not comparable. It has no interval, because peak memory hardly
        differs between repeats.
        """
        same_method = not any(d.field_path in MEMORY_METHOD for d in self.machine_differences)
        known = (
            self.first_measurements.memory_bytes
            and self.other_measurements.memory_bytes
            and same_method
        )
        return (
            self.other_measurements.memory_bytes / self.first_measurements.memory_bytes
            if known and not self.no_ratio_reason
            else None
        )

    @cached_property
    def score_change(self) -> IntervalEstimate | None:
        """Score in the other set, minus that in the first set.

        The change is None if the cells are not comparable, or if one has no score.
        """
        if (
            self.no_ratio_reason
            or not self.first_measurements.scores
            or not self.other_measurements.scores
        ):
            return None
        return compute_score_difference(
            self.other_measurements.scores, self.first_measurements.scores
        )


@dataclass(frozen=True)
class StrategyMean:
    """Geometric mean of a strategy's time ratios, over the cells of a model, then over models."""

    strategy: str
    #: Number of workers of the cells; None if the mean is over cells of all worker counts.
    gpus: int | None
    #: Mean ratio. Its interval is over models or, if there is one model, over repeats.
    time_ratio: IntervalEstimate
    model_count: int
    cell_count: int
    #: Whether the times of both sets differ: whether the mean ratio is further from 1 than the noise of
    #: repeats explains. None if the noise is unknown.
    is_significant: bool | None

    @property
    def workers_text(self) -> str:
        """Number of workers as text, or `all` for the mean over all numbers."""
        return "all" if self.gpus is None else str(self.gpus)


@dataclass(frozen=True)
class RankChange:
    """Two strategies whose order by training time differs between two sets."""

    experiment: str
    model: str
    gpus: int
    #: The faster of the two strategies in the first set.
    faster_in_first: str
    #: The faster of the two strategies in the other set.
    faster_in_other: str
    #: Time of `faster_in_other` divided by that of `faster_in_first`, in each set.
    ratio_in_first: IntervalEstimate
    ratio_in_other: IntervalEstimate

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the change of order is no chance: the intervals of both ratios exclude 1."""
        return self.ratio_in_first.interval_excludes(1) and self.ratio_in_other.interval_excludes(1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Comparison of two sets: their common cells, differences, mean ratios and changes of order."""

    first_set: ResultSet
    other_set: ResultSet
    common_cells: tuple[ComparedCell, ...]
    #: Differences of all common cells. A ComparedCell has the same three kinds.
    machine_differences: tuple[Difference, ...]
    work_differences: tuple[Difference, ...]
    unstated_differences: tuple[Difference, ...]
    strategy_means: tuple[StrategyMean, ...]
    rank_changes: tuple[RankChange, ...]
    #: Number of finished cells that only the first set has. All repeats count as one cell.
    num_cells_only_in_first: int
    #: Number of finished cells that only the other set has.
    num_cells_only_in_other: int
    #: Cells with a training time in the first set, but without a record in the other.
    cells_missing_in_other: tuple[Group, ...]

    @property
    def differences_by_effect(self) -> dict[str, tuple[Difference, ...]]:
        """Differences of cells in both sets, by effect on time ratios. The most serious effect is first."""
        return {
            "no ratio": self.work_differences,
            "not known to be equal": self.unstated_differences,
            "may explain ratios": self.machine_differences,
        }

    @cached_property
    def cells_with_ratio(self) -> list[ComparedCell]:
        """Cells of both sets that have a time ratio."""
        return [cell for cell in self.common_cells if not cell.no_ratio_reason]

    @cached_property
    def cells_without_ratio(self) -> list[ComparedCell]:
        """Cells of both sets that have no time ratio."""
        return [cell for cell in self.common_cells if cell.no_ratio_reason]


class SetMeasurements:
    """Measurements of the cells of one set. A group is all repeats of a cell."""

    def __init__(self, result_set: ResultSet) -> None:
        findings = result_set.findings.to_dict("records")
        self.repeats = Repeats(result_set.cells, findings)
        bad = result_set.cells[~result_set.cells["status"].isin(["ok", *UNMEASURED])]
        #: Rows of the failed repeats, by group (all repeats of a cell).
        self.bad = map_rows_by_group(bad)
        doubtful = [finding for finding in findings if finding["severity"] == "warning"]
        self.doubts = find_rule_severities_of_each_group(
            doubtful, map_groups_to_data_sets(result_set)
        )

    def collect_group_measurements(self, group: Group, score: Score) -> CellMeasurements:
        """Return the times, scores, memory and outcomes of a group of repeats.

        Args:
            group: The group.
            score: Definition of the score, with its unit.
        """
        times, scores = (
            tuple(self.repeats.values(group, column, concerns).values())
            for column, concerns in (("train_time_s", "time"), ("score_final", "score"))
        )
        bad = self.bad.get(group)
        return CellMeasurements(
            times,
            tuple(score.display_factor * value for value in scores),
            self.repeats.compute_median_of_repeats(group, "peak_memory_bytes", "memory"),
            "" if bad is None else remove_outcome_counts(describe_outcomes_of_cells(bad)),
            group in self.repeats.ok,
            tuple(self.doubts.get(("time", *group), ())),
        )


def compare_result_sets(first: ResultSet, other: ResultSet) -> Comparison:
    """Compare a result set with the first set."""
    matched = match_cells(first, other)
    measured = SetMeasurements(first), SetMeasurements(other)
    scored = {name: read_score(rows) for name, rows in first.cells.groupby("experiment")}
    cells = []
    for match in matched:
        score = scored[match.first_group.experiment]
        differing = list(iter_differences(match, first, other))
        work = select_differences_preventing_ratio(
            differing, first.is_published or other.is_published
        )
        cells.append(
            ComparedCell(
                match,
                measured[0].collect_group_measurements(match.first_group, score),
                measured[1].collect_group_measurements(match.other_group, score),
                score,
                work_differences=work,
                unstated_differences=[
                    d for d in select_differences_stated_by_one_set(differing) if d not in work
                ],
                machine_differences=[
                    d for d in differing if d.kind not in WORK_DIFFERENCES.values()
                ],
            )
        )
    with_ratio = [cell for cell in cells if not cell.no_ratio_reason]
    in_first, in_other = (one.repeats.ok for one in measured)
    alone = [group for group in in_first if group not in {match.first_group for match in matched}]
    return Comparison(
        first,
        other,
        tuple(cells),
        machine_differences=merge_equal_differences(
            d for cell in cells for d in cell.machine_differences
        ),
        work_differences=merge_equal_differences(
            d for cell in cells for d in cell.work_differences
        ),
        unstated_differences=merge_equal_differences(
            d for cell in cells for d in cell.unstated_differences
        ),
        strategy_means=tuple(average_ratios_by_strategy(with_ratio)),
        rank_changes=tuple(iter_rank_changes(with_ratio)),
        num_cells_only_in_first=len(alone),
        num_cells_only_in_other=len(in_other.keys() - {match.other_group for match in matched}),
        cells_missing_in_other=tuple(
            g for g in alone if measured[0].repeats.values(g, "train_time_s", "time")
        ),
    )


def describe_differences(differences: Sequence[Difference]) -> str:
    """Return differences as text, such as `lr 0.01 against 0.5; epochs 10 against not stated`.

    Each difference has its field, the value in the first set, and that in the other set.
    """
    return "; ".join(
        f"{shorten_field_path(d.field_path)} {d.first_value} against {d.other_value}"
        for d in differences
    )


def shorten_field_path(field_path: str) -> str:
    """Return the path of a record field without a prefix such as `settings`."""
    parts = field_path.split(".")
    return ".".join(parts[1:] if parts[0] in ("settings", "worker", "batch") else parts)


def average_ratios_by_strategy(cells: list[ComparedCell]) -> Iterator[StrategyMean]:
    """Yield the mean time ratio of each strategy, over all worker counts and for each."""
    by_strategy: dict[str, list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        by_strategy[cell.group.strategy].append(cell)
    for strategy, ratios in by_strategy.items():
        counts = sorted({cell.group.gpus for cell in ratios})
        for gpus in (None, *(counts if len(counts) > 1 else ())):
            here = [cell for cell in ratios if gpus in (None, cell.group.gpus)]
            rows = [(cell.group.model, math.log(cell.time_ratio.value)) for cell in here]
            by_model = pd.DataFrame(rows, columns=["model", "log"]).groupby("model")["log"].mean()
            mean = compute_geometric_mean_with_interval(by_model.tolist())
            pairs = [
                (cell.other_measurements.train_times_s, cell.first_measurements.train_times_s)
                for cell in here
            ]
            # Bonferroni: the error rate is divided by the number of strategies. Then the probability of any
            # false difference is at most ALPHA.
            shared = compute_mean_slowdown(pairs, ALPHA / 2 / len(by_strategy))
            apart = None if shared.low is None else shared.interval_excludes(0.0)
            if len(by_model) == 1:
                ends = compute_mean_slowdown(pairs, ALPHA / 2)[1:]
                mean = IntervalEstimate(
                    mean.value, *(end if end is None else 1 + end for end in ends)
                )
            yield StrategyMean(strategy, gpus, mean, len(by_model), len(here), apart)


def iter_rank_changes(cells: list[ComparedCell]) -> Iterator[RankChange]:
    """Yield each pair of strategies whose order by time differs between the two sets."""
    comparisons: dict[tuple[str, str, str, int], list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        g = cell.group
        comparisons[(g.experiment, cell.match.other_group.experiment, g.model, g.gpus)].append(cell)
    for (experiment, _, model, gpus), comparison in comparisons.items():
        for a, b in combinations(comparison, 2):
            before = np.mean(np.log(b.first_measurements.train_times_s)) - np.mean(
                np.log(a.first_measurements.train_times_s)
            )
            after = np.mean(np.log(b.other_measurements.train_times_s)) - np.mean(
                np.log(a.other_measurements.train_times_s)
            )
            if before * after < 0:
                old, new = (a, b) if before > 0 else (b, a)
                yield RankChange(
                    *(experiment, model, gpus, old.group.strategy, new.group.strategy),
                    compute_time_ratio(
                        new.first_measurements.train_times_s, old.first_measurements.train_times_s
                    ),
                    compute_time_ratio(
                        new.other_measurements.train_times_s, old.other_measurements.train_times_s
                    ),
                )


def iter_ratio_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on equal times, and on the smallest and the largest mean time ratio."""
    first, other = comparison.first_set.name, comparison.other_set.name
    n = len(comparison.cells_with_ratio)
    same = sum(
        cell.first_measurements.train_times_s == cell.other_measurements.train_times_s
        for cell in comparison.cells_with_ratio
    )
    if same:
        yield (
            f"{same} of {n} times in {other} equal those in {first} to the last digit, so they were "
            "measured only once."
        )
    means = sorted(
        (m for m in comparison.strategy_means if m.gpus is None), key=lambda m: m.time_ratio.value
    )
    if not means or same == n:
        return
    apart = [mean for mean in means if mean.is_significant]
    if not apart:
        ratios = " to ".join(
            dict.fromkeys(f"{mean.time_ratio.value:.2f}" for mean in (means[0], means[-1]))
        )
        known = any(mean.is_significant is not None for mean in means)
        significance = (
            "No ratio differs from 1 by more than the noise of repeats."
            if known
            else "The noise is unknown, because a set has only one repeat per cell."
        )
        yield (
            f"Training in {other} takes {ratios} times as long as in {first}, depending on the strategy. "
            f"{significance}"
        )
        return
    similar = len(means) - len(apart)
    means, least, most = apart, apart[0], apart[-1]
    text = (
        f"Training in {other} takes {least.time_ratio.value:.2f} times as long as in {first} with "
        f"{least.strategy}"
    )
    if most is not least:
        text += f", {most.time_ratio.value:.2f} times with {most.strategy}"
        text += (
            f"; {format_count(len(means) - 2, 'other')} are between these" if len(means) > 2 else ""
        )
    if similar:
        text += f"; the ratio of {format_count(similar, 'other strategy')} does not differ from 1"
    yield f"{text}."


def describe_comparison(comparison: Comparison) -> str:
    """Return sentences on the time ratios, and on the differences that may explain them."""
    first, other = comparison.first_set.name, comparison.other_set.name
    if not comparison.common_cells:
        return (
            f"{first} and {other} have no cell with the same strategy, model, data set and number of "
            "workers."
        )
    kinds = list(
        dict.fromkeys(
            d.kind for d in comparison.machine_differences if d.kind not in ("hosts", "seeds")
        )
    )
    text = " ".join(iter_ratio_sentences(comparison))
    if not kinds:
        text += f" {first} and {other} do not differ in the hardware, versions and flags that both state."
    elif len(kinds) == 1:
        [kind] = kinds
        paths = [
            shorten_field_path(d.field_path)
            for d in comparison.machine_differences
            if d.kind == kind
        ]
        fields = ", ".join(dict.fromkeys(paths[:4]))
        text += f" {first} and {other} differ in one condition that both state: {kind} ({fields})."
    else:
        text += (
            f" {first} and {other} differ in several conditions: {', '.join(kinds)}. "
            "No single one of these explains a ratio."
        )
    if comparison.unstated_differences:
        fields = ", ".join(
            dict.fromkeys(shorten_field_path(d.field_path) for d in comparison.unstated_differences)
        )
        text += f" Only one of the two sets states these values: {fields}."
    doubted = [cell for cell in comparison.cells_with_ratio if cell.doubtful_rules]
    if doubted:
        rules = ", ".join(dict.fromkeys(rule for cell in doubted for rule in cell.doubtful_rules))
        text += f" The audit doubts the times of {len(doubted)} of {len(comparison.cells_with_ratio)} ratios"
        text += f" by these rules: {rules}."
    for name, cells in (
        (first, comparison.num_cells_only_in_first),
        (other, comparison.num_cells_only_in_other),
    ):
        if cells:
            text += f" {format_count(cells, 'cell')} finished only in {name}."
    if comparison.cells_without_ratio:
        strategies = ", ".join(
            dict.fromkeys(cell.group.strategy for cell in comparison.cells_without_ratio)
        )
        text += (
            f" {len(comparison.cells_without_ratio)} of {len(comparison.common_cells)} common cells have no "
            f"ratio; their strategies are {strategies}."
        )
    return text.strip()
