"""Groups of repeats: cells that share experiment, strategy, model and number of workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, combinations
from typing import Any, NamedTuple

import pandas as pd

from stratbench.analysis.records.columns import Row


class Group(NamedTuple):
    """The coordinates that the repeats of a group share, in the order by which rows are grouped."""

    experiment: str
    strategy: str
    model: str
    gpus: int

    def with_gpus(self, gpus: int) -> Group:
        """The same group on another number of workers."""
        return self._replace(gpus=gpus)

    def with_strategy(self, strategy: str) -> Group:
        """The same group with another strategy."""
        return self._replace(strategy=strategy)

    @property
    def comparison(self) -> tuple[str, str]:
        """The experiment and the model: a reader compares strategies and worker counts within these."""
        return self.experiment, self.model


#: The columns by which rows are grouped, in the order of Group.
GROUP = list(Group._fields)


def rows_by_group(frame: pd.DataFrame) -> dict[Group, pd.DataFrame]:
    """The rows of each group, groups in the order of their first row."""
    return {Group(*key): rows for key, rows in frame.groupby(GROUP, sort=False)}


def findings_by_group(
    findings: Iterable[Row], groups: Iterable[Group]
) -> Iterator[tuple[Group, list[Row]]]:
    """Each group with the audit's findings on it.

    A finding without some coordinates is on all cells that share its others. A finding without any is
    on the study as a whole, and on no group.
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
