"""plan.json as the rules read it: what a cell will need, and whether it can run at all.

Written by `plan/`. Nothing heavy is imported: the Snakefile uses it on every parse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_json


class PlanFile:
    """What a study's plan.json says of its cells; nothing where there is none that can be read."""

    def __init__(self, path: str | Path) -> None:
        try:
            plan = read_json(path)
            self.gpu = plan["gpu"]
            self.memory_margin = plan["memory_margin"]
            self.cells = {cell: _planned(planned) for cell, planned in plan["cells"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.gpu, self.memory_margin, self.cells = None, None, {}

    def host_mem_mib(self, cell: Cell) -> int:
        """Host memory that the cell needs on a node; 0 where that is not known."""
        return self._needs(cell).get("host_mem_mib") or 0

    def longest_s(self, cell: Cell) -> float | None:
        """The longest that the cell is expected to take, in seconds; None where that is not known."""
        return self._needs(cell).get("cell_time_high_s")

    def _needs(self, cell: Cell) -> Mapping[str, Any]:
        """What is planned of the cell, else of its first repeat: a verdict adds repeats and blocks."""
        return self.cells.get(cell.path) or self.cells.get(replace(cell, repeat=0).path, {})

    def why_infeasible(
        self, cell: Cell, settings_json: str, cluster: Mapping[str, Any]
    ) -> str | None:
        """Why the cell cannot run, in words; None too where it was planned for anything else."""
        planned = self.cells.get(cell.path, {})
        same = (
            self.gpu == cluster["gpu"]
            and self.memory_margin == cluster["memory_margin"]
            and planned.get("settings") == digest_of_settings(settings_json)
        )
        return planned.get("infeasible") if same else None


#: What is read of a planned cell.
_PLANNED = {"settings": str, "infeasible": str, "host_mem_mib": int, "cell_time_high_s": int}


def _planned(planned: Mapping[str, Any]) -> dict[str, Any]:
    """What plan.json says of a cell; TypeError where it is of another kind."""
    for key, kind in _PLANNED.items():
        value = planned.get(key)
        if (
            not isinstance(value, kind | None)
            or value is True
            or (kind is int and (value or 0) < 0)
        ):
            raise TypeError(f"{key} is {value!r}")
    return dict(planned)


def digest_of_settings(settings_json: str) -> str:
    """A short form of a cell's settings, to see whether they are those that were planned."""
    return hashlib.sha256(settings_json.encode()).hexdigest()
