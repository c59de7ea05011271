"""The measured links of a place (`links.csv`), and seconds of a collective on any layout by them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stratbench.telemetry.collective_cost import ALGORITHMS, Layout, Level, Link
from stratbench.telemetry.collectives import CollectiveCall


class Unmeasured(LookupError):
    """A collective over a link that nobody has measured; the message names it."""


@dataclass(frozen=True)
class Links:
    """The measured links of a place: for each kind of collective the levels that it was measured on.

    `library`: nccl or gloo. `kappa`: how many times slower computing is beside a collective.
    """

    library: str
    measured: Mapping[str, Mapping[Level, Link]]
    kappa: float = 1.0

    def of(self, kind: str) -> Mapping[Level, Link]:
        return self.measured.get(kind, {})

    def chosen(self, call: CollectiveCall, layout: Layout, samples: int = 0) -> tuple[float, str]:
        """Seconds of a collective, and the algorithm that takes the least.

        Raises Unmeasured where the kind was not measured on a level that the layout needs, and KeyError
        for a kind that the library has no algorithm for.
        """
        n_bytes = call.n_bytes + samples * call.sample_bytes
        layout = _of_group(layout, call.ranks)
        if layout.workers == 1:
            return 0.0, "none"
        links = self.of(call.kind)
        levels: list[Level] = ["within"] if layout.a_node > 1 else []
        levels += ["between"] if layout.nodes > 1 else []
        if missing := [level for level in levels if level not in links]:
            raise Unmeasured(
                f"{call.kind} {missing[0]} nodes was not measured with {self.library}: "
                "run `links` on such a layout"
            )
        # A ring with a rank a node has no steps within one.
        links = {"within": Link(0.0, math.inf), "between": Link(0.0, math.inf)} | dict(links)
        return min(
            (a(call.kind, n_bytes, layout).seconds(links), a.__name__)
            for a in ALGORITHMS[self.library][call.kind]
        )


def _of_group(layout: Layout, ranks: int | None) -> Layout:
    """The layout of a group of so many ranks, which are neighbours: on one node as far as they fit."""
    if ranks is None or ranks == layout.workers:
        return layout
    return Layout(ranks, -(-ranks // layout.a_node))


def read_links(path: Path, library: str) -> Links:
    """The links of a library in a `links.csv`.

    Raises ValueError for a file that is no such table, Unmeasured where it has no row of the library.
    """
    measured: dict[str, dict[Level, Link]] = {}
    kappa = 1.0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["library"] != library:
                    continue
                link = Link(float(row["alpha_s"]), float(row["bytes_per_s"]), float(row["log_sd"]))
                measured.setdefault(row["kind"], {})[row["level"]] = link
                slowed = float(row["kappa"] or "nan")
                kappa = slowed if math.isfinite(slowed) else kappa
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is no links.csv ({error!r}); measure links again") from error
    if not measured:
        raise Unmeasured(f"{path} has no links of {library}: run `links`")
    return Links(library, measured, kappa)
