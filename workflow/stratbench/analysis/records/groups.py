"""Groups of repeats: cells with equal experiment, strategy, model and number of workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from stratbench.analysis.records.columns import Row


class Group(NamedTuple):
    """The coordinates that all repeats of a group have in common."""

    experiment: str
    strategy: str
    model: str
    gpus: int

    def copy_with_gpu_count(self, gpus: int) -> Group:
        """Return the group that differs from this one only in the number of workers."""
        return self._replace(gpus=gpus)

    def copy_with_strategy(self, strategy: str) -> Group:
        """Return the group that differs from this one only in the strategy."""
        return self._replace(strategy=strategy)

    @property
    def experiment_and_model(self) -> tuple[str, str]:
        """Experiment and model of the group. Groups are only compared if both are equal."""
        return self.experiment, self.model


#: The columns by which rows are grouped, in the order of Group.
GROUP = list(Group._fields)


def map_rows_by_group(cells: pd.DataFrame) -> dict[Group, pd.DataFrame]:
    """Return the rows of each group of repeats. Groups are in the order of their first row."""
    return {Group(*key): rows for key, rows in cells.groupby(GROUP, sort=False)}


def map_base_strategies(cells: pd.DataFrame) -> dict[str, str]:
    """Return the base strategy of each strategy or variant, as its records state it."""
    known = cells.dropna(subset=["strategy_base"]).drop_duplicates("strategy")
    return dict(zip(known["strategy"], known["strategy_base"], strict=True))


def iter_findings_by_group(
    findings: Iterable[Row], groups: Iterable[Group]
) -> Iterator[tuple[Group, list[Row]]]:
    """Yield each group of repeats, with the audit's findings on the group.

    A finding that lacks some coordinates applies to all cells with its other coordinates. A finding without
    any coordinate applies to the whole study and to no group.
    """
    placed: defaultdict[tuple[tuple[str, Any], ...], list[Row]] = defaultdict(list)
    for finding in findings:
        placed[tuple((name, finding[name]) for name in GROUP if pd.notna(finding[name]))].append(
            finding
        )
    for group in groups:
        coordinates = list(group._asdict().items())
        some = chain.from_iterable(combinations(coordinates, n) for n in range(1, len(GROUP) + 1))
        yield group, [finding for where in some for finding in placed.get(where, ())]


class Repeats:
    """The groups of repeats in rows of cells.csv, with access to the values of a column by repeat.

    Tables, decisions, the audit, claims and comparisons of result sets all use these values.
    """

    def __init__(self, cells: pd.DataFrame, findings: Iterable[Row] = ()) -> None:
        #: All rows of each group.
        self.all = map_rows_by_group(cells)
        self._ok = cells[cells["status"] == "ok"]
        #: The rows with status `ok`, of each group that has any.
        self.ok = map_rows_by_group(self._ok)
        self._places = self._ok.groupby(GROUP).indices
        self._columns: dict[str, np.ndarray] = {}
        #: By group, the kinds of values that the audit calls unusable: time, memory, score or all.
        self.rejected = {
            group: {f["affects"] for f in on_group if f["severity"] == "unusable"}
            for group, on_group in iter_findings_by_group(findings, self.ok)
        }

    def values(self, group: Group, column: str, audit_kind: str = "") -> dict[int, float]:
        """Return a column's numbers by repeat, for the repeats of a group that are `ok`.

        Repeats without a number are left out.

        Args:
            group: The group.
            column: Name of the column.
            audit_kind: Kind of the values (time, memory or score). No values are returned if the audit calls
                this kind unusable.
        """
        if group not in self.ok or self.rejected[group] & {audit_kind, "all"}:
            return {}
        if column not in self._columns:
            numbers = pd.to_numeric(self._ok[column], errors="coerce")
            self._columns[column] = numbers.to_numpy(dtype=float)
        places = self._places[group]
        selected = self._columns[column][places].tolist()
        repeats = self.ok[group]["repeat"].tolist()
        return {r: value for r, value in zip(repeats, selected, strict=True) if value == value}

    def read_values_of_common_repeats(
        self, groups: Sequence[Group], column: str, audit_kind: str = ""
    ) -> np.ndarray:
        """Return a column's values for the repeats that all groups share, shape [groups, repeats].

        Args:
            groups: The groups.
            column: Name of the column.
            audit_kind: Kind of the values, as in `values`.
        """
        by_group = [self.values(group, column, audit_kind) for group in groups]
        shared = [repeat for repeat in by_group[0] if all(repeat in values for values in by_group)]
        return np.array([[values[repeat] for repeat in shared] for values in by_group])

    def compute_median_of_repeats(
        self, group: Group, column: str, audit_kind: str = ""
    ) -> float | None:
        """Return the median of a column over a group's repeats, or None without values.

        Args:
            group: The group.
            column: Name of the column.
            audit_kind: Kind of the values, as in `values`.
        """
        values = list(self.values(group, column, audit_kind).values())
        return float(np.median(values)) if values else None

    def has_parameter_servers(self, groups: Iterable[Group]) -> bool:
        """Return whether any of the groups has parameter servers."""
        return any((self.all[group]["strategy_kind"] == "server").any() for group in groups)
