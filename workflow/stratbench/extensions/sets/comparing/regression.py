"""Finds strategies and cells that are slower than in the first set.

A slow-down counts if it is larger than noise and than an allowed share.

A cell that has times in the first set, but no usable times in the other set, counts as a failure. Otherwise
its slow-down would not be noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stratbench.analysis.records.groups import Group
from stratbench.cell.text.words import format_count, format_names
from stratbench.extensions.sets.comparing.comparison import ComparedCell, Comparison
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.unpaired import ALPHA, compute_mean_slowdown

SLOWER, LOST, WITHIN, UNKNOWN = "slower", "no longer finishes", "within", "cannot tell"
GONE, OTHER_WORK, LESS = "no longer judged", "not judged", "finishes less often"
#: Outcomes with which `stratbench compare` has exit code 1.
FAILING = (SLOWER, LOST, GONE)
#: Largest number of cells that an outcome names.
MAX_NAMED = 4


@dataclass(frozen=True)
class RegressionOutcome:
    """Outcome of the search for slow-downs, for one cell or for several cells of a strategy."""

    #: Name of the result set that is compared with the first one.
    set_name: str
    #: Strategy or cells as text.
    subject: str
    #: Whether the outcome is of all cells of a strategy together, and not of a single cell.
    is_whole_strategy: bool
    cell_count: int
    #: Share by which training is slower than in the first set, with its bounds; None without a time ratio.
    slowdown: IntervalEstimate | None
    #: SLOWER: the lower bound of the slow-down is above the allowed share. WITHIN: the upper bound is at most
    #: the allowed share. LOST: a repeat finished in the first set, and none in the other. GONE: the other set
    #: has no usable record. OTHER_WORK: the other set trains something else. LESS: all repeats finished in
    #: the first set, and only some in the other. UNKNOWN: none of these.
    outcome: str
    #: Names of the audit's rules whose findings make the compared times doubtful.
    doubtful_rules: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether `stratbench compare` has exit code 1 because of this outcome."""
        return self.outcome in FAILING

    @property
    def is_listed_on_page(self) -> bool:
        """Whether the page lists this outcome. A single cell is listed only if it fails or changed."""
        return self.is_whole_strategy or self.is_failure or self.outcome in (OTHER_WORK, LESS)

    @property
    def outcome_sentence(self) -> str:
        """Outcome as text, with the slow-down and its bounds."""
        text = f"{self.set_name}: {self.subject}: {self.outcome}"
        if self.slowdown is None:
            return text
        share, low, high = self.slowdown
        text += f", {share:+.1%}"
        if low is None:
            return f"{text} (the noise is unknown: to estimate it takes two repeats in both sets)"
        doubts = (
            f"; the audit doubts these times: {', '.join(self.doubtful_rules)}"
            if self.doubtful_rules
            else ""
        )
        return f"{text} ({low:+.1%} to {high:+.1%}){doubts}"


def find_regressions(
    comparisons: Sequence[Comparison], allowed_slowdown: float
) -> list[RegressionOutcome]:
    """Return the outcomes of all strategies and cells, the worst outcome first.

    Strategies and cells are both judged: the mean over a strategy's cells has less noise, but hides the
    slow-down of a single cell. The probability of any false alarm is at most ALPHA. Half of it is divided
    among the strategies of all sets, and half among their cells (Bonferroni).

    Args:
        comparisons: Comparison of each set with the first one.
        allowed_slowdown: Share by which a strategy or cell may be slower.
    """
    strategies = [
        (c.other_set.name, *entry)
        for c in comparisons
        for entry in group_cells_by_strategy(c.cells_with_ratio)
    ]
    cells = [
        (c.other_set.name, cell.coordinates_text, [cell])
        for c in comparisons
        for cell in c.cells_with_ratio
        if len(cell.first_measurements.train_times_s) > 1
        and len(cell.other_measurements.train_times_s) > 1
    ]
    watched = [
        judge_slowdown(*entry, is_strategy, ALPHA / 2 / len(family), allowed_slowdown)
        for family, is_strategy in ((strategies, True), (cells, False))
        for entry in family
    ]
    for ended_worse, outcome in (
        (is_finished_only_in_first_set, LOST),
        (is_finished_less_often, LESS),
    ):
        for c in comparisons:
            watched += [
                make_unfinished_outcome(c, cell, outcome)
                for cell in c.common_cells
                if ended_worse(cell)
            ]
    watched += [entry for c in comparisons for entry in iter_strategies_without_times(c)]
    order = (*FAILING, LESS, OTHER_WORK, UNKNOWN, WITHIN)
    return sorted(watched, key=lambda w: order.index(w.outcome))


def iter_strategies_without_times(comparison: Comparison) -> Iterator[RegressionOutcome]:
    """Yield an outcome per strategy with cells that have times only in the first set.

    A strategy has one outcome for each reason.
    """
    places: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for cell in comparison.common_cells:
        if cell.work_differences and cell.first_measurements.train_times_s:
            places[OTHER_WORK, cell.group.strategy, "other work"].append(cell.group)
        elif (
            cell.first_measurements.train_times_s
            and not cell.other_measurements.train_times_s
            and not is_finished_only_in_first_set(cell)
        ):
            places[GONE, cell.group.strategy, "rejected by the audit"].append(cell.group)
    # The paper's tables do not list all cells, so a cell without a counterpart in them is no regression.
    for group in () if comparison.other_set.is_published else comparison.cells_missing_in_other:
        places[GONE, group.strategy, "without a record"].append(group)
    for (outcome, strategy, reason), groups in places.items():
        named = format_names([f"{g.model} on {g.gpus} ({g.experiment})" for g in groups], MAX_NAMED)
        what = f"{strategy}, {format_count(len(groups), 'cell')} {reason}: {named}"
        yield RegressionOutcome(comparison.other_set.name, what, False, len(groups), None, outcome)


