"""Computes the resources that a cell's job requests from the scheduler, for the rules and the plan.

Nothing heavy is imported: the Snakefile uses this module on every parse. `cluster` is the block of
config.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.settings import Settings

#: Time limit in minutes of a job whose cell has neither a time limit nor a planned time.
UNLIMITED_MIN = 24 * 60
#: Memory in MiB that a job needs besides the processes in the plan: for two Snakemake processes, the
#: launcher, the fork server and the sampler.
JOB_MIB = 1024


@dataclass(frozen=True)
class JobRequest:
    """The resources that a job requests from the scheduler.

    Attributes:
        nodes: Number of nodes.
        gpus: GPUs per node.
        cpus: CPU cores per node.
        mem_mib: Memory per node in MiB.
        runtime_min: Time limit in minutes.
        is_memory_planned: Whether the memory is the plan's, not the config's.
        server_cpus: The cores among `cpus` that are for parameter servers.
        workers: Maximum number of workers that are separate jobs, or 0 if the workers run in this job.
        worker: Request of each worker that is a separate job.
        gpu_type: SLURM's name of the GPUs' type, or None for any type.
    """

    nodes: int
    gpus: int
    cpus: int
    mem_mib: int
    runtime_min: int
    is_memory_planned: bool = False
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
    def sbatch_options(self) -> list[str]:
        """The command-line options of sbatch for this request."""
        where = [f"--nodes={self.nodes}", f"--ntasks={self.nodes}"]
        gpus = [f"--gres={self.gres}"] if self.gpus else []
        memory = [f"--mem={self.mem_mib}M"] if self.mem_mib else []
        cpus, time = f"--cpus-per-task={self.cpus}", f"--time={self.runtime_min}"
        return [*where, *gpus, cpus, *memory, time]

    @property
    def sbatch_command(self) -> str:
        """The sbatch command of this request, and that of each separate worker job."""
        each = f"; up to {self.workers} times: {self.worker.sbatch_command}" if self.worker else ""
        return f"sbatch {' '.join(self.sbatch_options)}{each}"


@dataclass(frozen=True, kw_only=True)
class PlannedNeeds:
    """The memory and time that the plan predicts for a cell's job; 0 and None without a plan.

    Attributes:
        host_mem_mib: Host memory in MiB of the processes on the node with the most workers.
        servers_mem_mib: Host memory in MiB of all servers together.
        max_time_s: Upper estimate of the cell's time in seconds.
    """

    host_mem_mib: int = 0
    servers_mem_mib: int = 0
    max_time_s: float | None = None


NO_PLAN = PlannedNeeds()


def build_job_request(
    cell: Cell,
    settings: Settings,
    cluster: Mapping[str, Any],
    time_limit_s: float | None,
    needs: PlannedNeeds = NO_PLAN,
) -> JobRequest:
    """Return the resources that a cell's job requests. An extension may replace this request."""
    for _, make_request in iter_imported_additions("build_job_request"):
        if (request := make_request(cell, settings, cluster, time_limit_s, needs)) is not None:
            return request
    return build_single_job_request(cell, settings, cluster, time_limit_s, needs)


def build_single_job_request(
    cell: Cell,
    settings: Settings,
    cluster: Mapping[str, Any],
    time_limit_s: float | None,
    needs: PlannedNeeds = NO_PLAN,
) -> JobRequest:
    """Return the resource request of a cell whose workers and servers run in one job.

    A cell on GPUs requests cores and memory per GPU, and more memory if the plan predicts more. A cell on
    CPUs requests a core per thread, and the plan's memory or a small default.
    """
    host_mem_mib = needs.host_mem_mib
    of_node = count_workers_per_node(cell, cluster)
    n_nodes = count_nodes(cell, cluster)
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
        runtime_min=compute_job_time_limit_minutes(time_limit_s, cluster, needs.max_time_s),
        is_memory_planned=planned_mib,
        server_cpus=server_cpus,
        gpu_type=cluster["gpu_type"] if on_gpus else None,
    )


def count_nodes(cell: Cell, cluster: Mapping[str, Any]) -> int:
    """Return the number of nodes on which a cell runs."""
    return count_nodes_of_workers(cell.gpus, cluster)


def count_nodes_of_workers(gpus: int, cluster: Mapping[str, Any]) -> int:
    """Return the number of nodes on which a cell with `gpus` workers runs."""
    return -(-gpus // cluster["gpus_per_node"])


def count_workers_per_node(cell: Cell, cluster: Mapping[str, Any]) -> int:
    """Return the number of workers per node of a cell. The last node may have fewer."""
    return -(-cell.gpus // count_nodes(cell, cluster))


def compute_job_time_limit_minutes(
    time_limit_s: float | None, cluster: Mapping[str, Any], planned_s: float | None = None
) -> int:
    """Return the scheduler's time limit of a cell's job, in minutes.

    It is the cell's own limit plus an allowance, so that the cell's own limit ends it first. A cell without
    a limit of its own uses the plan's upper estimate, if there is one.

    Args:
        time_limit_s: Time limit of the cell in seconds, if any.
        cluster: The `cluster` block of the config.
        planned_s: The plan's upper estimate of the cell's time in seconds, if any.
    """
    time_limit_s = planned_s if time_limit_s is None else time_limit_s
    if time_limit_s is None:
        return UNLIMITED_MIN
    return -(-int(time_limit_s + cluster["startup_allowance_s"]) // 60)


def combine_requests(requests: Iterable[JobRequest], runtime_min: int) -> JobRequest:
    """Return a request that is large enough for each of several cells, for `runtime_min` minutes."""
    requests = list(requests)
    return JobRequest(
        nodes=max(r.nodes for r in requests),
        gpus=max(r.gpus for r in requests),
        cpus=max(r.cpus for r in requests),
        mem_mib=max(r.mem_mib for r in requests),
        runtime_min=runtime_min,
        is_memory_planned=any(r.is_memory_planned for r in requests),
        server_cpus=max(r.server_cpus for r in requests),
        gpu_type=next((r.gpu_type for r in requests if r.gpu_type), None),
    )
