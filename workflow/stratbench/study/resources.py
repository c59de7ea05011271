"""The request of a cell to a scheduler, made by the rules and shown by the plan.

Nothing heavy is imported: the Snakefile uses it on every parse. `cluster` is config.yaml's block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings

#: The limit in minutes where neither the cell's own limit nor a plan says how long it takes.
UNLIMITED_MIN = 24 * 60
#: Memory in MiB that a job needs besides the planned processes: two snakemakes, the launcher, the fork
#: server, the sampler.
JOB_MIB = 1024

#: The longest that the processes of a segment may take to start and to end, in seconds.
SEGMENT_ALLOWANCE_S = 180


@dataclass(frozen=True)
class JobRequest:
    """A cell's request: nodes, their GPUs, CPU cores and memory, and the time.

    `planned_mib`: whether the memory comes from the plan, not from the config. `server_cpus`: how many of
    `cpus` are for parameter servers. `workers`: maximum number of worker jobs of an elastic cell, each of
    which requests `worker`. `gpu_type`: SLURM's name of the GPUs, or None for any.
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
        """The sbatch command of this request, and of the workers' if the cell is elastic."""
        each = f"; up to {self.workers} times: {self.worker.sbatch}" if self.worker else ""
        return f"sbatch {' '.join(self.options)}{each}"


def job_request(
    cell: Cell,
    settings: Settings,
    cluster: Mapping[str, Any],
    time_limit_s: float | None,
    host_mem_mib: int = 0,
    longest_s: float | None = None,
    servers_mem_mib: int = 0,
) -> JobRequest:
    """Return the request of a cell.

    A cell on GPUs requests its GPUs' shares of a node, and more memory if the plan says so. A cell on CPUs
    requests its threads, and the plan's memory or a small default. An elastic cell requests only its servers,
    for longer: its workers wait in the queue. The last three arguments are the plan's, 0 and None without a
    plan.

    Args:
        cell: The cell.
        settings: Its settings.
        cluster: The `cluster` block of the config.
        time_limit_s: Time limit of the cell.
        host_mem_mib: Host memory of the processes on the fullest node.
        longest_s: Upper estimate of the cell's time.
        servers_mem_mib: Host memory of all servers together.
    """
    minutes = runtime_min(time_limit_s, cluster, longest_s)
    of_node = workers_of_node(cell, cluster)
    if "elastic" in settings.more:
        share = {k: v for k, v in settings.options.items() if k != "servers"}
        each = job_request(
            replace(cell, gpus=1),
            replace(settings.without("elastic"), gpus=1, options=share),
            cluster,
            time_limit_s,
            -(-host_mem_mib // of_node),
            longest_s,
        )
        minutes += math.ceil(60 * cluster["elastic_wait_h"])
        of_servers = _servers_request(settings, cluster, minutes, servers_mem_mib)
        each = replace(each, runtime_min=cluster["worker_time_limit_min"] or each.runtime_min)
        return replace(of_servers, workers=cell.gpus, worker=each)
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
        runtime_min=minutes,
        planned_mib=planned_mib,
        server_cpus=server_cpus,
        gpu_type=cluster["gpu_type"] if on_gpus else None,
    )


def _servers_request(
    settings: Settings, cluster: Mapping[str, Any], minutes: int, servers_mem_mib: int
) -> JobRequest:
    """Return the request of an elastic cell's own job: its servers and the supervisor of its workers."""
    servers = settings.options.get("servers", 0)
    cpus, mem_mib = servers * (settings.threads or 1), servers * cluster["mem_mib_per_cpu_worker"]
    if servers and cluster["request_gpus"] and settings.device != "cpu":
        cpus, mem_mib = cluster["server_cpus"], cluster["server_mem_mib"]
    return JobRequest(
        nodes=1,
        gpus=0,
        cpus=max(1, cpus),
        mem_mib=max(mem_mib, servers_mem_mib) + JOB_MIB,
        runtime_min=minutes,
        planned_mib=servers_mem_mib > mem_mib,
        server_cpus=max(1, cpus),
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


def segment_limit_s(
    time_limit_s: float | None, steps: int, total_steps: int | None
) -> float | None:
    """Return the limit of a segment: SEGMENT_ALLOWANCE_S, and its fraction of the cell's limit.

    A segment that reaches it belongs to a cell that would reach its own. None if the cell has no limit.

    Args:
        time_limit_s: Limit of the cell, if any.
        steps: Steps of the segment.
        total_steps: Steps of the cell, if known.
    """
    if time_limit_s is None:
        return None
    share = min(1.0, steps / total_steps) if total_steps else 1.0
    return SEGMENT_ALLOWANCE_S + share * time_limit_s


def block_min(limit_s: float | None, strategies: int, cluster: Mapping[str, Any]) -> int:
    """Return the scheduler's limit of a block, in minutes.

    Each strategy may take a third of `limit_s` for each of its segments, or all of it once; the burn-in may
    take as much.

    Args:
        limit_s: Limit of the block's segments, if any.
        strategies: Number of strategies.
        cluster: The `cluster` block of the config.
    """
    if limit_s is None:
        return UNLIMITED_MIN
    return -(-int((strategies + 1) * limit_s + cluster["startup_allowance_s"]) // 60)
