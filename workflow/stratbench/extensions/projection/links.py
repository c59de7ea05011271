"""Reads a site's measured links (`links.csv`), and computes the time of a collective on a layout."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stratbench.cell.text.words import format_bytes
from stratbench.extensions.links.collective_cost import (
    FASTEST,
    Level,
    LinkLayout,
    LinkModel,
    get_named_algorithms,
)
from stratbench.telemetry.collectives import CollectiveCall

#: A tensor may be this many times larger than the largest measured one, unless the latter has enough bytes
#: for bandwidth to dominate its time.
MAX_LARGER, RATE_RULES_BYTES = 8, 64 << 20


class Unmeasured(LookupError):
    """A collective's link or size was not measured. The message names the collective."""


@dataclass(frozen=True)
class Links:
    """Measured links of a site, per kind of collective and level.

    Attributes:
        library: nccl or gloo.
        links_by_kind: Latency and bandwidth, by kind of collective and level.
        compute_slowdown: Factor by which computation is slower during a collective.
        largest_bytes_by_kind: Bytes of the largest measured tensor, by kind.
        algorithm_by_kind: Algorithm of the fit, by kind.
    """

    library: str
    links_by_kind: Mapping[str, Mapping[Level, LinkModel]]
    compute_slowdown: float = 1.0
    largest_bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    algorithm_by_kind: Mapping[str, str] = field(default_factory=dict)

    def check_size(self, kind: str, n_bytes: float) -> None:
        """Raise Unmeasured if a collective is much larger than the largest measured one.

        The error is raised only if latency dominated the measured times.
        """
        largest = self.largest_bytes_by_kind.get(kind, RATE_RULES_BYTES)
        if n_bytes > MAX_LARGER * largest and largest < RATE_RULES_BYTES:
            raise Unmeasured(
                f"{kind} was measured up to {format_bytes(largest)} with {self.library}, and a step sends "
                f"{format_bytes(n_bytes)} at once: run `links` again with larger tensors"
            )

    def get_links_by_level(self, kind: str) -> Mapping[Level, LinkModel]:
        return self.links_by_kind.get(kind, {})

    def time_collective(
        self, call: CollectiveCall, layout: LinkLayout, samples: int = 0
    ) -> tuple[float, str]:
        """Return the seconds of a collective and the name of its algorithm.

        The algorithm is the one of the fit, or the fastest.

        Args:
            call: The collective.
            layout: Ranks per node, and nodes.
            samples: Samples that a worker computes on.

        Raises:
            Unmeasured: If the kind was not measured on a level of the layout.
            KeyError: For a kind without an algorithm of the library.
        """
        n_bytes = call.n_bytes + samples * call.bytes_per_sample
        layout, together = _lay_out_group(layout, call)
        if layout.workers == 1:
            return 0.0, "none"
        self.check_size(call.collective_name, n_bytes)
        links = self.get_links_by_level(call.collective_name)
        levels: list[Level] = ["within"] if layout.workers_per_node > 1 else []
        levels += ["between"] if layout.nodes > 1 else []
        if missing := [level for level in levels if level not in links]:
            raise Unmeasured(
                f"{call.collective_name} {missing[0]} nodes was not measured with {self.library}: "
                f"run `links` on {layout.nodes} nodes with {layout.workers_per_node} workers each"
            )
        # A ring with one rank per node has no steps within a node.
        links = {"within": LinkModel(0.0, math.inf), "between": LinkModel(0.0, math.inf)} | dict(
            links
        )
        shared = links["between"].bytes_per_s / together
        links["between"] = replace(links["between"], bytes_per_s=shared)
        name = self.algorithm_by_kind.get(call.collective_name, FASTEST)
        return min(
            (a(call.collective_name, n_bytes, layout).compute_seconds(links), a.__name__)
            for a in get_named_algorithms(name, self.library, call.collective_name)
        )


def _lay_out_group(layout: LinkLayout, call: CollectiveCall) -> tuple[LinkLayout, int]:
    """Return the layout of a collective's group, and how many groups share a node's link.

    A group of neighbours that does not divide a node's ranks spans two nodes, which limits all groups.
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
    """Return the measured links of a library from a `links.csv`.

    Raises:
        ValueError: If the file is no such table.
        Unmeasured: If the table has no row of the library.
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
                get_named_algorithms(row["algorithm"], library, row["kind"])
                slowed = float(row["kappa"] or "nan")
                compute_slowdown = slowed if math.isfinite(slowed) else compute_slowdown
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: is not a valid links.csv ({error!r}); run `links` again"
        ) from error
    if not measured:
        raise Unmeasured(f"{path} has no links of {library}: run `links` for it")
    return Links(library, measured, compute_slowdown, largest, algorithms)