def is_finished_only_in_first_set(cell: ComparedCell) -> bool:
    """Return whether a cell finished in the first set, but not in the other set.

    The result is False for cells that train something else in the other set.
    """
    return (
        bool(cell.first_measurements.train_times_s)
        and not cell.other_measurements.has_finished_repeat
        and not cell.work_differences
    )


def is_finished_less_often(cell: ComparedCell) -> bool:
    """Return whether fewer repeats of a cell finished than in the first set.

    The result is False if no repeat finished.
    """
    worse = cell.other_measurements.failure_text and not cell.first_measurements.failure_text
    return bool(
        worse
        and cell.first_measurements.train_times_s
        and cell.other_measurements.has_finished_repeat
        and not cell.work_differences
    )


def make_unfinished_outcome(
    comparison: Comparison, cell: ComparedCell, outcome: str
) -> RegressionOutcome:
    """Return the outcome for a cell with fewer finished repeats than in the first set.

    Args:
        comparison: Comparison of a set with the first one.
        cell: The cell.
        outcome: LOST or LESS.
    """
    what = f"{cell.coordinates_text}, {cell.other_measurements.failure_text}"
    return RegressionOutcome(comparison.other_set.name, what, False, 1, None, outcome)


def group_cells_by_strategy(
    cells: Sequence[ComparedCell],
) -> Iterator[tuple[str, list[ComparedCell]]]:
    """Yield each strategy, with its cells that have two repeats or more in both sets.

    A strategy without such cells is yielded with all its cells.
    """
    groups: dict[str, list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        groups[cell.group.strategy].append(cell)
    for strategy, cells_of_strategy in groups.items():
        repeated = [
            c
            for c in cells_of_strategy
            if min(len(c.first_measurements.train_times_s), len(c.other_measurements.train_times_s))
            > 1
        ]
        yield strategy, repeated or cells_of_strategy


def judge_slowdown(
    set_name: str,
    subject: str,
    cells: list[ComparedCell],
    is_whole_strategy: bool,
    alpha: float,
    allowed_slowdown: float,
) -> RegressionOutcome:
    """Return the outcome of some cells together, from their mean slow-down.

    Args:
        set_name: Name of the set that is compared with the first one.
        subject: Strategy or cell as text.
        cells: The cells.
        is_whole_strategy: Whether these are all cells of a strategy.
        alpha: Probability of a false alarm.
        allowed_slowdown: Share by which the cells may be slower.
    """
    slowdown = compute_mean_slowdown(
        [(c.other_measurements.train_times_s, c.first_measurements.train_times_s) for c in cells],
        alpha,
    )
    outcome = UNKNOWN
    if slowdown.low is not None and slowdown.low > allowed_slowdown:
        outcome = SLOWER
    elif slowdown.high is not None and slowdown.high <= allowed_slowdown:
        outcome = WITHIN
    doubts = tuple(dict.fromkeys(rule for cell in cells for rule in cell.doubtful_rules))
    return RegressionOutcome(
        set_name, subject, is_whole_strategy, len(cells), slowdown, outcome, doubts
    )


def has_failing_outcome(outcomes: Sequence[RegressionOutcome]) -> bool:
    """Return whether `stratbench compare` has exit code 1, because an outcome is in FAILING."""
    return any(w.is_failure for w in outcomes)


def describe_regressions(
    outcomes: Sequence[RegressionOutcome], allowed_slowdown: float
) -> Iterator[str]:
    """Yield the lines on slow-downs that `stratbench compare` prints: a summary, then each listed outcome."""
    if not outcomes:
        yield "Regressions: no result, because no cell has a time ratio."
        return
    slower, lost, gone = ([w for w in outcomes if w.outcome == outcome] for outcome in FAILING)
    strategies = [w for w in outcomes if w.is_whole_strategy]
    unknown = [w for w in strategies if w.outcome == UNKNOWN]
    if slower:
        summary = f"{len(slower)} slower"
    elif len(unknown) < len(strategies):
        summary = "nothing slower"
    else:
        summary = "the repeats do not show whether anything is slower"
    summary += f", {len(lost)} no longer finishing" if lost else ""
    less = sum(w.outcome == LESS for w in outcomes)
    summary += f", {less} finishing less often" if less else ""
    summary += (
        f", {format_count(sum(w.cell_count for w in gone), 'cell')} no longer judged"
        if gone
        else ""
    )
    if unknown:
        strategies_text = format_count(len(unknown), "strategy")
        summary += f"; unknown for {strategies_text}, because of too few repeats"
    yield f"Regressions ({allowed_slowdown:.1%} slower is allowed): {summary}."
    for w in outcomes:
        if w.is_listed_on_page:
            yield f"  {w.outcome_sentence}"
