"""What a cell asks a scheduler for: shared by the rules, which ask, and the plan, which tells.

Nothing heavy is imported: the Snakefile uses it on every parse. `cluster` is config.yaml's block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.cells import Cell
from stratbench.files import read_json

#: Asked for where neither a limit of the cell's own nor a plan says how long it takes, in minutes.
UNLIMITED_MIN = 24 * 60


def nodes(cell: Cell, cluster: Mapping[str, Any]) -> int:
    """Nodes that the cell spans."""
    return -(-cell.gpus // cluster["gpus_per_node"])


def workers_per_node(cell: Cell, cluster: Mapping[str, Any]) -> int:
    """Workers on each node; the last node may have fewer."""
    return -(-cell.gpus // nodes(cell, cluster))


def cpus(cell: Cell, cluster: Mapping[str, Any], served: bool) -> int:
    """CPU cores on each node: the workers' and, for a `served` cell, the parameter servers'."""
    servers_cpus = cluster["server_cpus"] if served else 0
    return workers_per_node(cell, cluster) * cluster["cpus_per_gpu"] + servers_cpus


def gres(cell: Cell, cluster: Mapping[str, Any], device: str) -> str:
    """GPUs on each node, as SLURM writes it; empty for a cell that trains on CPUs."""
    wanted = cluster["request_gpus"] and device != "cpu"
    return f"gpu:{workers_per_node(cell, cluster)}" if wanted else ""


def mem_mib(cell: Cell, cluster: Mapping[str, Any], served: bool, needed_mib: int = 0) -> int:
    """Host memory on each node, in MiB: the config's, or `needed_mib` where a plan says more."""
    servers_mib = cluster["server_mem_mib"] if served else 0
    return max(
        workers_per_node(cell, cluster) * cluster["mem_mib_per_gpu"] + servers_mib, needed_mib
    )


class StudyPlan:
    """What a study's plan.json says of its cells: nothing where there is none that can be read."""

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
        return self.cells.get(cell.path, {}).get("host_mem_mib") or 0

    def longest_s(self, cell: Cell) -> float | None:
        """The longest that the cell is expected to take, in seconds; None where that is not known."""
        return self.cells.get(cell.path, {}).get("cell_time_high_s")

    def infeasible(self, cell: Cell, settings_json: str, cluster: Mapping[str, Any]) -> str | None:
        """Why the cell cannot run, in words; None too where it was planned for anything else."""
        planned = self.cells.get(cell.path, {})
        same = (
            self.gpu == cluster["gpu"]
            and self.memory_margin == cluster["memory_margin"]
            and planned.get("settings") == sha256_of_text(settings_json)
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


def sha256_of_text(text: str) -> str:
    """To see whether settings are those that were planned."""
    return hashlib.sha256(text.encode()).hexdigest()


def runtime_min(
    time_limit_s: float | None, cluster: Mapping[str, Any], planned_s: float | None = None
) -> int:
    """The scheduler's limit in minutes: the cell's own and an allowance, so that its own comes first.

    Without a limit of its own, the longest time of the plan instead, where there is one.
    """
    time_limit_s = planned_s if time_limit_s is None else time_limit_s
    if time_limit_s is None:
        return UNLIMITED_MIN
    return -(-int(time_limit_s + cluster["startup_allowance_s"]) // 60)
