"""The map of a made cluster: what a training takes at other loads and widths.

`benchmarks/elastic_map.py` of commit 40e3d91 simulated it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from typing import Any

from stratbench.cell.installation import REFERENCE
from stratbench.study.config.queue_request import QueueRequest

MAP = REFERENCE / "elastic_map.csv"
#: The loads of the map at which the queue is steady.
MOST_LOAD = 0.9


#: Where synchronous workers have their state from when they go on, in words.
SOURCES = {"checkpoint": "from the last checkpoint", "peer": "from one that is there"}


def stop_text(of: QueueRequest | Mapping[str, str]) -> str:
    """How synchronous workers stop when one joins or leaves; `of`: a request, or a row of the map."""
    asked = of if isinstance(of, Mapping) else vars(of)
    return f"pause {float(asked['pause_s']):g} s, {SOURCES[asked['recovery']]}"


def near(request: QueueRequest) -> dict[str, Any]:
    """The part of the map whose length, slow nodes and preemption are nearest to those asked for.

    `about`: which part, in words. `rows`: for each width and load the time of split synchronous and of
    asynchronous workers over a gang's, and the worth at which the second break even with the first.
    """
    with open(MAP, newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if float(r["load"]) <= MOST_LOAD]
    asked = {"preemptible": str(request.preemptible), "recovery": request.recovery}
    rows = [r for r in rows if all(r[key] == value for key, value in asked.items())]

    def slowness(share: float, factor: float) -> float:
        return share * (factor - 1)

    def distance(row: dict[str, str]) -> tuple[float, float]:
        asked = slowness(request.slow_nodes, request.slow_factor)
        mine = slowness(float(row["slow_nodes"]), float(row["slow_factor"]))
        return abs(math.log(float(row["hours"]) / request.hours)), abs(mine - asked)

    nearest = min(map(distance, rows))
    found = [r for r in rows if distance(r) == nearest]
    hours, slow = float(found[0]["hours"]), float(found[0]["slow_nodes"])
    about = f"a training of {hours:g} h of work"
    if slow:
        about += f", {slow:.0%} of nodes {found[0]['slow_factor']} times slower"
    if request.preemptible:
        about += ", split workers preempted by all others"
    about += f"; split synchronous: {stop_text(found[0])}"
    names = {
        "synchronous": "split synchronous / gang",
        "asynchronous": "split asynchronous / gang",
        "even": "even with split synchronous",
    }
    return {
        "about": about,
        "rows": [
            {"load": float(r["load"]), "width": int(r["width"])}
            | {key: r[column] for key, column in names.items()}
            for r in found
        ],
    }
