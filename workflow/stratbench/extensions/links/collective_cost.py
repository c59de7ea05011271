"""Computes the cost of collectives by the algorithms of NCCL and gloo.

The module does not import torch. The formulas count steps and bytes. The cost of a step and of a byte is
measured (`extensions/links/measure.py`), never fitted to training times. Fits at 1 and 2 GPUs were wrong by
more than the time itself at 64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Level = Literal["within", "between"]


@dataclass(frozen=True)
class LinkModel:
    """Latency and bandwidth of the links within nodes, or of those between nodes.

    Attributes:
        latency_s: Latency of a step, in seconds.
        bytes_per_s: Bandwidth; between nodes that of a whole node's connection, one way.
        log_error_sd: Standard deviation of ln(measured / fitted time).
    """

    latency_s: float
    bytes_per_s: float
    log_error_sd: float = 0.0


@dataclass(frozen=True)
class LinkLayout:
    """A number of workers that are spread evenly over nodes."""

    workers: int
    nodes: int = 1

    @property
    def workers_per_node(self) -> int:
        return -(-self.workers // self.nodes)


@dataclass(frozen=True)
class CollectiveTime:
    """Measured seconds of a collective over a tensor of `n_bytes`, on the slowest rank."""

    library: str
    kind: str
    workers: int
    nodes: int
    n_bytes: int
    repeat: int
    seconds: float


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of a collective for a rank: steps and bytes, within nodes and between nodes.

    The rank waits for all of them, one after the other.

    Attributes:
        steps_by_level: Number of the collective's steps by level (`within` nodes or `between` nodes). Each
            step costs the latency of this level's links.
        bytes_by_level: Bytes by level.
    """

    steps_by_level: Mapping[Level, float]
    bytes_by_level: Mapping[Level, float]

    def compute_time_s(self, links: Mapping[Level, LinkModel]) -> float:
        total_s = 0.0
        for level, steps in self.steps_by_level.items():
            if steps:
                link = links[level]
                total_s += steps * link.latency_s + self.bytes_by_level[level] / link.bytes_per_s
        return total_s


def compute_ring_cost(kind: str, n_bytes: float, layout: LinkLayout) -> CollectiveCost:
    """Return the cost of a collective over one ring of all ranks.

    The slowest link limits the ring. An all-reduce takes 2(N-1) steps of S/N bytes, gather and scatter half
    of that (Patarasuk and Yuan 2009). With n nodes, n of the N ranks have their next neighbour on another
    node, as NCCL counts (tuning.cc).

    Args:
        kind: Kind of the collective.
        n_bytes: Bytes of the full tensor.
        layout: Ranks per node, and nodes.
    """
    rounds = 2 if kind == "all_reduce" else 1
    n, nodes = layout.workers, layout.nodes
    between = rounds * (nodes - 1)
    volume = rounds * (n - 1) / n * n_bytes
    if nodes == 1:
        return CollectiveCost({"within": rounds * (n - 1)}, {"within": volume})
    # Bytes pass within and between nodes at the same time. Only those between nodes count, since these links
    # are slower.
    return CollectiveCost(
        {"within": rounds * (n - 1) - between, "between": between},
        {
            "within": 0.0,
            "between": volume,
        },
    )


def compute_tree_cost(kind: str, n_bytes: float, layout: LinkLayout) -> CollectiveCost:
    """Return the cost of a collective over a pipelined binary tree of ranks.

    The tree takes log2 steps up, and as many down again for an all-reduce. Each step has S bytes. NCCL's tree
    spans the nodes, with a chain in each node. Here the steps of a chain count like those of a tree.

    Args:
        kind: Kind of the collective.
        n_bytes: Bytes of the full tensor.
        layout: Ranks per node, and nodes.
    """
    rounds = 2 if kind == "all_reduce" else 1
    between = math.ceil(math.log2(layout.nodes)) if layout.nodes > 1 else 0
    within = math.ceil(math.log2(layout.workers_per_node)) if layout.workers_per_node > 1 else 0
    if not between:
        return CollectiveCost({"within": rounds * within}, {"within": rounds * n_bytes})
    return CollectiveCost(
        {"within": rounds * within, "between": rounds * between},
        {"within": 0.0, "between": rounds * n_bytes},
    )


def compute_hierarchical_cost(kind: str, n_bytes: float, layout: LinkLayout) -> CollectiveCost:
    """Return the cost of a collective over rings within nodes and rings between nodes.

    The rings between nodes connect equal ranks, and run concurrently. With g ranks per node, an all-reduce is
    a scatter within nodes, an all-reduce of S/g between nodes, and a gather within nodes. A node's connection
    carries all g parts: S (n-1)/n bytes each way.

    Args:
        kind: Kind of the collective.
        n_bytes: Bytes of the full tensor.
        layout: Ranks per node, and nodes.
    """
    rounds = 2 if kind == "all_reduce" else 1
    g, nodes = layout.workers_per_node, layout.nodes
    return CollectiveCost(
        {"within": rounds * (g - 1), "between": rounds * (nodes - 1)},
        {
            "within": rounds * (g - 1) / g * n_bytes,
            "between": rounds * (nodes - 1) / nodes * n_bytes,
        },
    )


