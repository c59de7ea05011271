"""Refuses projections: to too many workers, over unmeasured links, or with saturated servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stratbench.extensions.projection.naive import MeasuredStep, Scaling
from stratbench.extensions.projection.servers import ServerQueue

#: Maximum ratio of a projected number of workers to the largest measured one. Projections beyond this ratio
#: were not compared with published measurements.
MAX_COUNT_RATIO = 8
#: Maximum ratio of a projected number of workers to the larger of two measured ones, for a fit of a + b/N in
#: strong scaling. In published measurements, the intervals of such fits contain 87 % of the steps at this
#: ratio, but only 54 % at twice this ratio.
MAX_COUNT_RATIO_OF_TWO = 2
#: Maximum number of workers for parameter servers if the time of a push and pull was not measured. In
#: published measurements, servers are saturated from 32 to 64 workers on, which step times on fewer workers
#: do not show.
MAX_UNMEASURED_SERVED = 16


def find_projection_refusal_reason(
    measured_steps: Sequence[MeasuredStep],
    workers: int,
    nodes: int | None,
    measured_levels: Collection[str] = (),
    make_queue: Callable[[int], ServerQueue] | None = None,
    uses_links: bool = True,
    has_servers: bool = False,
) -> str | None:
    """Return why no step time is projected to a number of workers. None if one is.

    Args:
        measured_steps: Measured step times.
        workers: Number of workers of the projection.
        nodes: Number of nodes of the projection, if known.
        measured_levels: Where links were measured: "within" and "between" nodes.
        make_queue: Returns the queue of the parameter servers for a worker count, if push and pull were
            measured.
        uses_links: Whether the projection replays steps on measured links.
        has_servers: Whether the strategy has parameter servers.
    """
    largest = max(p.workers for p in measured_steps)
    if workers > MAX_COUNT_RATIO * largest:
        return (
            f"{workers} workers are more than {MAX_COUNT_RATIO} times the largest measured count, {largest}: "
            f"measure {-(-workers // MAX_COUNT_RATIO)} or more"
        )
    on_one = all(p.nodes == 1 for p in measured_steps)
    if on_one and nodes is not None and nodes > 1:
        needs = f"{workers} workers need {nodes} nodes"
        if "between" not in measured_levels:
            return (
                f"{needs}, and no step or link was measured between nodes: measure links or steps on "
                "two nodes"
            )
        if not uses_links:
            return (
                f"{needs}, no step was measured between nodes, and the replay on measured links does not "
                "match the measured steps: measure steps on two nodes"
            )
    if (
        make_queue is not None
        and largest < make_queue(largest).num_workers_at_saturation
        and workers > make_queue(workers).num_workers_at_saturation
    ):
        # Each number of workers is tried, because saturation depends on it: in strong scaling, more workers
        # compute for a shorter time each.
        full = next(
            n
            for n in range(largest + 1, workers + 1)
            if n > make_queue(n).num_workers_at_saturation
        )
        return (
            f"the servers are saturated from about {full} workers on, and steps were measured up to "
            f"{largest} workers: measure larger counts, or configure more servers"
        )
    if has_servers and make_queue is None and workers > max(largest, MAX_UNMEASURED_SERVED):
        return (
            f"the servers may be saturated below {workers} workers, and the time of a push and pull was "
            "not measured: measure links, or steps on more workers"
        )
    return None


def find_two_count_fit_refusal_reason(
    measured_steps: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> str | None:
    """Return why a fit of a + b/N to two counts is unreliable. None if it is not.

    Args:
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
        workers: Number of workers of the projection.
    """
    largest = max(p.workers for p in measured_steps)
    if (
        scaling == "strong"
        and len(measured_steps) < 3
        and workers > MAX_COUNT_RATIO_OF_TWO * largest
    ):
        return (
            f"a + b/N through two counts of strong scaling is unreliable beyond "
            f"{MAX_COUNT_RATIO_OF_TWO * largest} workers: measure a third count, or links"
        )
    return None
