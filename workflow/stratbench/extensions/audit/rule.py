"""The rules of the audit: their decorator, and the data for their checks.

A rule is one decorated function. The decorator has its name and severity, and the docstring explains the
suspicion to users. The function yields each case with its values. A field that a record lacks triggers no
rule, unless it is required.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from stratbench.analysis.records.columns import Row
from stratbench.analysis.records.facts import Facts
from stratbench.analysis.records.groups import GROUP, Group, Repeats
from stratbench.analysis.records.samples import Timeline
from stratbench.cell.record import Record

Severity = Literal["unusable", "warning", "note"]
#: The values of the cells that a rule concerns.
Affects = Literal["time", "memory", "score", "all"]
#: Whose records a rule judges.
Of = Literal["ours", "commands", "both"]
#: The names of a cell's coordinates within its study, and their values in this order.
COORDINATES = (*GROUP, "repeat")
Key = tuple[Any, ...]
#: Result of a check of a study: the cells, as `coordinates_of` takes them, and the values.
Case = tuple[Any, str]


@dataclass(frozen=True)
class Found:
    """A case that a rule found: its coordinates, and its values."""

    where: Row
    figures: str


class AuditData:
    """The data for all rules: the rows of cells.csv, and the records behind them, if any.

    `floors`: accuracies by data set that any working training reaches, for tables that have too little to be
    evaluated on their own. `timelines`: by `key_of` their cell. `study_dir`: results/<study>.
    """

    def __init__(
        self,
        cells: pd.DataFrame,
        records: Sequence[Record] = (),
        floors: dict[str, float] | None = None,
        timelines: Mapping[Key, Timeline] | None = None,
        study_dir: Path | None = None,
    ) -> None:
        #: Cells of users' commands have rules of their own (`audit/commands.py`).
        self.commands = [r for r in records if r["strategy"]["kind"] == "own"]
        #: The cells with a result, of whichever loop.
        self.of_any_loop = cells[cells["status"] == "ok"]
        cells = cells[cells["strategy_kind"] != "own"]
        self.cells = cells
        self.records = [r for r in records if r["strategy"]["kind"] != "own"]
        self.floors = floors or {}
        self.timelines = timelines or {}
        self.study_dir = study_dir
        #: The cells with a result; then the same by group of repeats.
        self.ok = cells[cells["status"] == "ok"]
        self.repeats = Repeats(cells)
        self.groups: dict[Group, pd.DataFrame] = self.repeats.ok
        self._alike: defaultdict[Group, list[Group]] = defaultdict(list)
        for group in self.groups:
            self._alike[group.with_strategy("")].append(group)
            self._alike[group.with_gpus(0)].append(group)

    @cached_property
    def rows(self) -> list[Any]:
        """The cells with a result as tuples, cached, since pandas is slow with many columns."""
        return list(self.ok.itertuples())

    def with_any_strategy(self, group: Group) -> list[Group]:
        """Return the groups on the same model and number of workers, including the group itself."""
        return self._alike.get(group.with_strategy(""), [])

    def on_any_count(self, group: Group) -> list[Group]:
        """Return the groups of the same strategy and model on any number of workers."""
        return self._alike.get(group.with_gpus(0), [])

    def median(self, group: Group, column: str) -> float | None:
        """Return median of a column over the repeats of a group, or None without values."""
        return self.repeats.median(group, column)

    def product(self, group: Group, *columns: str) -> float | None:
        """Return the product of the medians of some columns, or None if one is absent."""
        values = [self.median(group, column) for column in columns]
        return None if None in values else math.prod(values)

    def value_of(self, group: Group, column: str) -> Any:
        """Return the common value of a group's repeats in a column, such as a trait.

        Return None otherwise.
        """
        value = self.groups[group][column].iloc[0]
        return None if pd.isna(value) else value

    def unsharded_rival_of(self, group: Group) -> Group | None:
        """Return the group of an unsharded collective on as many workers, or None without one."""
        return next(
            (
                other
                for other in self.with_any_strategy(group)
                if self.value_of(other, "ring_copies")
                and not self.value_of(other, "shards_states")
                and self.value_of(other, "optimizer_parts") in (None, 1)
            ),
            None,
        )


@dataclass(frozen=True)
class Rule:
    """One suspicion. `affects`: the values of the cells that it concerns."""

    id: str
    severity: Severity
    affects: Affects
    explanation: str
    check: Callable[[AuditData], Iterator[Found]]


def rule(
    id: str, severity: Severity, affects: Affects
) -> Callable[[Callable[[AuditData], Iterator[Case]]], Rule]:
    """Return a decorator that makes a rule of a check over the study.

    Its docstring is the explanation.

    Args:
        id: Name of the rule.
        severity: Its severity.
        affects: The values that it concerns.
    """

    def made(check: Callable[[AuditData], Iterator[Case]]) -> Rule:
        if not check.__doc__:
            raise TypeError(f"{id}: a rule needs a docstring, which explains it to users")

        def over_study(evidence: AuditData) -> Iterator[Found]:
            for cells, figures in check(evidence):
                yield Found(coordinates_of(cells), figures)

        return Rule(id, severity, affects, " ".join(check.__doc__.split()), over_study)

    return made


def record_rule(
    id: str, severity: Severity, affects: Affects, of: Of = "ours"
) -> Callable[[Callable[[Facts], Iterator[str]]], Rule]:
    """Return a decorator that makes a rule of a check over one record, which yields its violations.

    The check's docstring is the explanation for users.

    Args:
        id: Name of the rule.
        severity: Its severity.
        affects: The values that it concerns.
        of: Records of our own loop (`ours`), those of users' commands (`commands`), or `both`.
    """

    def made(check: Callable[[Facts], Iterator[str]]) -> Rule:
        @wraps(check)
        def over_records(evidence: AuditData) -> Iterator[Case]:
            ours = evidence.records if of != "commands" else ()
            for record in (*ours, *(evidence.commands if of != "ours" else ())):
                cell = record["cell"]
                facts = Facts(record, evidence.timelines.get(key_of(cell)))
                yield from ((cell, text) for text in faults_of_record(check, facts))

        return rule(id, severity, affects)(over_records)

    return made


def faults_of_record(check: Callable[[Facts], Iterator[str]], facts: Facts) -> Iterator[str]:
    """Yield the violations that `check` finds. A field with an unexpected shape is one, too."""
    try:
        yield from check(facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        yield f"a field has a form that no cell writes ({type(e).__name__}: {e})"


def coordinates_of(cells: Any) -> Row:
    """Return the coordinates of a finding from a Group, a row, or a mapping.

    A finding without some of them is on all cells that share the others.
    """
    if isinstance(cells, Group):
        return cells._asdict()
    if isinstance(cells, Mapping):
        return {name: cells[name] for name in COORDINATES if name in cells}
    return {name: getattr(cells, name) for name in COORDINATES}


def coordinates_of_strategy(group: Group) -> Row:
    """Return the coordinates of a finding on a strategy, for all worker counts."""
    return {name: value for name, value in group._asdict().items() if name != "gpus"}


def named(cells: Iterable[Row]) -> str:
    """Return cells of one experiment in words."""
    return " and of ".join(f"{c['strategy']} on {c['gpus']}, repeat {c['repeat']}" for c in cells)


def key_of(cell: Row) -> Key:
    """Return the key of a cell's timeline."""
    return tuple(cell[name] for name in COORDINATES)


def rows_of(frame: pd.DataFrame) -> Iterable[Any]:
    """Rows of cells.csv one by one.

    Mostly there is none, and pandas takes as long over none as over few.
    """
    return frame.itertuples() if len(frame) else ()
