"""Reports, before the first submission, which jobs are too large for every node; follows the jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.study.resources import JobRequest
from stratbench.study.slurm import nodes
from stratbench.study.slurm.executor import follow_jobs
from stratbench.study.slurm.followed import FollowedRun
from stratbench.study.slurm.live_jobs import print_to_stderr


def read_submitted_request(resources: Any) -> JobRequest:
    """Return the request that a Snakemake job makes to SLURM, including the profile's changes."""
    gres = str(resources.get("gres") or "")
    types = list(nodes.count_gpus_by_type(gres))
    return JobRequest(
        nodes=int(resources.get("nodes") or 1),
        gpus=nodes.count_gpus(gres),
        gpu_type=types[0] if len(types) == 1 else None,
        cpus=int(resources.get("cpus_per_task") or 1),
        mem_mib=int(resources.get("mem_mb") or 0),
        runtime_min=int(resources.get("runtime") or 0),
    )


@dataclass(frozen=True)
class Submission:
    """A job that is to be submitted to SLURM.

    Attributes:
        job: Snakemake's job.
        cell: The job's cell, or the first cell of a block.
        settings: Settings of the cell.
        job_request: Request that follows from the config, before the profile's changes.
        max_time_s: The plan's upper estimate of the job's time in seconds, if any.
    """

    job: Any
    cell: Cell
    settings: Settings
    job_request: JobRequest
    max_time_s: float | None = None


def check_and_follow_submissions(workflow: Any, submissions: Sequence[Submission]) -> list[str]:
    """Return sentences on jobs that are too large for every node. Without any, follow all jobs.

    Args:
        workflow: Snakemake's workflow, which is about to submit to SLURM.
        submissions: All jobs to submit.
    """
    # With `partition_config`, the SLURM plugin chooses the partition, so the nodes of all partitions count.
    in_any_partition = getattr(workflow.executor_settings, "partition_config", None) is not None
    cluster_nodes = nodes.read_cluster_nodes()
    if refused := find_refused_cells(submissions, cluster_nodes, in_any_partition):
        return nodes.format_refusals(refused)
    partitions = {
        "*" if in_any_partition else s.job.resources.get("slurm_partition") for s in submissions
    }
    of_partitions = [n for p in partitions for n in nodes.select_partition_nodes(cluster_nodes, p)]
    requests = [read_submitted_request(s.job.resources) for s in submissions]
    if mixed := nodes.describe_mixed_gpu_types(of_partitions, requests):
        print_to_stderr(mixed)
    firsts = [str(s.job.output[0]) for s in submissions]
    asks = map(nodes.describe_request, (s.cell for s in submissions), requests)
    times = {f: s.max_time_s for f, s in zip(firsts, submissions, strict=True) if s.max_time_s}
    follow_jobs(
        workflow, FollowedRun(dict(zip(firsts, asks, strict=True)), times, len(submissions))
    )
    return []


def find_refused_cells(
    submissions: Iterable[Submission], cluster_nodes: list[nodes.Node], in_any_partition: bool
) -> dict[Cell, str]:
    """Return a sentence for each cell whose job is too large for every node.

    Args:
        submissions: Jobs to submit.
        cluster_nodes: Nodes of the cluster.
        in_any_partition: Whether a job may run in any partition.
    """
    reasons = {}
    for s in submissions:
        resources, cell, settings, from_config = s.job.resources, s.cell, s.settings, s.job_request
        request = read_submitted_request(resources)
        partition = "*" if in_any_partition else resources.get("slurm_partition")
        is_from_profile = _get_comparable_values(request) != _get_comparable_values(from_config)
        sentence = nodes.explain_oversized_job(
            cell,
            settings,
            request if is_from_profile else from_config,
            nodes.select_partition_nodes(cluster_nodes, partition),
            is_from_profile,
        )
        # An elastic cell also has worker jobs. Their partition may differ, so all nodes count.
        if sentence is None and from_config.worker:
            sentence = nodes.explain_oversized_job(
                cell, settings, from_config.worker, cluster_nodes
            )
        if sentence:
            reasons[cell] = sentence
    return reasons


def _get_comparable_values(request: JobRequest) -> tuple[Any, ...]:
    gpus = request.gpus, request.gpu_type
    return request.nodes, *gpus, request.cpus, request.mem_mib, request.runtime_min
