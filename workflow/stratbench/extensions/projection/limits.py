"""Defines which projections are refused: too many workers, unmeasured links, saturated servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stratbench.extensions.projection.naive import MeasuredStep, Scaling
from stratbench.extensions.projection.servers import ServerQueue

#: Maximum ratio of a projected count to the largest measured one. Beyond it the rules were not compared
#: with published measurements.
MAX_COUNT_RATIO = 8
#: Maximum ratio for a + b/N through two counts of strong scaling. In published series its 80 % intervals
#: contain 87 % of the steps at twice the larger count, and 54 % at four times that count.
MAX_COUNT_RATIO_OF_TWO = 2
#: Maximum number of workers for servers whose push and pull was not measured. In published series their
#: throughput stops growing at 32 to 64 workers, which smaller counts do not show.
MAX_UNMEASURED_SERVED = 16


def projection_refusal_reason(
    points: Sequence[MeasuredStep],
    workers: int,
    nodes: int | None,
    measured_levels: Collection[str] = (),
    queue: Callable[[int], ServerQueue] | None = None,
    by_links: bool = True,
    served: bool = False,
) -> str | None:
    """Return the reason why no step time is projected to `workers`, or None.

    Args:
        points: Measured step times.
        workers: Number of workers of the projection.
        nodes: Number of nodes, if known.
        measured_levels: Levels in `links.csv`, "within" and "between" nodes.
        queue: Returns the servers' queue for a worker count.
        by_links: Whether the projection uses the links.
        served: Whether the strategy has servers without measured times.
    """
    largest = max(p.workers for p in points)
    if workers > MAX_COUNT_RATIO * largest:
        return (
            f"{workers} workers are more than {MAX_COUNT_RATIO} times the largest measured count, {largest}: "
            f"measure {-(-workers // MAX_COUNT_RATIO)} or more"
        )
    on_one = all(p.nodes == 1 for p in points)
    if on_one and nodes is not None and nodes > 1:
        needs = f"{workers} workers need {nodes} nodes"
        if "between" not in measured_levels:
            return (
                f"{needs}, and no step or link was measured between nodes: measure links or steps on "
                "two nodes"
            )
        if not by_links:
            return (
                f"{needs}, no step was measured between nodes, and the replay on measured links does not "
                "match the measured steps: measure steps on two nodes"
            )
    if (
        queue is not None
        and largest < queue(largest).saturation_workers
        and workers > queue(workers).saturation_workers
    ):
        # In strong scaling computation shrinks with more workers, so that fewer workers saturate the
        # servers.
        full = next(n for n in range(largest + 1, workers + 1) if n > queue(n).saturation_workers)
        return (
            f"the servers are saturated from about {full} workers on, and steps were measured up to "
            f"{largest} workers: measure larger counts, or configure more servers"
        )
    if served and queue is None and workers > max(largest, MAX_UNMEASURED_SERVED):
        return (
            f"the servers may be saturated below {workers} workers, and the time of a push and pull was "
            "not measured: measure links, or steps on more workers"
        )
    return None


def two_count_fit_refusal_reason(
    points: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> str | None:
    """Return why a fit of a + b/N through two counts cannot project to `workers`.

    The result is None if the fit can.

    Args:
        points: Measured step times.
        scaling: Weak or strong scaling.
        workers: Number of workers of the projection.
    """
    largest = max(p.workers for p in points)
    if scaling == "strong" and len(points) < 3 and workers > MAX_COUNT_RATIO_OF_TWO * largest:
        return (
            f"a + b/N through two counts of strong scaling is unreliable beyond "
            f"{MAX_COUNT_RATIO_OF_TWO * largest} workers: measure a third count, or links"
        )
    return None
