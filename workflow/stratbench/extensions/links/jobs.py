"""Describes the job that measures links for a study: its resources and its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stratbench.strategies import get_mesh, get_strategy_class
from stratbench.study.config.config import Study
from stratbench.study.resources import (
    JobRequest,
    build_single_job_request,
    combine_requests,
    compute_job_time_limit_minutes,
)
from stratbench.study.slurm.nodes import Node, count_fitting_nodes
from stratbench.workload.network import models

#: Maximum duration of the measurement of links, in seconds.
LINKS_S = 1800
#: Maximum size of measured tensors. The time of larger tensors is proportional to their bytes.
MAX_MEASURED_MIB = 256


def make_links_request(
    study: Study, cluster: Mapping[str, Any], offered_nodes: Sequence[Node]
) -> JobRequest:
    """Return the resources of the job that measures links.

    The job has two nodes, so that links between nodes are measured as well. It has one node if no partition
    of `offered_nodes` has two suitable ones.

    Args:
        study: The study.
        cluster: The block `cluster` of the config.
        offered_nodes: Nodes that SLURM offers.
    """

    def make_request_for_node_count(nodes: int) -> JobRequest:
        workers = nodes * cluster["gpus_per_node"]
        full = {replace(c, gpus=workers, repeat=0): study.settings(c) for c in study.cells}
        requests = [build_single_job_request(c, s, cluster, LINKS_S) for c, s in full.items()]
        return combine_requests(requests, compute_job_time_limit_minutes(LINKS_S, cluster))

    return make_request_for_node_count(
        2 if count_fitting_nodes(make_request_for_node_count(2), offered_nodes) > 1 else 1
    )


def make_links_arguments(study: Study, cluster: Mapping[str, Any]) -> list[str]:
    """Return the arguments with which one node measures all exchanges of a study's strategies.

    The command line names the worker counts of cells and groups, the collectives, the servers' transports,
    and the largest model's size. A study of single workers measures two workers. On several nodes the
    measurement adds links between nodes.
    """
    most = cluster["gpus_per_node"]
    counts, kinds, transports = set(), set(), set()
    largest_mib, every_kind, on_gpus = 1, False, False
    for cell in study.cells:
        s = study.settings(cell)
        strategy = get_strategy_class(s.strategy)
        on_gpus |= s.device != "cpu"
        if strategy.kind == "server":
            wire = s.options["transport"]
            transports.add("shm" if wire == "auto" else wire)
        mesh = get_mesh(s.strategy, s.options, cell.gpus)
        counts |= {n for n in (cell.gpus, mesh.replicas, mesh.tensor, mesh.stages) if 1 < n <= most}
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
