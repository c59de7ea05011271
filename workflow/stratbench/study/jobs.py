"""The training jobs of a study: cells, settings and resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.cell.settings import Settings
from stratbench.strategies import mesh_of, strategy_class
from stratbench.study.config.config import Study
from stratbench.study.config.messages import ConfigError
from stratbench.study.plan_file import PlanFile
from stratbench.study.resources import JobRequest, job_request, largest_request, runtime_min
from stratbench.study.slurm.nodes import Node, most_nodes
from stratbench.workload.network import models

#: Seconds that links are measured for at most.
LINKS_S = 1800
#: Links are measured with tensors up to this, or up to the largest model's weights: beyond it the time
#: grows with the bytes.
MAX_MEASURED_MIB = 256


class Jobs:
    """The training jobs of a study. Results are cached, since Snakemake asks often."""

    def __init__(self, config: Mapping[str, Any], study: Study) -> None:
        """`config`: validated; `study`: one of its studies."""
        self.results: str = config["results"]
        self._study = study
        self._cluster = config["cluster"]
        self._plan = PlanFile(f"{self.results}/{study.name}/plan.json")
        self._cells = {cell.path: cell for cell in study.cells}
        self._settings: dict[Cell, Settings] = {}
        self._requests: dict[Cell, JobRequest] = {}

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Reasons why cells are skipped, by path.

        The plan calls them infeasible, and the config skips such cells.
        """
        if not self._cluster["skip_infeasible"]:
            return {}
        reasons = {
            path: self._plan.why_infeasible(cell, self.settings_of(cell), self._cluster)
            for path, cell in self._cells.items()
        }
        return {path: reason for path, reason in reasons.items() if reason}

    def record_paths(self) -> list[str]:
        """Return the record paths of all cells that are not skipped, in the config's order."""
        return [
            str(cell.record_path(self.results))
            for path, cell in self._cells.items()
            if path not in self.skipped
        ]

    def links_request(self, offered: Sequence[Node]) -> JobRequest:
        """Return the scheduler request for measuring links: the maximum over the study's cells on full nodes.

        It has two nodes, so that the interconnect between them is measured, too. It has one node if no
        partition of `offered` has two that are large enough.
        """

        def asked(nodes: int) -> JobRequest:
            workers = nodes * self._cluster["gpus_per_node"]
            full = {
                replace(c, gpus=workers, repeat=0): self.settings_of(c).without("elastic")
                for c in self._cells.values()
            }
            requests = [job_request(c, s, self._cluster, LINKS_S) for c, s in full.items()]
            return largest_request(requests, runtime_min(LINKS_S, self._cluster))

        return asked(2 if most_nodes(asked(2), offered) > 1 else 1)

    def links_arguments(self) -> list[str]:
        """Return the arguments for measuring links: everything that the strategies exchange on one node.

        They are the worker counts and those of groups of workers within them, the kinds of collectives that
        the strategies name, the servers' transports, and tensors up to the largest model. A study of single
        workers measures two. On several nodes the measurement adds the interconnect.
        """
        most = self._cluster["gpus_per_node"]
        counts, kinds, transports = set(), set(), set()
        largest_mib, every_kind, on_gpus = 1, False, False
        for cell in self._cells.values():
            s = self.settings_of(cell)
            strategy = strategy_class(s.strategy)
            on_gpus |= s.device != "cpu"
            if strategy.kind == "server":
                wire = s.options["transport"]
                transports.add("shm" if wire == "auto" else wire)
            mesh = mesh_of(s.strategy, s.options, cell.gpus)
            counts |= {
                n for n in (cell.gpus, mesh.replicas, mesh.tensor, mesh.stages) if 1 < n <= most
            }
            every_kind |= strategy.collectives is None
            kinds |= set(strategy.collectives or ())
            known = models.MODELS.get(cell.model)
            parameters = known.parameters if known else None
            mib = MAX_MEASURED_MIB if parameters is None else -(-4 * parameters // (1 << 20))
            largest_mib = max(largest_mib, min(MAX_MEASURED_MIB, mib))
        arguments = ["--a-node", str(most), "--workers", *map(str, sorted(counts or {2}))]
        arguments += ["--largest-mib", str(largest_mib)]
        if (kinds or transports) and not every_kind:
            arguments += ["--kinds", *sorted(kinds)]
        if on_gpus:
            arguments.append("--gpus")
        if transports:
            arguments += ["--servers", *sorted(transports)]
        return arguments

    def cell_of(self, wildcards: Mapping[str, str]) -> Cell:
        """Return the cell that a training job's wildcards name.

        A verdict may ask for more repeats of a cell than the config does.

        Raises:
            ConfigError: If the study has no such cell.
        """
        path = CELL_PATTERN.format(**wildcards)
        first = self._cells.get(CELL_PATTERN.format(**{**wildcards, "repeat": 0}))
        if first is None:
            raise ConfigError(f"{path} is not a cell of the study {self._study.name!r}")
        return self._cells.get(path) or replace(first, repeat=int(wildcards["repeat"]))

    def settings_of(self, cell: Cell) -> Settings:
        """Return the settings that a cell is trained with."""
        if cell not in self._settings:
            self._settings[cell] = self._study.settings(cell)
        return self._settings[cell]

    def request_of(self, cell: Cell) -> JobRequest:
        """Return the request of a cell to the scheduler."""
        if cell not in self._requests:
            settings, cluster = self.settings_of(cell), self._cluster
            self._requests[cell] = job_request(
                cell,
                settings,
                cluster,
                self._study.time_limit_s(cell),
                self._plan.host_mem_mib(cell),
                self.longest_s(cell),
                self._plan.servers_mem_mib(cell),
            )
        return self._requests[cell]

    def longest_s(self, cell: Cell) -> float | None:
        """Return the plan's upper estimate of a cell's time, in seconds.

        Return None where there is none.
        """
        return self._plan.longest_s(cell, self.settings_of(cell), self._cluster)
