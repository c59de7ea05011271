"""Limits of a projection: too far, over unmeasured links, or past the servers' capacity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stratbench.extensions.projection.naive import Measured, Scaling
from stratbench.extensions.projection.servers import ServerQueue

#: Times the largest measured count. Further than this the rules were not held to published measurements.
MAX_TIMES = 8
#: The same for a + b/N through two counts of strong scaling. In published series its intervals of 80 % hold
#: 87 % of the steps on twice the larger count, and 54 % of those on four times as many.
MAX_TIMES_OF_TWO = 2
#: Maximum number of workers for servers without measured push and pull: in published series their throughput
#: stops growing at 32 to 64, which smaller counts do not show.
MAX_UNSEEN_SERVED = 16


def refusal(
    points: Sequence[Measured],
    workers: int,
    nodes: int | None,
    measured_levels: Collection[str] = (),
    queue: Callable[[int], ServerQueue] | None = None,
    by_links: bool = True,
    served: bool = False,
) -> str | None:
    """Return why nothing is projected to `workers`, or None if something can be.

    Args:
        points: Measured counts.
        workers: Worker count.
        nodes: Number of nodes, if known.
        measured_levels: Levels in `links.csv`, "within" and "between".
        queue: Queue of the servers by worker count; its knee cannot be seen at counts below it.
        by_links: Whether the projection uses the links.
        served: Whether the strategy has servers without measured times.
    """
    largest = max(p.workers for p in points)
    if workers > MAX_TIMES * largest:
        return (
            f"{workers} is more than {MAX_TIMES} times the largest measured count, {largest}: "
            f"measure {-(-workers // MAX_TIMES)} or more"
        )
    on_one = all(p.nodes == 1 for p in points)
    if on_one and nodes is not None and nodes > 1:
        needs = f"{workers} workers need {nodes} nodes"
        if "between" not in measured_levels:
            return (
                f"{needs}, and no step or link was measured between nodes: measure links on two nodes, or "
                "steps"
            )
        if not by_links:
            return (
                f"{needs}, no step was measured between nodes, and the replay on measured links, which are, "
                "does not hold here: measure steps on two nodes"
            )
    if queue is not None and largest < queue(largest).knee and workers > queue(workers).knee:
        # In strong scaling computing shrinks, and with it the count that fills the servers.
        full = next(n for n in range(largest + 1, workers + 1) if n > queue(n).knee)
        return (
            f"the servers are full from about {full} workers on, and steps were measured up to {largest}: "
            "measure beyond, or take more servers"
        )
    if served and queue is None and workers > max(largest, MAX_UNSEEN_SERVED):
        return (
            f"the servers may be full at fewer than {workers} workers, and how long a push and pull takes "
            "was not measured: measure links, or steps beyond"
        )
    return None


def refusal_of_two(points: Sequence[Measured], scaling: Scaling, workers: int) -> str | None:
    """Return why a + b/N through so few counts gives nothing for `workers`, or None.

    Args:
        points: Measured counts.
        scaling: Weak or strong scaling.
        workers: Worker count.
    """
    largest = max(p.workers for p in points)
    if scaling == "strong" and len(points) < 3 and workers > MAX_TIMES_OF_TWO * largest:
        return (
            f"a + b/N through two counts of strong scaling says nothing beyond "
            f"{MAX_TIMES_OF_TWO * largest} workers: measure a third count, or links"
        )
    return None
