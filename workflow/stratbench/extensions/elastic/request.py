"""Computes the SLURM resources of an elastic cell's own job and of its worker jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.study.resources import (
    JOB_MIB,
    JobRequest,
    PlannedNeeds,
    build_single_job_request,
    compute_job_time_limit_minutes,
    count_workers_per_node,
)


def request_workers(
    cell: Cell,
    settings: Settings,
    cluster: Mapping[str, Any],
    time_limit_s: float | None,
    needs: PlannedNeeds,
) -> JobRequest | None:
    """Return the resources that an elastic cell requests from SLURM, or None for other cells.

    The cell's own job requests memory and CPUs only for servers. It requests more time than the training
    takes, because worker jobs wait in the queue.

    Args:
        cell: The cell.
        settings: Settings of the cell.
        cluster: The block `cluster` of the config.
        time_limit_s: Time limit of the training in seconds, or None.
        needs: Memory and time that the plan predicts for the cell.
    """
    if "elastic" not in settings.more:
        return None
    share = {k: v for k, v in settings.options.items() if k != "servers"}
    each_mib = -(-needs.host_mem_mib // count_workers_per_node(cell, cluster))
    each = build_single_job_request(
        replace(cell, gpus=1),
        replace(settings, gpus=1, options=share),
        cluster,
        time_limit_s,
        PlannedNeeds(host_mem_mib=each_mib, max_time_s=needs.max_time_s),
    )
    each = replace(each, runtime_min=cluster["worker_time_limit_min"] or each.runtime_min)
    minutes = compute_job_time_limit_minutes(time_limit_s, cluster, needs.max_time_s)
    minutes += math.ceil(60 * cluster["elastic_wait_h"])
    request = make_own_job_request(settings, cluster, minutes, needs.servers_mem_mib)
    return replace(request, workers=cell.gpus, worker=each)


def make_own_job_request(
    settings: Settings, cluster: Mapping[str, Any], runtime_min: int, servers_mem_mib: int
) -> JobRequest:
    """Return the resources of an elastic cell's own job, which runs servers and supervises workers.

    Args:
        settings: Settings of the cell.
        cluster: The block `cluster` of the config.
        runtime_min: Requested wall time in minutes.
        servers_mem_mib: Planned memory of all servers in MiB; 0 if unknown.
    """
    servers = settings.options.get("servers", 0)
    cpus, mem_mib = servers * (settings.threads or 1), servers * cluster["mem_mib_per_cpu_worker"]
    if servers and cluster["request_gpus"] and settings.device != "cpu":
        cpus, mem_mib = cluster["server_cpus"], cluster["server_mem_mib"]
    return JobRequest(
        nodes=1,
        gpus=0,
        cpus=max(1, cpus),
        mem_mib=max(mem_mib, servers_mem_mib) + JOB_MIB,
        runtime_min=runtime_min,
        is_memory_planned=servers_mem_mib > mem_mib,
        server_cpus=max(1, cpus),
    )
