"""Simulates a traced step: each collective's start and duration, and the waits for collectives.

Overlap follows from the schedule, not from a factor. The method is that of dPRO (Hu et al., MLSys 2022). Here
a trace of one rank on fake tensors suffices, since all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratbench.telemetry.collectives import CollectiveCall

#: Kinds of collectives whose result the next operation needs.
RESULT_NEEDED_KINDS = ("all_gather", "broadcast", "send")
#: Up to this ratio of a measured step to the host's own time, the host may limit the step.
NEAR_HOST = 1.1
#: Number of operations that fit into the device's queue for certain.
MAX_QUEUED = 512


@dataclass(frozen=True)
class CollectiveStart:
    """A collective, and the fraction of the step's computation that is done when it starts.

    Attributes:
        call: The collective.
        computed_share: Fraction of computation (0 to 1) done before.
        blocks_computation: Whether computation waits for the result; otherwise only the optimizer does.
        runs_ahead: Whether the collective may start while the preceding part is still computed.
    """

    call: CollectiveCall
    computed_share: float
    blocks_computation: bool
    runs_ahead: bool = False


@dataclass(frozen=True)
class Schedule:
    """Collectives of a traced step in their order, with their positions in the computation.

    Attributes:
        collectives: The collectives with their positions.
        backward_end_share: Fraction of the computation before the optimizer.
        num_operations: Approximate number of operations that the host issues for a step.
    """

    collectives: tuple[CollectiveStart, ...]
    backward_end_share: float = 1.0
    num_operations: int = 0


def simulate_step_s(
    schedule: Schedule,
    compute_s: float,
    seconds: Callable[[CollectiveCall], float],
    compute_slowdown: float = 1.0,
) -> float:
    """Return the seconds of a step, from its schedule and the time of each collective.

    Each group of workers has a channel, like a communicator of NCCL, whose collectives run one after the
    other. Two groups that share a link do not slow each other here. Reductions run in their order over all
    groups, since one may reduce the result of another.

    Args:
        schedule: The schedule.
        compute_s: Seconds of a step without any collective.
        seconds: Returns the seconds of a collective.
        compute_slowdown: Factor by which computation is slower during a collective.
    """
    now, done = 0.0, 0.0  # time of the computation's stream, and the fraction computed
    free: dict[tuple[int | None, int], float] = {}  # when each group's channel is free
    reduced = 0.0  # when all reductions so far are complete
    # When computation last waited for a collective that ran ahead: then the next one starts.
    gathered = 0.0

    def find_link_busy_end() -> float:
        return max(free.values(), default=0.0)

    def compute_until_share(share: float) -> None:
        nonlocal now, done
        now = _finish_computation(
            now, max(0.0, share - done) * compute_s, find_link_busy_end(), compute_slowdown
        )
        done = max(done, share)

    def end_backward() -> None:
        nonlocal now
        compute_until_share(schedule.backward_end_share)
        now = max(now, find_link_busy_end())

    ended = False
    for started in schedule.collectives:
        if started.computed_share > schedule.backward_end_share and not ended:
            end_backward()
            ended = True
        compute_until_share(started.computed_share)
        group = started.call.group_size, started.call.rank_stride
        ready = (
            gathered
            if started.runs_ahead
            else now
            if started.blocks_computation
            else max(now, reduced)
        )
        free[group] = max(ready, free.get(group, 0.0)) + seconds(started.call)
        if started.blocks_computation:
            now = max(now, free[group])
        else:
            reduced = free[group]
        if started.runs_ahead:
            gathered = now
    if not ended:
        end_backward()
    compute_until_share(1.0)
    return max(now, find_link_busy_end())


def is_host_unblocked(operations: int, issue_s: float, step_s: float) -> bool:
    """Return whether the host issued a step without waiting for space in the device's queue.

    If all operations take equally long, the device has `operations` (1 - issue_s / step_s) left when the
    host has issued the last one. They must fit into CUDA's queue of about 1024 kernels. MAX_QUEUED is half
    of that, since an operation may be several kernels. The host issues each step in at most the mean step
    time. If `issue_s` is much longer, something else delayed the host.

    Args:
        operations: Number of operations of a step.
        issue_s: Seconds in which the host issued the step.
        step_s: Mean seconds of a step.
    """
    return issue_s <= NEAR_HOST * step_s and operations * (1 - issue_s / step_s) <= MAX_QUEUED


def _finish_computation(
    now: float, work_s: float, busy_until: float, compute_slowdown: float
) -> float:
    """Return the end time of work that is slower by `compute_slowdown` until `busy_until`."""
    slow_s = max(0.0, busy_until - now)
    if work_s * compute_slowdown <= slow_s:
        return now + work_s * compute_slowdown
    return now + slow_s + work_s - slow_s / compute_slowdown


def build_schedule(phases: Sequence[TracedPhase], on_cuda: bool) -> Schedule:
    """Return the schedule of a traced step, from the seconds of each phase.

    On CUDA, FSDP2 issues a collective before the optimizer in a separate stream. Parameters are then
    gathered ahead, and the optimizer waits for gradients. On a CPU the host waits for each collective.
    """
    total_s = sum(p.seconds for p in phases) or 1.0
    began_s, events, backward_end_share = 0.0, [], 1.0
    for phase in phases:
        updates = phase.name == "optimizer"
        if updates:
            backward_end_share = began_s / total_s
        for call, reached_s in zip(phase.collectives, phase.collective_reached_s, strict=True):
            apart = on_cuda and not updates and call.waiter == "stream"
            waited = call.waiter != "none" and not apart
            needed = waited or updates or call.collective_name in RESULT_NEEDED_KINDS
            ahead = apart and call.collective_name == "all_gather"
            events.append(CollectiveStart(call, (began_s + reached_s) / total_s, needed, ahead))
        began_s += phase.seconds
    return Schedule(tuple(events), backward_end_share, sum(p.num_operations for p in phases))


@dataclass(frozen=True)
class TracedPhase:
    """A phase of a traced step: its seconds, its collectives, and their positions.

    Attributes:
        name: Name of the phase.
        seconds: Seconds of computation on the device.
        collectives: The collectives in their order.
        collective_reached_s: Seconds of the phase's computation before each collective.
        num_operations: Number of operations, without views.
    """

    name: str
    seconds: float
    collectives: tuple[CollectiveCall, ...]
    collective_reached_s: tuple[float, ...]
    num_operations: int = 0
