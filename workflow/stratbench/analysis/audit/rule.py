"""What a rule of the audit is, and what its checks are given.

A rule is one decorated function: the decorator says what is suspicious, how bad it is and why, the
function yields what trips it, with the figures. What a record does not say cannot trip a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from stratbench.cell.record import Record

#: `unusable`: draw no conclusion from it; `doubtful`: explain it first; `note`: know it.
SEVERITIES = ("unusable", "doubtful", "note")
GROUP = ["experiment", "model", "strategy", "gpus"]

Severity = Literal["unusable", "doubtful", "note"]
#: Which figures of the cells a rule casts doubt on.
Affects = Literal["time", "memory", "accuracy", "all"]
#: A group of repeats: experiment, model, strategy, number of workers.
Key = tuple[str, str, str, int]
Row = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What tripped a rule: the coordinates it is about, and the figures."""

    where: Row
    figures: str


class Study:
    """What the rules look at: the rows of cells.csv, and the records behind them where there are any.

    `floors`: accuracies by data set that any working training reaches, for tables that say too
    little to judge them by themselves.
    """

    def __init__(
        self,
        cells: pd.DataFrame,
        records: Sequence[Record] = (),
        floors: dict[str, float] | None = None,
    ) -> None:
        self.cells = cells
        self.records = records
        self.floors = floors or {}
        #: The cells with a result, and the same by group of repeats.
        self.ok = cells[cells["status"] == "ok"]
        self.groups: dict[Key, pd.DataFrame] = dict(iter(self.ok.groupby(GROUP, sort=False)))

    def median(self, key: Key, column: str) -> float | None:
        """Median of a column over the repeats of a group; None where there is none."""
        rows = self.groups.get(key)
        values = pd.Series(dtype=float) if rows is None else rows[column].dropna()
        return float(values.median()) if len(values) else None

    def product(self, key: Key, *columns: str) -> float | None:
        """The product of some columns' medians; None where one is absent."""
        values = [self.median(key, column) for column in columns]
        return None if None in values else math.prod(values)

    def unsharded(self, key: Key) -> Key | None:
        """The collective on as many workers of which each holds the whole model; None without one."""
        return next(
            (
                k
                for k in self.groups
                if (*k[:2], k[3]) == (*key[:2], key[3])
                and self.says(k, "ring_copies")
                and not self.says(k, "shards_states")
            ),
            None,
        )

    def says(self, key: Key, column: str) -> Any:
        """What the cells of a group say of their strategy; None where they do not say it."""
        value = self.groups[key][column].iloc[0]
        return None if pd.isna(value) else value


@dataclass(frozen=True)
class Rule:
    """One suspicion. `affects` says which figures of the cells it casts doubt on."""

    id: str
    severity: Severity
    affects: Affects
    explanation: str
    check: Callable[[Study], Iterator[Found]]


def rule(
    id: str, severity: Severity, affects: Affects, explanation: str
) -> Callable[[Callable[[Study], Iterator[Found]]], Rule]:
    """Make a rule of a check over the study."""

    def made(check: Callable[[Study], Iterator[Found]]) -> Rule:
        return Rule(id, severity, affects, explanation, check)

    return made


def record_rule(
    id: str, severity: Severity, affects: Affects, explanation: str
) -> Callable[[Callable[[Record], Iterator[str]]], Rule]:
    """Make a rule of a check that looks at one record by itself and yields what is wrong with it."""

    def made(check: Callable[[Record], Iterator[str]]) -> Rule:
        def over(study: Study) -> Iterator[Found]:
            for record in study.records:
                where = {name: record["cell"][name] for name in (*GROUP, "repeat")}
                yield from (Found(where, text) for text in checked(check, record))

        return Rule(id, severity, affects, explanation, over)

    return made


def checked(check: Callable[[Record], Iterator[str]], record: Record) -> Iterator[str]:
    """What `check` finds; that a field has another shape than its writers give it is a finding too."""
    try:
        yield from check(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
        yield f"a field has a form that no cell writes ({type(e).__name__}: {e})"


def at(key: Key) -> Row:
    """Coordinates of a group of repeats."""
    return dict(zip(GROUP, key, strict=True))


def without_count(key: Key) -> Row:
    """Coordinates of a strategy: what is wrong on one worker is wrong on any number of them."""
    return {name: value for name, value in at(key).items() if name != "gpus"}


def of(row: Any) -> Row:
    """Coordinates of one cell."""
    return {name: getattr(row, name) for name in (*GROUP, "repeat")}
