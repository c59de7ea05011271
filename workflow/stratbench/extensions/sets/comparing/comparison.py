"""Compares two result sets: a ratio per cell, a mean per strategy, and different conditions."""

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
from stratbench.analysis.records.groups import Group, Repeats, group_rows
from stratbench.analysis.records.score import Score, read_score
from stratbench.analysis.tables.summary import (
    describe_outcome,
    format_outcome_kinds,
    group_findings,
)
from stratbench.cell.text.words import format_count
from stratbench.extensions.sets.comparing.matching import (
    WORK,
    Difference,
    Match,
    iter_differences,
    list_groups_with_data,
    match_cells,
    merge_differences,
    select_blocking_differences,
    select_unstated_differences,
)
from stratbench.extensions.sets.reading import ResultSet
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.moderated import ALPHA
from stratbench.statistics.unpaired import (
    compute_mean_of_logs,
    compute_mean_slowdown,
    compute_score_difference,
    compute_time_ratio,
)

#: Paths of record fields that say how memory was measured.
MEMORY_METHOD = ("memory.method", "provenance.device")


@dataclass(frozen=True)
class CellMeasurements:
    """Measurements of one cell's repeats in one set, without repeats that the audit rejects."""

    #: Training times of the repeats in seconds.
    train_times_s: tuple[float, ...]
    #: Scores of the repeats, in the unit that pages show.
    scores: tuple[float, ...] = ()
    #: Median over repeats of the peak memory in bytes, or None if unknown.
    memory_bytes: float | None = None
    #: Outcomes of the repeats that failed; empty if all ended well.
    outcome: str = ""
    #: Whether at least one repeat finished, even if the audit rejects its values.
    all_finished: bool = True
    #: Rules of the audit that have findings on the times.
    doubtful_rules: tuple[str, ...] = ()

    @property
    def time_outcome(self) -> str:
        """Text that says whether training times were measured, and otherwise why not."""
        return self.outcome or ("measured" if self.train_times_s else "rejected by the audit")


@dataclass(frozen=True)
class ComparedCell:
    """A cell (all repeats) that two sets have in common, with its measurements in both."""

    match: Match
    first_measurements: CellMeasurements
    other_measurements: CellMeasurements
    score: Score = field(default_factory=Score)
    #: Differences in what was trained, which make a ratio meaningless.
    work_differences: Sequence[Difference] = ()
    #: Fields on what was trained that only one set states.
    unstated_differences: Sequence[Difference] = ()
    #: Differences in hardware, software and flags, which may explain a ratio.
    machine_differences: Sequence[Difference] = ()

    @property
    def group(self) -> Group:
        """Coordinates of the cell in the first set."""
        return self.match.first_group

    @property
    def coordinates_text(self) -> str:
        """Coordinates of the cell as text, such as `ddp on 4, vgg16 (main)`."""
        g = self.group
        return f"{g.strategy} on {g.gpus}, {g.model} ({g.experiment})"

    @property
    def doubtful_rules(self) -> tuple[str, ...]:
        """Rules of the audit that have findings on the times of either set."""
        return tuple(
            dict.fromkeys(
                (*self.first_measurements.doubtful_rules, *self.other_measurements.doubtful_rules)
            )
        )

    @cached_property
    def no_ratio_reason(self) -> str:
        """The reason why there is no time ratio; empty if there is one."""
        if self.work_differences or (
            self.first_measurements.train_times_s and self.other_measurements.train_times_s
        ):
            return describe_differences(self.work_differences)
        first, other = self.first_measurements, self.other_measurements
        return f"{first.time_outcome} in one set, {other.time_outcome} in the other"

    @cached_property
    def time_ratio(self) -> IntervalEstimate | None:
        """Training time in the other set, divided by that in the first.

        The ratio is None if the two are not comparable.
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
        """Peak memory in the other set, divided by that in the first.

        The ratio is None if the two are not comparable. It hardly varies between repeats, so that it has no
        interval.
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
        """Score in the other set minus that in the first.

        The change is None if the two are not comparable, or without scores.
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
    """Geometric mean of a strategy's time ratios: over cells within a model, then over models."""

    strategy: str
    #: Number of workers, or None for the mean over all numbers.
    gpus: int | None
    #: Mean ratio, with an interval over models; for a single model, with an interval over repeats.
    time_ratio: IntervalEstimate
    model_count: int
    cell_count: int
    #: Whether the difference between the sets is larger than the noise of repeats; None if unknown.
    is_significant: bool | None

    @property
    def workers_text(self) -> str:
        """The number of workers as a table shows it."""
        return "all" if self.gpus is None else str(self.gpus)


