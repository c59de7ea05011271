"""The job that measures links for a study: what it asks a scheduler for, and its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stratbench.strategies import mesh_of, strategy_class
from stratbench.study.config.config import Study
from stratbench.study.resources import JobRequest, largest_request, plain_request, runtime_min
from stratbench.study.slurm.nodes import Node, most_nodes
from stratbench.workload.network import models

#: Seconds that links are measured for at most.
LINKS_S = 1800
#: Links are measured with tensors up to this, or up to the largest model's weights: beyond it the time
#: grows with the bytes.
MAX_MEASURED_MIB = 256


def links_request(study: Study, cluster: Mapping[str, Any], offered: Sequence[Node]) -> JobRequest:
    """Return the request of the measurement: what any of the study's cells on full nodes asks for.

    On two nodes, so that what is between them is measured, too, or on one where no partition of
    `offered` has two that can hold it.
    """

    def request_on(nodes: int) -> JobRequest:
        workers = nodes * cluster["gpus_per_node"]
        full = {replace(c, gpus=workers, repeat=0): study.settings(c) for c in study.cells}
        requests = [plain_request(c, s, cluster, LINKS_S) for c, s in full.items()]
        return largest_request(requests, runtime_min(LINKS_S, cluster))

    return request_on(2 if most_nodes(request_on(2), offered) > 1 else 1)


def links_arguments(study: Study, cluster: Mapping[str, Any]) -> list[str]:
    """Return the command line of the measurement: all that strategies exchange by on one node.

    Its counts and those of groups of workers within them, the kinds of collectives that the strategies
    name, the servers' transports, tensors up to the largest model. A study of single workers measures
    two. On several nodes the measurement adds what is between them.
    """
    most = cluster["gpus_per_node"]
    counts, kinds, transports = set(), set(), set()
    largest_mib, every_kind, on_gpus = 1, False, False
    for cell in study.cells:
        s = study.settings(cell)
        strategy = strategy_class(s.strategy)
        on_gpus |= s.device != "cpu"
        if strategy.kind == "server":
            wire = s.options["transport"]
            transports.add("shm" if wire == "auto" else wire)
        mesh = mesh_of(s.strategy, s.options, cell.gpus)
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