def compute_direct_cost(kind: str, n_bytes: float, layout: LinkLayout) -> CollectiveCost:
    """Return the cost of one send from one rank to another.

    Args:
        kind: Kind of the collective.
        n_bytes: Bytes of the full tensor.
        layout: Ranks per node, and nodes.
    """
    level: Level = "between" if layout.nodes > 1 else "within"
    return CollectiveCost({level: 1}, {level: n_bytes})


Algorithm = Callable[[str, float, LinkLayout], CollectiveCost]

#: Algorithms that each library may choose, per kind of collective. The first one is slowest on many workers.
#: NCCL chooses the algorithm that it predicts to be fastest. Gloo in PyTorch has one per kind: a tree for
#: broadcast, otherwise a ring (RING is the default of its all-reduce, ProcessGroupGloo). Its reduce-scatter
#: is an all-reduce.
ALGORITHMS: dict[str, dict[str, tuple[Algorithm, ...]]] = {
    "nccl": {
        "all_reduce": (compute_ring_cost, compute_hierarchical_cost, compute_tree_cost),
        "all_gather": (compute_ring_cost, compute_hierarchical_cost),
        "reduce_scatter": (compute_ring_cost, compute_hierarchical_cost),
        "broadcast": (compute_ring_cost, compute_tree_cost),
        "send": (compute_direct_cost,),
    },
    "gloo": {
        "all_reduce": (compute_ring_cost,),
        "all_gather": (compute_ring_cost,),
        "reduce_scatter": (compute_ring_cost,),
        "broadcast": (compute_tree_cost,),
        "send": (compute_direct_cost,),
    },
}


def compute_served_cost(kind: str, n_bytes: float, layout: LinkLayout) -> CollectiveCost:
    """Return the cost of each worker's push and pull, which one server answers in turn.

    Args:
        kind: Kind of the collective.
        n_bytes: Bytes of the full tensor.
        layout: Ranks per node, and nodes.
    """
    level: Level = "between" if layout.nodes > 1 else "within"
    return CollectiveCost({level: 1}, {level: layout.workers * n_bytes})


#: In place of an algorithm's name in links.csv: for each tensor, the library's fastest algorithm counts.
FASTEST = "fastest"


def get_algorithm_name(algorithm: Algorithm) -> str:
    """Return the name of an algorithm in `links.csv`, such as `ring`."""
    return algorithm.__name__.removeprefix("compute_").removesuffix("_cost")


def get_algorithms_by_name(name: str, library: str, kind: str) -> tuple[Algorithm, ...]:
    """Return the collective algorithms for which a name in `links.csv` stands.

    If there are several, the fastest of them counts.

    Args:
        name: Name in the row.
        library: Library of the link.
        kind: Kind of the collective.

    Raises:
        ValueError: For an unknown name.
    """
    if name == FASTEST:
        return ALGORITHMS[library][kind]
    known = {
        get_algorithm_name(f): f
        for f in (
            compute_ring_cost,
            compute_tree_cost,
            compute_hierarchical_cost,
            compute_direct_cost,
            compute_served_cost,
        )
    }
    if name not in known:
        raise ValueError(
            f"links.csv: unknown algorithm {name!r}, expected one of {', '.join([*known, FASTEST])}"
        )
    return (known[name],)


@dataclass(frozen=True)
class FittedLink:
    """A row of `links.csv`: fitted latency and bandwidth of one kind of collective.

    The row is on links within nodes, or on links between nodes.

    Attributes:
        knee_bytes: Bytes of a step's message whose latency and transfer take equal time; below it
            latency dominates.
        log_sd: Root mean square of ln(measured / fitted) over all times of the kind.
        workers: Largest measured number of workers.
        times: Number of measured times.
    """

    library: str
    kind: str
    level: str
    algorithm: str
    alpha_s: float
    bytes_per_s: float
    knee_bytes: float
    log_sd: float
    workers: int
    smallest_bytes: int
    largest_bytes: int
    times: int


#: Two fits are equally good if their root mean square residuals of ln(time) differ by less than this.
ALIKE = 0.01
#: Maximum number of times that the links are fitted and the fastest algorithms chosen anew.
MAX_TURNS = 20


@dataclass(frozen=True)
class _Fit:
    """Latency and bandwidth that were fitted to the times of one kind of collective.

    Attributes:
        rms_log_error_of_medians: Root mean square of ln(median time / fitted time).
        rms_log_error_of_all_times: Root mean square of ln(time / fitted time) over all times.
        links_by_level: Fitted links by level.
        algorithm_name: Name of the algorithm, or "fastest".
    """

    rms_log_error_of_medians: float
    rms_log_error_of_all_times: float
    links_by_level: Mapping[Level, LinkModel]
    algorithm_name: str


