"""Simulates (replays) a traced training step: its computation, its collectives, and waits for them.

The overlap of communication and computation follows from the schedule of the step. The method is that of dPRO
(Hu et al., MLSys 2022). A trace of one rank suffices, because all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratbench.telemetry.collectives import CollectiveCall

#: Kinds of collectives whose result the next operation needs, so that the computation waits for it.
RESULT_NEEDED_KINDS = ("all_gather", "broadcast", "send")
#: The host may limit a step whose time is at most this multiple of the time in which the host issues the
#: step.
NEAR_HOST = 1.1
#: Number of operations that fit into the GPU's queue for certain.
MAX_QUEUED = 512


@dataclass(frozen=True)
class CollectiveStart:
    """A collective, and the share of the step's computation that is done before.

    Attributes:
        call: The collective.
        computed_share_at_start: Share of the step's computation (0 to 1) that is done before.
        blocks_computation: Whether the computation waits for the result; otherwise only the optimizer does.
        is_prefetched: Whether the collective may start while the computation before it still runs.
    """

    call: CollectiveCall
    computed_share_at_start: float
    blocks_computation: bool
    is_prefetched: bool = False


@dataclass(frozen=True)
class Schedule:
    """When the collectives of a traced step start, relative to its computation.

    Attributes:
        collectives: The collectives in their order.
        computed_share_at_backward_end: Share of the step's computation that is done when backward ends.
        num_operations: Approximate number of operations that the host issues for the step.
    """

    collectives: tuple[CollectiveStart, ...]
    computed_share_at_backward_end: float = 1.0
    num_operations: int = 0


def simulate_step_s(
    schedule: Schedule,
    compute_s: float,
    compute_collective_s: Callable[[CollectiveCall], float],
    computation_slowdown_factor: float = 1.0,
) -> float:
    """Return the seconds of a step, from its schedule and the time of each collective.

    Collectives of the same process group run one after the other, as in a communicator of NCCL. Two groups
    that share a link do not slow each other down here. Reductions of all groups run in their order, because
    one may reduce the result of another.

    Args:
        schedule: Schedule of the step.
        compute_s: Seconds of the step's computation, without collectives.
        compute_collective_s: Returns the seconds of a collective.
        computation_slowdown_factor: Factor by which computation is slower during a collective.
    """
    # Simulated time, and the share of the computation that is done by then.
    now, done = 0.0, 0.0
    # When the last collective of each process group ends.
    group_free_s: dict[tuple[int | None, int], float] = {}
    # When all reductions so far are complete.
    reductions_end_s = 0.0
    # Earliest start of the next prefetch: when the computation has waited for the previous prefetch.
    prefetch_start_s = 0.0

    def find_last_collective_end() -> float:
        return max(group_free_s.values(), default=0.0)

    def advance_computation_to_share(share: float) -> None:
        nonlocal now, done
        now = _compute_computation_end_s(
            now,
            max(0.0, share - done) * compute_s,
            find_last_collective_end(),
            computation_slowdown_factor,
        )
        done = max(done, share)

    def finish_backward() -> None:
        nonlocal now
        advance_computation_to_share(schedule.computed_share_at_backward_end)
        now = max(now, find_last_collective_end())

    ended = False
    for started in schedule.collectives:
        if started.computed_share_at_start > schedule.computed_share_at_backward_end and not ended:
            finish_backward()
            ended = True
        advance_computation_to_share(started.computed_share_at_start)
        group = started.call.group_size, started.call.rank_stride
        ready = (
            prefetch_start_s
            if started.is_prefetched
            else now
            if started.blocks_computation
            else max(now, reductions_end_s)
        )
        group_free_s[group] = max(ready, group_free_s.get(group, 0.0)) + compute_collective_s(
            started.call
        )
        if started.blocks_computation:
            now = max(now, group_free_s[group])
        else:
            reductions_end_s = group_free_s[group]
        if started.is_prefetched:
            prefetch_start_s = now
    if not ended:
        finish_backward()
    advance_computation_to_share(1.0)
    return max(now, find_last_collective_end())


def is_host_unblocked(num_operations: int, issue_s: float, step_s: float) -> bool:
    """Return whether the host has issued a step without waiting for the GPU.

    The host waits if the GPU's queue is full. When the host has issued the last operation, about
    `num_operations * (1 - issue_s / step_s)` are in the queue. CUDA's queue has about 1024 kernels, and
    MAX_QUEUED is half of that, because an operation may be several kernels. If `issue_s` is much longer than
    a step, something else has delayed the host.

    Args:
        num_operations: Number of operations of a step.
        issue_s: Seconds in which the host issued the step.
        step_s: Mean seconds of a step.
    """
    return issue_s <= NEAR_HOST * step_s and num_operations * (1 - issue_s / step_s) <= MAX_QUEUED


def _compute_computation_end_s(
    begin_s: float, work_s: float, slowed_until_s: float, computation_slowdown_factor: float
) -> float:
    """Return when a computation ends that is slower by a factor until `slowed_until_s`."""
    slow_s = max(0.0, slowed_until_s - begin_s)
    if work_s * computation_slowdown_factor <= slow_s:
        return begin_s + work_s * computation_slowdown_factor
    return begin_s + slow_s + work_s - slow_s / computation_slowdown_factor


def build_schedule(phases: Sequence[TracedPhase], on_cuda: bool) -> Schedule:
    """Return the schedule of a traced step, from its phases.

    On a GPU, FSDP2 runs the collectives of forward and backward in a stream of their own. It gathers
    parameters ahead, and only the optimizer waits for gradients. On a CPU the host waits for each collective.
    """
    total_s = sum(p.seconds for p in phases) or 1.0
    began_s, events, backward_end_share = 0.0, [], 1.0
    for phase in phases:
        updates = phase.name == "optimizer"
        if updates:
            backward_end_share = began_s / total_s
        for call, reached_s in zip(
            phase.collectives, phase.computed_s_before_collectives, strict=True
        ):
            apart = on_cuda and not updates and call.waiter == "stream"
            waited = call.waiter != "none" and not apart
            needed = waited or updates or call.collective_name in RESULT_NEEDED_KINDS
            ahead = apart and call.collective_name == "all_gather"
            events.append(CollectiveStart(call, (began_s + reached_s) / total_s, needed, ahead))
        began_s += phase.seconds
    return Schedule(tuple(events), backward_end_share, sum(p.num_operations for p in phases))


@dataclass(frozen=True)
class TracedPhase:
    """A phase of a traced step, such as forward, with its computation and its collectives.

    Attributes:
        name: Name of the phase.
        seconds: Seconds of the phase's computation on the device.
        collectives: The collectives in their order.
        computed_s_before_collectives: Seconds of the phase's computation before each collective.
        num_operations: Number of operations on the device.
    """

    name: str
    seconds: float
    collectives: tuple[CollectiveCall, ...]
    computed_s_before_collectives: tuple[float, ...]
    num_operations: int = 0
