"""Finds strategies and cells that became slower than in the first set, beyond noise and a limit.

A cell with times in the first set but no usable times in the other also fails: otherwise a slow-down of it
would go unnoticed.
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
#: Outcomes that make a comparison fail.
FAILING = (SLOWER, LOST, GONE)
#: Largest number of cells that a sentence names.
MAX_NAMED = 4


@dataclass(frozen=True)
class WatchedCells:
    """Outcome of the regression watch for one cell, or for several cells of a strategy together."""

    set_name: str
    #: The cells as text.
    subject: str
    #: Whether these are all cells of a strategy, and not a single one.
    is_whole_strategy: bool
    cell_count: int
    #: Share by which training became slower, with one-sided bounds, or None without a ratio.
    slowdown: IntervalEstimate | None
    #: SLOWER: the lower bound of the slow-down is above the allowed share. WITHIN: the upper bound is not
    #: above it. LOST: repeats finished in the first set, and none in the other. GONE: the other set has no
    #: usable record. OTHER_WORK: the other set trains something else. LESS: all repeats finished in the first
    #: set, and only some in the other. UNKNOWN: none of these.
    outcome: str
    #: Rules of the audit that have findings on the compared times.
    doubtful_rules: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether this outcome makes the comparison fail."""
        return self.outcome in FAILING

    @property
    def is_listed(self) -> bool:
        """Whether the page lists this outcome. Single cells that are not slower are not listed."""
        return self.is_whole_strategy or self.fails or self.outcome in (OTHER_WORK, LESS)

    @property
    def outcome_sentence(self) -> str:
        """The outcome as text, with the slow-down and its bounds."""
        text = f"{self.set_name}: {self.subject}: {self.outcome}"
        if self.slowdown is None:
            return text
        share, low, high = self.slowdown
        text += f", {share:+.1%}"
        if low is None:
            return f"{text} (noise is unknown: that takes two repeats in both sets)"
        doubts = (
            f"; the audit doubts its times: {', '.join(self.doubtful_rules)}"
            if self.doubtful_rules
            else ""
        )
        return f"{text} ({low:+.1%} to {high:+.1%}){doubts}"


def watch_regressions(comparisons: Sequence[Comparison], allowed: float) -> list[WatchedCells]:
    """Return the outcome of every strategy and cell compared with the first set.

    The worst outcome comes first. The probability of any false alarm by noise is at most ALPHA. Half of it is
    shared between the strategies of all sets, half between their cells (Bonferroni). A strategy's mean has
    less noise, and a single cell shows a slow-down that the mean hides.
    """
    strategies = [
        (c.other_set.name, *entry)
        for c in comparisons
        for entry in group_by_strategy(c.cells_with_ratio)
    ]
    cells = [
        (c.other_set.name, cell.coordinates_text, [cell])
        for c in comparisons
        for cell in c.cells_with_ratio
        if len(cell.first_measurements.train_times_s) > 1
        and len(cell.other_measurements.train_times_s) > 1
    ]
    watched = [
        watch_cells(*entry, whole, ALPHA / 2 / len(family), allowed)
        for family, whole in ((strategies, True), (cells, False))
        for entry in family
    ]
    for ended_worse, outcome in ((is_no_longer_finished, LOST), (finishes_less_often, LESS)):
        for c in comparisons:
            watched += [
                make_unfinished_entry(c, cell, outcome)
                for cell in c.common_cells
                if ended_worse(cell)
            ]
    watched += [entry for c in comparisons for entry in iter_strategies_without_times(c)]
    order = (*FAILING, LESS, OTHER_WORK, UNKNOWN, WITHIN)
    return sorted(watched, key=lambda w: order.index(w.outcome))


def iter_strategies_without_times(comparison: Comparison) -> Iterator[WatchedCells]:
    """Yield an outcome per strategy whose cells have times in the first set only.

    The text of each outcome contains the reason.
    """
    places: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for cell in comparison.common_cells:
        if cell.work_differences and cell.first_measurements.train_times_s:
            places[OTHER_WORK, cell.group.strategy, "other work"].append(cell.group)
        elif (
            cell.first_measurements.train_times_s
            and not cell.other_measurements.train_times_s
            and not is_no_longer_finished(cell)
        ):
            places[GONE, cell.group.strategy, "rejected by the audit"].append(cell.group)
    # Published tables have no records, so that none can be missing.
    for group in () if comparison.other_set.is_published else comparison.missing_groups:
        places[GONE, group.strategy, "without a record"].append(group)
    for (outcome, strategy, reason), groups in places.items():
        named = format_names([f"{g.model} on {g.gpus} ({g.experiment})" for g in groups], MAX_NAMED)
        what = f"{strategy}, {format_count(len(groups), 'cell')} {reason}: {named}"
        yield WatchedCells(comparison.other_set.name, what, False, len(groups), None, outcome)


