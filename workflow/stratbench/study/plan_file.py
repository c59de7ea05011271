"""Reads plan.json for the rules: predicted memory and time of each cell, and which cells cannot run.

`plan/` writes this file. Nothing heavy is imported: the Snakefile uses this module on every parse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_json
from stratbench.cell.settings import Settings


class PlanFile:
    """The cells in a study's plan.json. Without a readable file there are none."""

    def __init__(self, path: str | Path) -> None:
        try:
            plan = read_json(path)
            self.gpu = plan["gpu"]
            self.cells = {
                cell: _check_planned_fields(planned) for cell, planned in plan["cells"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.gpu, self.cells = None, {}

    def get_host_mem_mib(self, cell: Cell) -> int:
        """Return the host memory in MiB that the cell needs on a node. The result is 0 if it is unknown."""
        return self._get_planned_needs(cell).get("host_mem_mib") or 0

    def get_servers_mem_mib(self, cell: Cell) -> int:
        """Return the host memory in MiB of all of the cell's servers together.

        The result is 0 if it is unknown.
        """
        return self._get_planned_needs(cell).get("servers_mem_mib") or 0

    def get_max_time_s(
        self, cell: Cell, settings: Settings, cluster: Mapping[str, Any]
    ) -> float | None:
        """Return the plan's upper estimate of the cell's time in seconds, or None without one.

        A plan for other settings or another GPU has no estimate.

        Args:
            cell: The cell.
            settings: Settings of the cell.
            cluster: The `cluster` block of the config.
        """
        return self._get_needs_of_same_plan(cell, settings, cluster).get("cell_time_high_s")

    def get_infeasibility_reason(
        self, cell: Cell, settings: Settings, cluster: Mapping[str, Any]
    ) -> str | None:
        """Return the plan's reason for which the cell cannot run, or None without one.

        A plan for other settings or another GPU has no reason.

        Args:
            cell: The cell.
            settings: Settings of the cell.
            cluster: The `cluster` block of the config.
        """
        return self._get_needs_of_same_plan(cell, settings, cluster).get("infeasible")

    def _get_needs_of_same_plan(
        self, cell: Cell, settings: Settings, cluster: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return a cell's planned needs. Empty if the plan is for other settings or another GPU."""
        planned = self._get_planned_needs(cell)
        is_same = self.gpu == cluster["gpu"] and planned.get("settings") == compute_settings_digest(
            settings
        )
        return planned if is_same else {}

    def _get_planned_needs(self, cell: Cell) -> Mapping[str, Any]:
        """Return the memory and time that the plan predicts for a cell.

        The needs of its first repeat replace them if the cell is not in the plan. A verdict adds repeats and
        blocks, which the plan does not have.
        """
        return self.cells.get(cell.path) or self.cells.get(replace(cell, repeat=0).path, {})


#: Fields of a cell in plan.json that this module reads, with their types.
_PLANNED = {
    "settings": str,
    "infeasible": str,
    "host_mem_mib": int,
    "servers_mem_mib": int,
    "cell_time_high_s": int,
}


def _check_planned_fields(planned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a cell in plan.json, after checking their types.

    Raises:
        TypeError: If a field has another type, or is negative.
    """
    for key, kind in _PLANNED.items():
        value = planned.get(key)
        if (
            not isinstance(value, kind | None)
            or value is True
            or (kind is int and (value or 0) < 0)
        ):
            raise TypeError(f"{key} is {value!r}")
    return dict(planned)


def compute_settings_digest(settings: Settings) -> str:
    """Return a digest of a cell's settings, which is the same for all repeats.

    A plan stores it, so that a reader knows for which settings it was made.
    """
    return hashlib.sha256(replace(settings, seed=0).as_json().encode()).hexdigest()
