"""The regression watch: finds slow-downs against the first set, beyond noise and the allowed amount.

Cells with times in the first set and no usable ones in the other are not watched any more: that fails, too,
since it would go unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stratbench.analysis.records.groups import Group
from stratbench.cell.text.words import counted, names_text
from stratbench.extensions.sets.comparing.comparison import ComparedCell, Comparison
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.statistics.unpaired import ALPHA, slowdown_over_cells

SLOWER, LOST, WITHIN, UNKNOWN = "slower", "no longer finishes", "within", "cannot tell"
GONE, OTHER_WORK, LESS = "no longer judged", "not judged", "finishes less often"
#: Verdicts that make a comparison fail.
FAILING = (SLOWER, LOST, GONE)
#: The number of kinds of cells that a sentence names.
MAX_NAMED = 4


@dataclass(frozen=True)
class Watched:
    """A strategy, over all its cells, some or one, in a set other than the first."""

    set_name: str
    #: The subject in words.
    what: str
    #: Whether it is a whole strategy, not one cell.
    whole: bool
    cells: int
    #: The share by which it got slower, with bounds of one side each; None without a ratio.
    slowdown: IntervalEstimate | None
    #: SLOWER: its lower bound is above the allowed share; WITHIN: its upper bound is not; LOST: it finished
    #: in the first set, but none of its repeats that ran here did; GONE: there is no usable record of it
    #: here; OTHER_WORK: what is trained here is something else; LESS: all repeats finished in the first set,
    #: and only some of those that ran here; else UNKNOWN.
    outcome: str
    #: The audit's rules with findings on a time behind the outcome.
    doubts: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether this fails a comparison."""
        return self.outcome in FAILING

    @property
    def shown(self) -> bool:
        """Whether it is listed: cells that are not slower are not."""
        return self.whole or self.fails or self.outcome in (OTHER_WORK, LESS)

    @property
    def sentence(self) -> str:
        """The outcome with its values."""
        text = f"{self.set_name}: {self.what}: {self.outcome}"
        if self.slowdown is None:
            return text
        share, low, high = self.slowdown
        text += f", {share:+.1%}"
        if low is None:
            return f"{text} (no two repeats in both sets, so that noise is not known)"
        doubts = f"; the audit doubts its times: {', '.join(self.doubts)}" if self.doubts else ""
        return f"{text} ({low:+.1%} to {high:+.1%}){doubts}"


def watch(comparisons: Sequence[Comparison], allowed: float) -> list[Watched]:
    """Return outcomes of every strategy and cell against the first set, the worst first.

    The probability of any false alarm by noise is at most ALPHA: half of it is shared between the strategies
    of all sets, half between their cells (Bonferroni). The mean of a strategy has less noise; a cell shows
    what such a mean hides.
    """
    strategies = [
        (c.other.name, *entry) for c in comparisons for entry in by_strategy(c.with_ratio)
    ]
    cells = [
        (c.other.name, cell.in_words, [cell])
        for c in comparisons
        for cell in c.with_ratio
        if len(cell.first.times) > 1 and len(cell.other.times) > 1
    ]
    watched = [
        watched_one(*entry, whole, ALPHA / 2 / len(family), allowed)
        for family, whole in ((strategies, True), (cells, False))
        for entry in family
    ]
    for ended_worse, outcome in ((is_lost, LOST), (is_less_often, LESS)):
        for c in comparisons:
            watched += [unfinished(c, cell, outcome) for cell in c.cells if ended_worse(cell)]
    watched += [entry for c in comparisons for entry in not_judged(c)]
    order = (*FAILING, LESS, OTHER_WORK, UNKNOWN, WITHIN)
    return sorted(watched, key=lambda w: order.index(w.outcome))


def not_judged(comparison: Comparison) -> Iterator[Watched]:
    """Yield per strategy the kinds of cells with times in the first set only."""
    places: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for cell in comparison.cells:
        if cell.work and cell.first.times:
            places[OTHER_WORK, cell.group.strategy, "other work"].append(cell.group)
        elif cell.first.times and not cell.other.times and not is_lost(cell):
            places[GONE, cell.group.strategy, "rejected by the audit"].append(cell.group)
    # Published tables have no records that could be gone.
    for group in () if comparison.other.is_published else comparison.gone:
        places[GONE, group.strategy, "without a record"].append(group)
    for (outcome, strategy, reason), groups in places.items():
        named = names_text([f"{g.model} on {g.gpus} ({g.experiment})" for g in groups], MAX_NAMED)
        what = f"{strategy}, {counted(len(groups), 'kind')} of cells {reason}: {named}"
        yield Watched(comparison.other.name, what, False, len(groups), None, outcome)


