"""Lists the training jobs of a study, with their cells, settings and resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.cell.settings import Settings
from stratbench.study.config.config import Study
from stratbench.study.config.messages import ConfigError
from stratbench.study.plan_file import PlanFile
from stratbench.study.resources import JobRequest, PlannedNeeds, build_job_request


class Jobs:
    """The training jobs of a study. Values are cached, because Snakemake asks for them often."""

    def __init__(self, config: Mapping[str, Any], study: Study) -> None:
        """Store a study and the validated config that contains it."""
        self.results: str = config["results"]
        self._study = study
        self._cluster = config["cluster"]
        self._plan = PlanFile(f"{self.results}/{study.name}/plan.json")
        self._cells = {cell.path: cell for cell in study.cells}
        self._settings: dict[Cell, Settings] = {}
        self._requests: dict[Cell, JobRequest] = {}

    @cached_property
    def skip_reasons(self) -> dict[str, str]:
        """Reasons why cells are skipped, by the cell's path.

        A cell is skipped if the plan calls it infeasible and `cluster.skip_infeasible` is true.
        """
        if not self._cluster["skip_infeasible"]:
            return {}
        reasons = {
            path: self._plan.get_infeasibility_reason(
                cell, self.resolve_settings(cell), self._cluster
            )
            for path, cell in self._cells.items()
        }
        return {path: reason for path, reason in reasons.items() if reason}

    def list_record_paths(self) -> list[str]:
        """Return the record paths of all cells that are not skipped, in the config's order."""
        return [
            str(cell.record_path(self.results))
            for path, cell in self._cells.items()
            if path not in self.skip_reasons
        ]

    def find_cell(self, wildcards: Mapping[str, str]) -> Cell:
        """Return the cell that the wildcards of a training job name.

        A verdict may ask for more repeats of a cell than the config does.

        Raises:
            ConfigError: If the study has no such cell, whatever the repeat.
        """
        path = CELL_PATTERN.format(**wildcards)
        first = self._cells.get(CELL_PATTERN.format(**{**wildcards, "repeat": 0}))
        if first is None:
            raise ConfigError(f"{path} is not a cell of the study {self._study.name!r}")
        return self._cells.get(path) or replace(first, repeat=int(wildcards["repeat"]))

    def resolve_settings(self, cell: Cell) -> Settings:
        """Return the settings that a cell is trained with."""
        if cell not in self._settings:
            self._settings[cell] = self._study.settings(cell)
        return self._settings[cell]

    def build_job_request(self, cell: Cell) -> JobRequest:
        """Return the resources that a cell's job requests from the scheduler."""
        if cell not in self._requests:
            needs = PlannedNeeds(
                host_mem_mib=self._plan.get_host_mem_mib(cell),
                servers_mem_mib=self._plan.get_servers_mem_mib(cell),
                max_time_s=self.estimate_max_time_s(cell),
            )
            limit_s = self._study.time_limit_s(cell)
            self._requests[cell] = build_job_request(
                cell, self.resolve_settings(cell), self._cluster, limit_s, needs
            )
        return self._requests[cell]

    def estimate_max_time_s(self, cell: Cell) -> float | None:
        """Return the plan's upper estimate of a cell's time in seconds, or None without one."""
        return self._plan.get_max_time_s(cell, self.resolve_settings(cell), self._cluster)
