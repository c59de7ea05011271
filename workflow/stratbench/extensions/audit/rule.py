"""Decorators that make rules of the audit, and the data that rules check.

A rule is a decorated function. The decorator has its name and severity, and the docstring explains it to
users. The function yields each case with its values. A field that a record lacks triggers no rule, unless it
is required.
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
#: Values of a cell that a finding puts in doubt.
AffectedValues = Literal["time", "memory", "score", "all"]
#: Which records a rule checks: those of stratbench's training loop, of users' commands, or both.
CheckedRecords = Literal["ours", "commands", "both"]
#: Names of a cell's coordinates within its study; a `CellKey` has their values in this order.
COORDINATES = (*GROUP, "repeat")
CellKey = tuple[Any, ...]
#: A finding that a rule's function yields: the cells (a group, row or mapping), and a text with the values.
Case = tuple[Any, str]


@dataclass(frozen=True)
class Finding:
    """A finding of a rule on some cells.

    Attributes:
        coordinates: Values that the cells have in common, by column, such as experiment and model.
        values_text: Text with the values that led to the finding.
    """

    coordinates: Row
    values_text: str


class AuditData:
    """Data that rules check: rows of cells.csv, with the cells' records and timelines if available.

    `accuracy_floors` has the accuracy that any working training reaches, by data set, for published tables.
    `timelines` are by key of their cell, and `study_dir` is results/<study>.
    """

    def __init__(
        self,
        cells: pd.DataFrame,
        records: Sequence[Record] = (),
        accuracy_floors: dict[str, float] | None = None,
        timelines: Mapping[CellKey, Timeline] | None = None,
        study_dir: Path | None = None,
    ) -> None:
        #: Records of cells that users' commands trained. Few rules apply to them.
        self.commands = [r for r in records if r["strategy"]["kind"] == "own"]
        #: Rows of all cells that ended well, including those of users' commands.
        self.of_any_loop = cells[cells["status"] == "ok"]
        cells = cells[cells["strategy_kind"] != "own"]
        self.cells = cells
        self.records = [r for r in records if r["strategy"]["kind"] != "own"]
        self.floors = accuracy_floors or {}
        self.timelines = timelines or {}
        self.study_dir = study_dir
        #: Rows of the cells that stratbench's own loop trained and that ended well. `groups` has the same
        #: rows by group of repeats.
        self.ok = cells[cells["status"] == "ok"]
        self.repeats = Repeats(cells)
        self.groups: dict[Group, pd.DataFrame] = self.repeats.ok
        self._alike: defaultdict[Group, list[Group]] = defaultdict(list)
        for group in self.groups:
            self._alike[group.copy_with_strategy("")].append(group)
            self._alike[group.copy_with_gpu_count(0)].append(group)

    @cached_property
    def finished_rows(self) -> list[Any]:
        """Rows of the cells that ended well, as tuples. They are cached, because pandas is slow here."""
        return list(self.ok.itertuples())

    def list_groups_with_any_strategy(self, group: Group) -> list[Group]:
        """Return the groups that differ from `group` in nothing but the strategy.

        The group itself is included.
        """
        return self._alike.get(group.copy_with_strategy(""), [])

    def list_groups_with_any_worker_count(self, group: Group) -> list[Group]:
        """Return the groups that differ from `group` in nothing but the worker count.

        The group itself is included.
        """
        return self._alike.get(group.copy_with_gpu_count(0), [])

    def compute_median(self, group: Group, column: str) -> float | None:
        """Return the median of a column over the repeats of a group.

        The result is None if there are no values.
        """
        return self.repeats.compute_median_of_repeats(group, column)

    def multiply_medians(self, group: Group, *columns: str) -> float | None:
        """Return the product of the medians of some columns.

        The result is None if a median is missing.
        """
        values = [self.compute_median(group, column) for column in columns]
        return None if None in values else math.prod(values)

    def get_common_value(self, group: Group, column: str) -> Any:
        """Return the value that all repeats of a group share in a column.

        The column must not differ between the repeats. The result is None if the value is missing.
        """
        value = self.groups[group][column].iloc[0]
        return None if pd.isna(value) else value

    def find_unsharded_rival(self, group: Group) -> Group | None:
        """Return the group of an unsharded collective strategy with equally many workers, or None."""
        return next(
            (
                other
                for other in self.list_groups_with_any_strategy(group)
                if self.get_common_value(other, "ring_copies")
                and not self.get_common_value(other, "shards_states")
                and self.get_common_value(other, "optimizer_parts") in (None, 1)
            ),
            None,
        )


@dataclass(frozen=True)
class Rule:
    """A rule of the audit. `affects` says which values of the cells its findings concern."""

    id: str
    severity: Severity
    affects: AffectedValues
    explanation: str
    check: Callable[[AuditData], Iterator[Finding]]


def rule(
    id: str, severity: Severity, affects: AffectedValues
) -> Callable[[Callable[[AuditData], Iterator[Case]]], Rule]:
    """Return a decorator that turns a function on a whole study into an audit rule.

    The docstring of the function is the explanation for users.

    Args:
        id: Name of the rule.
        severity: Severity of the rule's findings.
        affects: Which values of a cell the rule concerns.
    """

    def make_rule_from_study_check(check: Callable[[AuditData], Iterator[Case]]) -> Rule:
        if not check.__doc__:
            raise TypeError(f"the audit rule {id} has no docstring; add one, which users read")

        def check_study(evidence: AuditData) -> Iterator[Finding]:
            for cells, figures in check(evidence):
                yield Finding(get_cell_or_group_coordinates(cells), figures)

        return Rule(id, severity, affects, " ".join(check.__doc__.split()), check_study)

    return make_rule_from_study_check


def record_rule(
    id: str, severity: Severity, affects: AffectedValues, of: CheckedRecords = "ours"
) -> Callable[[Callable[[Facts], Iterator[str]]], Rule]:
    """Return a decorator that turns a check of one record into an audit rule.

    The decorated function checks one record and yields violations. Its docstring is the explanation for
    users.

    Args:
        id: Name of the rule.
        severity: Severity of the rule's findings.
        affects: Which values of a cell the rule concerns.
        of: Records to check: of stratbench's loop (`ours`), of users' commands (`commands`), or `both`.
    """

    def make_rule_from_record_check(check: Callable[[Facts], Iterator[str]]) -> Rule:
        @wraps(check)
        def check_records(evidence: AuditData) -> Iterator[Case]:
            ours = evidence.records if of != "commands" else ()
            for record in (*ours, *(evidence.commands if of != "ours" else ())):
                cell = record["cell"]
                facts = Facts(record, evidence.timelines.get(make_cell_key(cell)))
                yield from ((cell, text) for text in iter_violations_in_record(check, facts))

        return rule(id, severity, affects)(check_records)

    return make_rule_from_record_check


def iter_violations_in_record(
    check: Callable[[Facts], Iterator[str]], facts: Facts
) -> Iterator[str]:
    """Yield the violations that `check` finds. An error because of a malformed field is also a violation."""
    try:
        yield from check(facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        yield f"a field has a form that no cell writes ({type(e).__name__}: {e})"


def is_elastic_cell(facts: Facts) -> bool:
    """Return whether the cell is elastic: its number of workers may vary during the training."""
    return facts("elastic") is not None


def get_cell_or_group_coordinates(cells: Any) -> Row:
    """Return the coordinates of the cells that a finding concerns.

    A finding without a coordinate is on all cells that share the other coordinates.
    """
    if isinstance(cells, Group):
        return cells._asdict()
    if isinstance(cells, Mapping):
        return {name: cells[name] for name in COORDINATES if name in cells}
    return {name: getattr(cells, name) for name in COORDINATES}


def get_coordinates_of_strategy(group: Group) -> Row:
    """Return the coordinates of a finding that concerns a strategy on any number of workers."""
    return {name: value for name, value in group._asdict().items() if name != "gpus"}


def describe_cells(cells: Iterable[Row]) -> str:
    """Describe cells of one experiment, such as `ddp on 4, repeat 0`."""
    return " and of ".join(f"{c['strategy']} on {c['gpus']}, repeat {c['repeat']}" for c in cells)


def make_cell_key(cell: Row) -> CellKey:
    """Return the key of a cell: the values of its COORDINATES."""
    return tuple(cell[name] for name in COORDINATES)


def iter_table_rows(frame: pd.DataFrame) -> Iterable[Any]:
    """Return the rows of a table as tuples.

    An empty table gives an empty tuple at once, because pandas is slow then.
    """
    return frame.itertuples() if len(frame) else ()
