"""Reads measured links (`links.csv`), and computes from them the time of a collective."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from stratbench.cell.text.words import format_bytes
from stratbench.extensions.links.collective_cost import (
    FASTEST,
    Level,
    LinkLayout,
    LinkModel,
    get_algorithm_name,
    get_algorithms_by_name,
)
from stratbench.telemetry.collectives import CollectiveCall

#: Maximum ratio of a tensor's size to that of the largest measured tensor, if latency matters for the latter.
MAX_LARGER = 8
#: Bytes of a tensor from which on bandwidth dominates the time of a collective.
RATE_RULES_BYTES = 64 << 20


class Unmeasured(LookupError):
    """The links or the size of a collective were not measured. The message names the collective."""


class AlgorithmTime(NamedTuple):
    """Seconds of a collective, and the name of its algorithm."""

    seconds: float
    algorithm: str


@dataclass(frozen=True)
class Links:
    """Measured latencies and bandwidths of the links between workers.

    A level is "within" a node or "between" nodes.

    Attributes:
        library: nccl or gloo; servers-TRANSPORT for parameter servers.
        links_by_kind: Latency and bandwidth, by kind of collective and by level.
        computation_slowdown_factor: Factor by which computation is slower during a collective.
        largest_bytes_by_kind: Bytes of the largest measured tensor, by kind of collective.
        algorithm_by_kind: Name of the algorithm that fits the measured times best, by kind of collective.
    """

    library: str
    links_by_kind: Mapping[str, Mapping[Level, LinkModel]]
    computation_slowdown_factor: float = 1.0
    largest_bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    algorithm_by_kind: Mapping[str, str] = field(default_factory=dict)

    def check_measured_size(self, kind: str, n_bytes: float) -> None:
        """Raise Unmeasured if a tensor is much larger than those of measured collectives.

        It is not raised if bandwidth dominates the time of the largest measured tensor.
        """
        largest = self.largest_bytes_by_kind.get(kind, RATE_RULES_BYTES)
        if n_bytes > MAX_LARGER * largest and largest < RATE_RULES_BYTES:
            raise Unmeasured(
                f"the collective {kind} was measured up to {format_bytes(largest)} with {self.library}, but "
                f"a step sends {format_bytes(n_bytes)} at once: run `links` again with larger tensors"
            )

    def get_links_by_level(self, kind: str) -> Mapping[Level, LinkModel]:
        return self.links_by_kind.get(kind, {})

    def compute_collective_time(
        self, call: CollectiveCall, layout: LinkLayout, samples: int = 0
    ) -> AlgorithmTime:
        """Return the time of a collective.

        Its algorithm is that of the fit, or the fastest one.

        Args:
            call: The collective.
            layout: Number of workers per node, and of nodes.
            samples: Number of samples that a worker computes on.

        Raises:
            Unmeasured: If the kind was not measured on a level of the layout.
            KeyError: For a kind without an algorithm of the library.
        """
        n_bytes = call.n_bytes + samples * call.bytes_per_sample
        layout, groups_per_link = _get_group_layout(layout, call)
        if layout.workers == 1:
            return AlgorithmTime(0.0, "none")
        self.check_measured_size(call.collective_name, n_bytes)
        links = self.get_links_by_level(call.collective_name)
        levels: list[Level] = ["within"] if layout.workers_per_node > 1 else []
        levels += ["between"] if layout.nodes > 1 else []
        for level in levels:
            if level in links:
                continue
            raise Unmeasured(
                f"{call.collective_name} was not measured {level} nodes with {self.library}: "
                f"run `links` on {layout.nodes} nodes with {layout.workers_per_node} workers each"
            )
        # A level without measured links is not used here, so its time is 0.
        links = {"within": LinkModel(0.0, math.inf), "between": LinkModel(0.0, math.inf)} | dict(
            links
        )
        shared = links["between"].bytes_per_s / groups_per_link
        links["between"] = replace(links["between"], bytes_per_s=shared)
        name = self.algorithm_by_kind.get(call.collective_name, FASTEST)
        return min(
            AlgorithmTime(
                a(call.collective_name, n_bytes, layout).compute_time_s(links),
                get_algorithm_name(a),
            )
            for a in get_algorithms_by_name(name, self.library, call.collective_name)
        )


def _get_group_layout(layout: LinkLayout, call: CollectiveCall) -> tuple[LinkLayout, int]:
    """Return the layout of a collective's group, and how many groups share a node's link.

    If a node's ranks cannot be divided into groups of neighbours, some group spans two nodes, and limits all.
    """
    ranks, workers_per_node = call.group_size, layout.workers_per_node
    if ranks is None or ranks == layout.workers:
        return layout, 1
    if layout.nodes == 1:
        return LinkLayout(ranks), 1
    nodes = -(-ranks // max(1, workers_per_node // call.rank_stride))
    straddles = call.rank_stride == 1 and nodes == 1 and workers_per_node % ranks > 0
    return LinkLayout(ranks, 2 if straddles else nodes), min(
        call.rank_stride, workers_per_node
    ) if nodes > 1 else 1


def read_links(path: Path, library: str) -> Links:
    """Read the measured links of a library from a file `links.csv`.

    Raises:
        ValueError: If the file has another format.
        Unmeasured: If the file has no row of the library.
    """
    measured: dict[str, dict[Level, LinkModel]] = {}
    largest: dict[str, int] = {}
    algorithms: dict[str, str] = {}
    compute_slowdown = 1.0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["library"] != library:
                    continue
                link = LinkModel(
                    float(row["alpha_s"]), float(row["bytes_per_s"]), float(row["log_sd"])
                )
                measured.setdefault(row["kind"], {})[row["level"]] = link
                largest[row["kind"]] = int(row["largest_bytes"])
                algorithms[row["kind"]] = row["algorithm"]
                get_algorithms_by_name(row["algorithm"], library, row["kind"])
                slowed = float(row["kappa"] or "nan")
                compute_slowdown = slowed if math.isfinite(slowed) else compute_slowdown
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: is not a valid links.csv ({error!r}); run `links` again"
        ) from error
    if not measured:
        raise Unmeasured(f"{path} has no links of {library}: run `links` to measure them")
    return Links(library, measured, compute_slowdown, largest, algorithms)
