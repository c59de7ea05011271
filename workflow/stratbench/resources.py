"""What a cell asks a scheduler for: shared by the rules, which ask, and the plan, which tells.

Nothing heavy is imported: the Snakefile uses it on every parse. `cluster` is config.yaml's block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.cells import Cell

#: Asked for where a cell has no time limit of its own, in minutes.
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


def read_needed_mib(plan: str | Path) -> dict[str, int]:
    """Host memory that cells need on a node by the study's plan.json, by path; empty without one."""
    try:
        cells = json.loads(Path(plan).read_text())["cells"]
        return {path: int(planned["host_mem_mib"]) for path, planned in cells.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # not planned, or not by this version


def runtime_min(time_limit_s: float | None, cluster: Mapping[str, Any]) -> int:
    """The scheduler's limit in minutes: the cell's own and an allowance, so that its own comes first."""
    if time_limit_s is None:
        return UNLIMITED_MIN
    return -(-int(time_limit_s + cluster["startup_allowance_s"]) // 60)