def fit_links(times: Sequence[CollectiveTime]) -> list[FittedLink]:
    """Return latency and bandwidth of each kind of collective, within and between nodes.

    Latency and bandwidth are fitted to median times. The fit minimises squared relative errors over all
    worker counts and sizes, with values of at least zero. It uses one algorithm for all tensors, or the
    fastest for each tensor, whichever fits best. If fits are equally good within ALIKE, the first counts.
    Links whose times do not depend on bytes have infinite bandwidth.
    """
    rows = []
    for library, kind in dict.fromkeys((t.library, t.kind) for t in times):
        same_kind = [t for t in times if (t.library, t.kind) == (library, kind)]
        fit = _fit_links_of_kind(library, kind, same_kind)
        sizes = [t.n_bytes for t in same_kind]
        rows += [
            FittedLink(
                library, kind, level, fit.algorithm_name, link.latency_s, link.bytes_per_s,
                link.latency_s * link.bytes_per_s, fit.rms_log_error_of_all_times,
                max(t.workers for t in same_kind), min(sizes), max(sizes), len(same_kind),
            )
            for level, link in fit.links_by_level.items()
        ]  # fmt: skip
    return rows


def _fit_links_of_kind(library: str, kind: str, times: Sequence[CollectiveTime]) -> _Fit:
    if kind == "push_pull":
        return _fit_links_and_algorithms((compute_served_cost,), times, compute_served_cost)
    algorithms = ALGORITHMS[library][kind]
    fits = [_fit_links_and_algorithms((a,), times, a) for a in algorithms]
    if len(algorithms) > 1:
        fastest = min(
            (_fit_links_and_algorithms(algorithms, times, a) for a in algorithms),
            key=lambda fit: fit.rms_log_error_of_medians,
        )
        fits.append(replace(fastest, algorithm_name=FASTEST))
    best = min(fit.rms_log_error_of_medians for fit in fits)
    return next(fit for fit in fits if fit.rms_log_error_of_medians < best + ALIKE)


def _fit_links_and_algorithms(
    algorithms: Sequence[Algorithm], times: Sequence[CollectiveTime], first_algorithm: Algorithm
) -> _Fit:
    """Fit the links and choose each tensor's fastest algorithm, alternately.

    The first fit uses `first_algorithm` for all tensors.
    """
    repeats: dict[tuple[int, int, int], list[float]] = {}
    for t in times:
        repeats.setdefault((t.workers, t.nodes, t.n_bytes), []).append(t.seconds)
    kind = times[0].kind
    tensors = [(kind, size, LinkLayout(n, nodes)) for n, nodes, size in repeats]
    medians = [statistics.median(values) for values in repeats.values()]

    def compute_squared_log_error(measured_s: float, fitted_s: float) -> float:
        return math.log(measured_s / max(fitted_s, 1e-9 * measured_s)) ** 2

    chosen = [first_algorithm] * len(tensors)
    fits = []
    for _ in range(MAX_TURNS):
        links = _fit_links_to_costs(
            [a(*tensor) for a, tensor in zip(chosen, tensors, strict=True)], medians
        )
        costs = [[(a(*tensor).compute_time_s(links), a) for a in algorithms] for tensor in tensors]
        fastest = [min(of_one, key=lambda cost: cost[0]) for of_one in costs]
        fitted = [seconds for seconds, _ in fastest]
        misfit = math.sqrt(statistics.fmean(map(compute_squared_log_error, medians, fitted)))
        each = zip(fitted, repeats.values(), strict=True)
        log_sd = math.sqrt(
            statistics.fmean(compute_squared_log_error(t, f) for f, of_fit in each for t in of_fit)
        )
        fits.append(_Fit(misfit, log_sd, links, get_algorithm_name(first_algorithm)))
        before, chosen = chosen, [a for _, a in fastest]
        if chosen == before:
            break
    return min(fits, key=lambda fit: fit.rms_log_error_of_medians)


def _fit_links_to_costs(
    costs: Sequence[CollectiveCost], measured_s: Sequence[float]
) -> dict[Level, LinkModel]:
    """Return the latencies and bandwidths with which the costs best match measured seconds.

    The links are fitted by least squares of relative errors.
    """
    import numpy as np  # imported here, since other functions do not need numpy and scipy
    from scipy.optimize import nnls

    levels = list(
        dict.fromkeys(level for c in costs for level in c.steps_by_level if c.steps_by_level[level])
    )
    columns = [[c.steps_by_level.get(level, 0.0) for c in costs] for level in levels]
    columns += [[c.bytes_by_level.get(level, 0.0) for c in costs] for level in levels]
    design = np.array(columns, dtype=float).T / np.array(measured_s)[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    values = nnls(design / scale, np.ones(len(costs)))[0] / scale
    n = len(levels)
    return {
        level: LinkModel(float(values[i]), 1 / float(values[n + i]) if values[n + i] else math.inf)
        for i, level in enumerate(levels)
    }