@dataclass(frozen=True)
class RankChange:
    """Two strategies whose order differs between two sets, on one model and number of workers."""

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
    def is_clear(self) -> bool:
        """Whether both intervals exclude a ratio of 1.

        A change of order that is not clear may be chance.
        """
        return self.ratio_in_first.excludes(1) and self.ratio_in_other.excludes(1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The comparison of two sets: their common cells, differences, mean ratios and changes of order."""

    first_set: ResultSet
    other_set: ResultSet
    common_cells: tuple[ComparedCell, ...]
    #: Differences of all cells, of the three kinds that a ComparedCell has.
    machine_differences: tuple[Difference, ...]
    work_differences: tuple[Difference, ...]
    unstated_differences: tuple[Difference, ...]
    strategy_means: tuple[StrategyMean, ...]
    rank_changes: tuple[RankChange, ...]
    #: Number of cells (all repeats as one) that only the first or only the other set has.
    cells_only_in_first: int
    cells_only_in_other: int
    #: Groups of repeats with a time in the first set and without a record in the other.
    missing_groups: tuple[Group, ...]

    @property
    def differences_by_effect(self) -> dict[str, tuple[Difference, ...]]:
        """Differences by their effect on ratios, the most serious effect first."""
        return {
            "no ratio": self.work_differences,
            "not known to be equal": self.unstated_differences,
            "may explain ratios": self.machine_differences,
        }

    @cached_property
    def cells_with_ratio(self) -> list[ComparedCell]:
        """Common cells of both sets with a time ratio."""
        return [cell for cell in self.common_cells if not cell.no_ratio_reason]

    @cached_property
    def cells_without_ratio(self) -> list[ComparedCell]:
        """Common cells of both sets without a time ratio."""
        return [cell for cell in self.common_cells if cell.no_ratio_reason]


class Measurements:
    """All measurements of one set, by group of repeats."""

    def __init__(self, result_set: ResultSet) -> None:
        findings = result_set.findings.to_dict("records")
        self.repeats = Repeats(result_set.cells, findings)
        bad = result_set.cells[~result_set.cells["status"].isin(["ok", *UNMEASURED])]
        #: Rows of cells that ran and failed, by group.
        self.bad = group_rows(bad)
        doubtful = [finding for finding in findings if finding["severity"] == "warning"]
        self.doubts = group_findings(doubtful, list_groups_with_data(result_set))

    def measure_group(self, group: Group, score: Score) -> CellMeasurements:
        """Return the times, scores, memory and outcome of a group of repeats."""
        times, scores = (
            tuple(self.repeats.values(group, column, concerns).values())
            for column, concerns in (("train_time_s", "time"), ("score_final", "score"))
        )
        bad = self.bad.get(group)
        return CellMeasurements(
            times,
            tuple(score.display_factor * value for value in scores),
            self.repeats.compute_median(group, "peak_memory_bytes", "memory"),
            "" if bad is None else format_outcome_kinds(describe_outcome(bad)),
            group in self.repeats.ok,
            tuple(self.doubts.get(("time", *group), ())),
        )


def compare_result_sets(first: ResultSet, other: ResultSet) -> Comparison:
    """Compare a result set with the first set."""
    matched = match_cells(first, other)
    measured = Measurements(first), Measurements(other)
    scored = {name: read_score(rows) for name, rows in first.cells.groupby("experiment")}
    cells = []
    for match in matched:
        score = scored[match.first_group.experiment]
        differing = list(iter_differences(match, first, other))
        work = select_blocking_differences(differing, first.is_published or other.is_published)
        cells.append(
            ComparedCell(
                match,
                measured[0].measure_group(match.first_group, score),
                measured[1].measure_group(match.other_group, score),
                score,
                work_differences=work,
                unstated_differences=[
                    d for d in select_unstated_differences(differing) if d not in work
                ],
                machine_differences=[d for d in differing if d.kind not in WORK.values()],
            )
        )
    with_ratio = [cell for cell in cells if not cell.no_ratio_reason]
    in_first, in_other = (one.repeats.ok for one in measured)
    alone = [group for group in in_first if group not in {match.first_group for match in matched}]
    return Comparison(
        first,
        other,
        tuple(cells),
        machine_differences=merge_differences(
            d for cell in cells for d in cell.machine_differences
        ),
        work_differences=merge_differences(d for cell in cells for d in cell.work_differences),
        unstated_differences=merge_differences(
            d for cell in cells for d in cell.unstated_differences
        ),
        strategy_means=tuple(average_by_strategy(with_ratio)),
        rank_changes=tuple(find_rank_changes(with_ratio)),
        cells_only_in_first=len(alone),
        cells_only_in_other=len(in_other.keys() - {match.other_group for match in matched}),
        missing_groups=tuple(
            g for g in alone if measured[0].repeats.values(g, "train_time_s", "time")
        ),
    )


def describe_differences(differences: list[Difference]) -> str:
    """Return differences as text, such as `lr 0.01 against 0.5; epochs 10 against not stated`."""
    return "; ".join(
        f"{shorten_field_path(d.field_path)} {d.first_value} against {d.other_value}"
        for d in differences
    )


def shorten_field_path(path: str) -> str:
    """Return the path of a record field without a prefix such as `settings`."""
    parts = path.split(".")
    return ".".join(parts[1:] if parts[0] in ("settings", "worker", "batch") else parts)


def average_by_strategy(cells: list[ComparedCell]) -> Iterator[StrategyMean]:
    """Yield each strategy's mean ratio, for all worker counts together and for each count."""
    by_strategy: dict[str, list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        by_strategy[cell.group.strategy].append(cell)
    for strategy, ratios in by_strategy.items():
        counts = sorted({cell.group.gpus for cell in ratios})
        for gpus in (None, *(counts if len(counts) > 1 else ())):
            here = [cell for cell in ratios if gpus in (None, cell.group.gpus)]
            rows = [(cell.group.model, math.log(cell.time_ratio.value)) for cell in here]
            by_model = pd.DataFrame(rows, columns=["model", "log"]).groupby("model")["log"].mean()
            mean = compute_mean_of_logs(by_model.tolist())
            pairs = [
                (cell.other_measurements.train_times_s, cell.first_measurements.train_times_s)
                for cell in here
            ]
            # The level is shared (Bonferroni): a false difference of any strategy has probability ALPHA at
            # most.
            shared = compute_mean_slowdown(pairs, ALPHA / 2 / len(by_strategy))
            apart = None if shared.low is None else shared.excludes(0.0)
            if len(by_model) == 1:
                ends = compute_mean_slowdown(pairs, ALPHA / 2)[1:]
                mean = IntervalEstimate(
                    mean.value, *(end if end is None else 1 + end for end in ends)
                )
            yield StrategyMean(strategy, gpus, mean, len(by_model), len(here), apart)


def find_rank_changes(cells: list[ComparedCell]) -> Iterator[RankChange]:
    """Yield pairs of strategies whose order differs between the two sets."""
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


def iter_main_results(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on the main results: copied times, and the smallest and largest mean ratio."""
    a, b, n = comparison.first_set.name, comparison.other_set.name, len(comparison.cells_with_ratio)
    same = sum(
        cell.first_measurements.train_times_s == cell.other_measurements.train_times_s
        for cell in comparison.cells_with_ratio
    )
    if same:
        copied = (
            f"{same} of {n} times are equal to the last digit, so that they were not measured twice"
        )
        yield f"{b} contains times of {a}: {copied}."
    means = sorted(
        (m for m in comparison.strategy_means if m.gpus is None), key=lambda m: m.time_ratio.value
    )
    if not means or same == n:
        return
    apart = [mean for mean in means if mean.is_significant]
    if not apart:
        ends = dict.fromkeys(f"{mean.time_ratio.value:.2f}" for mean in (means[0], means[-1]))
        known = any(mean.is_significant is not None for mean in means)
        reason = (
            "and no ratio differs from 1 by more than the noise of repeats"
            if known
            else "by single repeats, so that the noise is unknown"
        )
        yield (
            f"Training in {b} takes {' to '.join(ends)} times as long as in {a}, depending on the "
            f"strategy, {reason}."
        )
        return
    similar = len(means) - len(apart)
    means, least, most = apart, apart[0], apart[-1]
    text = f"Training in {b} takes {least.time_ratio.value:.2f} times as long as in {a} with {least.strategy}"
    if most is not least:
        text += f", {most.time_ratio.value:.2f} times with {most.strategy}"
        text += (
            f"; {format_count(len(means) - 2, 'other')} are between these" if len(means) > 2 else ""
        )
    if similar:
        text += f"; the ratio of {format_count(similar, 'other strategy')} does not differ from 1"
    yield f"{text}."


def make_headline(comparison: Comparison) -> str:
    """Return sentences on the main results, and on differences that may explain them."""
    a, b = comparison.first_set.name, comparison.other_set.name
    if not comparison.common_cells:
        return f"{a} and {b} have no cell with the same strategy, model, data set and number of workers."
    kinds = list(
        dict.fromkeys(
            d.kind for d in comparison.machine_differences if d.kind not in ("hosts", "seeds")
        )
    )
    text = " ".join(iter_main_results(comparison))
    if not kinds:
        text += f" {a} and {b} do not differ in the hardware, versions and flags that both state."
    elif len(kinds) == 1:
        [kind] = kinds
        paths = [
            shorten_field_path(d.field_path)
            for d in comparison.machine_differences
            if d.kind == kind
        ]
        listed = ", ".join(dict.fromkeys(paths[:4]))
        text += f" {a} and {b} differ in one condition that their records state: {kind} ({listed})."
    else:
        text += (
            f" {a} and {b} differ in several conditions: {', '.join(kinds)}. "
            "No single one of these explains a ratio."
        )
    if comparison.unstated_differences:
        listed = ", ".join(
            dict.fromkeys(shorten_field_path(d.field_path) for d in comparison.unstated_differences)
        )
        text += f" Only one of the two sets states these values: {listed}."
    doubted = [cell for cell in comparison.cells_with_ratio if cell.doubtful_rules]
    if doubted:
        rules = ", ".join(dict.fromkeys(rule for cell in doubted for rule in cell.doubtful_rules))
        text += f" The audit doubts the times of {len(doubted)} of {len(comparison.cells_with_ratio)} ratios"
        text += f" by these rules: {rules}."
    for name, alone in ((a, comparison.cells_only_in_first), (b, comparison.cells_only_in_other)):
        if alone:
            text += f" {format_count(alone, 'cell')} finished only in {name}."
    if comparison.cells_without_ratio:
        names = ", ".join(
            dict.fromkeys(cell.group.strategy for cell in comparison.cells_without_ratio)
        )
        text += (
            f" {len(comparison.cells_without_ratio)} of {len(comparison.common_cells)} common cells have no "
            f"ratio; their strategies are {names}."
        )
    return text.strip()