def is_lost(cell: ComparedCell) -> bool:
    """Return whether a cell of equal work finished in the first set, but in no repeat of the other.

    A repeat without a record has not ended: it does not count either way.
    """
    return bool(cell.first.times) and not cell.other.finished and not cell.work


def is_less_often(cell: ComparedCell) -> bool:
    """Return whether all run repeats of a cell finished in the first set, but only some in the other.

    Its ratio is that of the finished ones.
    """
    worse = cell.other.outcome and not cell.first.outcome
    return bool(worse and cell.first.times and cell.other.finished and not cell.work)


def unfinished(comparison: Comparison, cell: ComparedCell, outcome: str) -> Watched:
    """Return the outcome of a cell with repeats that no longer finish.

    Args:
        comparison: The comparison.
        cell: The cell.
        outcome: Its outcome.
    """
    what = f"{cell.in_words}, {cell.other.outcome}"
    return Watched(comparison.other.name, what, False, 1, None, outcome)


def by_strategy(cells: Sequence[ComparedCell]) -> Iterator[tuple[str, list[ComparedCell]]]:
    """Yield the cells of each strategy.

    Only those with two repeats in both sets, if there are any.
    """
    groups: dict[str, list[ComparedCell]] = defaultdict(list)
    for cell in cells:
        groups[cell.group.strategy].append(cell)
    for strategy, cells_of_strategy in groups.items():
        repeated = [c for c in cells_of_strategy if min(len(c.first.times), len(c.other.times)) > 1]
        yield strategy, repeated or cells_of_strategy


def watched_one(
    set_name: str, what: str, cells: list[ComparedCell], whole: bool, alpha: float, allowed: float
) -> Watched:
    """Return the outcome on some cells together.

    Args:
        set_name: Name of the set.
        what: Text on the cells.
        cells: The cells.
        whole: Whether they are all of a strategy.
        alpha: Probability of a false alarm.
        allowed: Allowed slow-down.
    """
    slowdown = slowdown_over_cells([(c.other.times, c.first.times) for c in cells], alpha)
    outcome = UNKNOWN
    if slowdown.low is not None and slowdown.low > allowed:
        outcome = SLOWER
    elif slowdown.high is not None and slowdown.high <= allowed:
        outcome = WITHIN
    doubts = tuple(dict.fromkeys(rule for cell in cells for rule in cell.doubts))
    return Watched(set_name, what, whole, len(cells), slowdown, outcome, doubts)


def is_slower(watched: Sequence[Watched]) -> bool:
    """Return whether the comparison fails: anything is slower, unfinished or no longer comparable."""
    return any(w.fails for w in watched)


def describe_watch(watched: Sequence[Watched], allowed: float) -> Iterator[str]:
    """Yield the outcomes for a terminal: what is slower, and every strategy."""
    if not watched:
        yield "Regression watch: no cell has a ratio, so that nothing can be told."
        return
    slower, lost, gone = ([w for w in watched if w.outcome == outcome] for outcome in FAILING)
    strategies = [w for w in watched if w.whole]
    unknown = [w for w in strategies if w.outcome == UNKNOWN]
    if slower:
        text = f"{len(slower)} slower"
    elif len(unknown) < len(strategies):
        text = "nothing slower"
    else:
        text = "it cannot tell whether anything is slower"
    text += f", {len(lost)} no longer finishing" if lost else ""
    less = sum(w.outcome == LESS for w in watched)
    text += f", {less} finishing less often" if less else ""
    text += (
        f", {counted(sum(w.cells for w in gone), 'kind')} of cells no longer judged" if gone else ""
    )
    if unknown:
        text += f"; of {len(unknown)} the repeats cannot tell"
    yield f"Regression watch ({allowed:.1%} allowed): {text}."
    for w in watched:
        if w.shown:
            yield f"  {w.sentence}"
