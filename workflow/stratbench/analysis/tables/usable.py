"""Usable repeats for the comparison with the paper: ended well, and not rejected by the audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.records.groups import Group, findings_by_group, rows_by_group


class UsableGroups:
    """Repeats that are ok, by (experiment, strategy, model, gpus), without those that the audit rejects."""

    def __init__(self, cells: pd.DataFrame, findings: Sequence[dict[str, Any]] = ()) -> None:
        ok = cells[cells["status"] == "ok"]
        groups = rows_by_group(ok)
        #: The figures of each group that the audit calls unusable: time, memory, score or all.
        self.rejected = {
            key: {f["affects"] for f in found if f["severity"] == "unusable"}
            for key, found in findings_by_group(findings, groups)
        }
        self.groups = groups
        self._values: dict[tuple[Group, str], dict[int, float]] = {}
        #: Time limits of groups that reached theirs, and so took longer.
        self.limits: dict[Group, float] = {
            key: float(rows["time_limit_s"].min())
            for key, rows in rows_by_group(cells[cells["status"] == "timeout"]).items()
            if key not in groups and rows["time_limit_s"].notna().any()
        }

    def values(self, group: Group, column: str, concerns: str) -> dict[int, float]:
        """The values of a column by repeat; empty if there are none or the audit rejects them."""
        if group not in self.groups or self.rejected[group] & {concerns, "all"}:
            return {}
        if (group, column) not in self._values:
            rows = self.groups[group]
            pairs = zip(rows["repeat"], rows[column].to_numpy(dtype=float).tolist(), strict=True)
            self._values[group, column] = {r: value for r, value in pairs if value == value}
        return self._values[group, column]

    def common_repeats(
        self, groups: Sequence[Group], column: str, concerns: str
    ) -> np.ndarray | None:
        """Values [groups, repeats] for the repeats that all groups have; None if there is none."""
        first, *others = (self.values(group, column, concerns) for group in groups)
        common = [repeat for repeat in first if all(repeat in other for other in others)]
        if not common:
            return None
        return np.array([[values[repeat] for repeat in common] for values in (first, *others)])

    def with_time(self) -> list[Group]:
        """All groups with a result, or with a limit that they reached."""
        return [*self.groups, *self.limits]

    def least_time_s(self, group: Group, beside: Group) -> float | None:
        """A lower bound on the training time of a group at its limit, using another group's start-up."""
        if group not in self.limits or beside not in self.groups:
            return None
        rest = self.groups[beside][["setup_s", "data_s", "warmup_s", "eval_s"]].median().sum()
        return self.limits[group] - float(rest)
