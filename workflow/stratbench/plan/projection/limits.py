"""Where a projection is refused: too far, over links that nobody has measured, past what servers can take."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stratbench.plan.projection.naive import Measured
from stratbench.plan.projection.servers import Queue

#: Times the largest measured count. Further than this the rules were not held to published measurements.
MOST_TIMES = 8


def refusal(
    points: Sequence[Measured],
    workers: int,
    nodes: int | None,
    measured_levels: Collection[str] = (),
    queue: Queue | None = None,
) -> str | None:
    """Why nothing is said about `workers` on `nodes`; None where something can be.

    `measured_levels`: of `links.csv`, "within" and "between". `queue`: of a strategy with servers; its
    knee cannot be seen at counts below it.
    """
    largest = max(p.workers for p in points)
    if workers > MOST_TIMES * largest:
        return (
            f"{workers} is more than {MOST_TIMES} times the largest measured count, {largest}: "
            f"measure {-(-workers // MOST_TIMES)} or more"
        )
    on_one = all(p.nodes == 1 for p in points)
    if on_one and nodes is not None and nodes > 1 and "between" not in measured_levels:
        return (
            f"{workers} workers need {nodes} nodes, and no step or link was measured between nodes: "
            "measure links on two nodes, or steps"
        )
    if queue is not None and workers > queue.knee and largest < queue.knee:
        return (
            f"the servers are full at about {queue.knee:.0f} workers, and steps were measured up to "
            f"{largest}: measure beyond, or take more servers"
        )
    return None