def is_no_longer_finished(cell: ComparedCell) -> bool:
    """Return whether a cell finished in the first set, but never in the other.

    Repeats without a record do not count, and neither do cells that train something else.
    """
    return (
        bool(cell.first_measurements.train_times_s)
        and not cell.other_measurements.all_finished
        and not cell.work_differences
    )


def finishes_less_often(cell: ComparedCell) -> bool:
    """Return whether all repeats finished in the first set, but only some in the other.

    The ratio of such a cell is that of the finished repeats.
    """
    worse = cell.other_measurements.outcome and not cell.first_measurements.outcome
    return bool(
        worse
        and cell.first_measurements.train_times_s
        and cell.other_measurements.all_finished
        and not cell.work_differences
    )


def make_unfinished_entry(comparison: Comparison, cell: ComparedCell, outcome: str) -> WatchedCells:
    """Return the entry of a cell whose repeats no longer all finish.

    Args:
        comparison: The comparison.
        cell: The cell.
        outcome: LOST or LESS.
    """
    what = f"{cell.coordinates_text}, {cell.other_measurements.outcome}"
    return WatchedCells(comparison.other_set.name, what, False, 1, None, outcome)


def group_by_strategy(cells: Sequence[ComparedCell]) -> Iterator[tuple[str, list[ComparedCell]]]:
    """Yield each strategy with its cells that have two repeats in both sets.

    A strategy without such cells comes with all of its cells.
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


def watch_cells(
    set_name: str, what: str, cells: list[ComparedCell], whole: bool, alpha: float, allowed: float
) -> WatchedCells:
    """Return the outcome for some cells together, from their mean slow-down.

    Args:
        set_name: Name of the set.
        what: Text on the cells.
        cells: The cells.
        whole: Whether these are all cells of a strategy.
        alpha: Probability of a false alarm.
        allowed: Allowed slow-down.
    """
    slowdown = compute_mean_slowdown(
        [(c.other_measurements.train_times_s, c.first_measurements.train_times_s) for c in cells],
        alpha,
    )
    outcome = UNKNOWN
    if slowdown.low is not None and slowdown.low > allowed:
        outcome = SLOWER
    elif slowdown.high is not None and slowdown.high <= allowed:
        outcome = WITHIN
    doubts = tuple(dict.fromkeys(rule for cell in cells for rule in cell.doubtful_rules))
    return WatchedCells(set_name, what, whole, len(cells), slowdown, outcome, doubts)


def has_failures(watched: Sequence[WatchedCells]) -> bool:
    """Return whether the comparison fails, because any outcome is in FAILING."""
    return any(w.fails for w in watched)


def describe_watch(watched: Sequence[WatchedCells], allowed: float) -> Iterator[str]:
    """Yield lines for a terminal: a summary, and the outcomes that are worth listing."""
    if not watched:
        yield "Regression watch: no result, because no cell has a time ratio."
        return
    slower, lost, gone = ([w for w in watched if w.outcome == outcome] for outcome in FAILING)
    strategies = [w for w in watched if w.is_whole_strategy]
    unknown = [w for w in strategies if w.outcome == UNKNOWN]
    if slower:
        text = f"{len(slower)} slower"
    elif len(unknown) < len(strategies):
        text = "nothing slower"
    else:
        text = "the repeats do not show whether anything is slower"
    text += f", {len(lost)} no longer finishing" if lost else ""
    less = sum(w.outcome == LESS for w in watched)
    text += f", {less} finishing less often" if less else ""
    text += (
        f", {format_count(sum(w.cell_count for w in gone), 'cell')} no longer judged"
        if gone
        else ""
    )
    if unknown:
        text += f"; unknown for {format_count(len(unknown), 'strategy')} by too few repeats"
    yield f"Regression watch ({allowed:.1%} allowed): {text}."
    for w in watched:
        if w.is_listed:
            yield f"  {w.outcome_sentence}"
