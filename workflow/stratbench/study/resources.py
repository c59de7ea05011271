"""The request of a cell to a scheduler, made by the rules and shown by the plan.

Nothing heavy is imported: the Snakefile uses it on every parse. `cluster` is config.yaml's block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import at
from stratbench.cell.settings import Settings

#: The limit in minutes if neither the cell's own limit nor a plan has one.
UNLIMITED_MIN = 24 * 60
#: Memory in MiB that a job needs besides the planned processes: two snakemakes, the launcher, the fork
#: server, the sampler.
JOB_MIB = 1024


@dataclass(frozen=True)
class JobRequest:
    """A cell's request: nodes, their GPUs, CPU cores and memory, and the time.

    `planned_mib`: whether the memory comes from the plan, not from the config. `server_cpus`: how many
    of `cpus` are asked for because of parameter servers. `workers`: how many jobs of their own the workers
    are at most, each of which asks for what `worker` does; 0: they are in this one. `gpu_type`: SLURM's
    name of the GPUs; None: any.
    """

    nodes: int
    gpus: int
    cpus: int
    mem_mib: int
    runtime_min: int
    planned_mib: bool = False
    server_cpus: int = 0
    workers: int = 0
    worker: JobRequest | None = None
    gpu_type: str | None = None

    @property
    def gres(self) -> str:
        """The GPUs of a node in SLURM's syntax, or empty if none are requested."""
        of_type = f"{self.gpu_type}:" if self.gpu_type else ""
        return f"gpu:{of_type}{self.gpus}" if self.gpus else ""

    @property
    def options(self) -> list[str]:
        """The options of sbatch that make this request."""
        where = [f"--nodes={self.nodes}", f"--ntasks={self.nodes}"]
        gpus = [f"--gres={self.gres}"] if self.gpus else []
        memory = [f"--mem={self.mem_mib}M"] if self.mem_mib else []
        cpus, time = f"--cpus-per-task={self.cpus}", f"--time={self.runtime_min}"
        return [*where, *gpus, cpus, *memory, time]

    @property
    def sbatch(self) -> str:
        """The command that makes this request to SLURM, and that of workers that are jobs of their own."""
        each = f"; up to {self.workers} times: {self.worker.sbatch}" if self.worker else ""
        return f"sbatch {' '.join(self.options)}{each}"


@dataclass(frozen=True, kw_only=True)
class PlannedNeeds:
    """The plan's needs of a cell's job; 0 and None without a plan.

    Attributes:
        host_mem_mib: Memory of the processes on the fullest node.
        servers_mem_mib: Memory of all servers together.
        longest_s: The upper estimate of its time.
    """

    host_mem_mib: int = 0
    servers_mem_mib: int = 0
    longest_s: float | None = None


NO_PLAN = PlannedNeeds()


def job_request(
    cell: Cell,
    settings: Settings,
    cluster: Mapping[str, Any],
    time_limit_s: float | None,
    needs: PlannedNeeds = NO_PLAN,
) -> JobRequest:
    """Return the request of a cell: its own, or what an extension asks for in its place."""
    for _, make_request in at("request"):
        if (request := make_request(cell, settings, cluster, time_limit_s, needs)) is not None:
            return request
    return plain_request(cell, settings, cluster, time_limit_s, needs)


def plain_request(
    cell: Cell,
    settings: Settings,
    cluster: Mapping[str, Any],
    time_limit_s: float | None,
    needs: PlannedNeeds = NO_PLAN,
) -> JobRequest:
    """Return the request of a cell whose workers and servers are one job.

    A cell on GPUs asks for its GPUs' shares of a node, and for more memory if the plan says so. A cell
    on CPUs asks for its threads, and for the plan's memory or a small default.
    """
    host_mem_mib = needs.host_mem_mib
    of_node = workers_of_node(cell, cluster)
    n_nodes = node_count(cell, cluster)
    servers = -(-settings.options.get("servers", 0) // n_nodes)
    on_gpus = cluster["request_gpus"] and settings.device != "cpu"
    if on_gpus:
        worker_cpus = of_node * cluster["cpus_per_gpu"]
        server_cpus = cluster["server_cpus"] if servers else 0
        mem_mib = of_node * cluster["mem_mib_per_gpu"]
        mem_mib += cluster["server_mem_mib"] if servers else 0
        planned_mib = host_mem_mib > mem_mib
        mem_mib = max(mem_mib, host_mem_mib)
    else:
        worker_cpus, server_cpus = (n * (settings.threads or 1) for n in (of_node, servers))
        planned_mib = host_mem_mib > 0
        mem_mib = (of_node + servers) * cluster["mem_mib_per_cpu_worker"]
        if planned_mib:
            mem_mib = -int(-host_mem_mib * (1 + cluster["memory_margin"]) // 1) + JOB_MIB
    return JobRequest(
        nodes=n_nodes,
        gpus=of_node if on_gpus else 0,
        cpus=worker_cpus + server_cpus,
        mem_mib=mem_mib,
        runtime_min=runtime_min(time_limit_s, cluster, needs.longest_s),
        planned_mib=planned_mib,
        server_cpus=server_cpus,
        gpu_type=cluster["gpu_type"] if on_gpus else None,
    )


def node_count(cell: Cell, cluster: Mapping[str, Any]) -> int:
    """Return the number of nodes that the cell spans."""
    return node_count_of(cell.gpus, cluster)


def node_count_of(gpus: int, cluster: Mapping[str, Any]) -> int:
    """Return the number of nodes that so many workers span."""
    return -(-gpus // cluster["gpus_per_node"])


def workers_of_node(cell: Cell, cluster: Mapping[str, Any]) -> int:
    """Return the workers of the cell's fullest node; the last one may have fewer."""
    return -(-cell.gpus // node_count(cell, cluster))


def runtime_min(
    time_limit_s: float | None, cluster: Mapping[str, Any], planned_s: float | None = None
) -> int:
    """Return the scheduler's limit in minutes.

    It is the cell's own plus an allowance, so that the cell's ends first. A cell without a limit of its own
    uses the upper estimate of the plan, if there is one.

    Args:
        time_limit_s: Limit of the cell, if any.
        cluster: The `cluster` block of the config.
        planned_s: Upper estimate of the plan, if any.
    """
    time_limit_s = planned_s if time_limit_s is None else time_limit_s
    if time_limit_s is None:
        return UNLIMITED_MIN
    return -(-int(time_limit_s + cluster["startup_allowance_s"]) // 60)


def largest_request(requests: Iterable[JobRequest], runtime_min: int) -> JobRequest:
    """Return the request of a job that can hold any of several cells for `runtime_min` minutes."""
    requests = list(requests)
    return JobRequest(
        nodes=max(r.nodes for r in requests),
        gpus=max(r.gpus for r in requests),
        cpus=max(r.cpus for r in requests),
        mem_mib=max(r.mem_mib for r in requests),
        runtime_min=runtime_min,
        planned_mib=any(r.planned_mib for r in requests),
        server_cpus=max(r.server_cpus for r in requests),
        gpu_type=next((r.gpu_type for r in requests if r.gpu_type), None),
    )
