"""Replays a traced step: when each collective starts, its duration, and what waits for it.

Overlap follows from the schedule, not from a factor. As in dPRO (Hu et al., MLSys 2022), but from the trace
of one rank on fake tensors: all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratbench.telemetry.collectives import CollectiveCall

#: Collectives whose result the next operation needs.
NEEDED = ("all_gather", "broadcast", "send")
#: A measured step of up to so many times the host's own time may be limited by the host.
NEAR_HOST = 1.1
#: So many operations surely fit into the device's queue.
MAX_QUEUED = 512


@dataclass(frozen=True)
class Started:
    """A collective, and the fraction of the step's computation (0 to 1) done when it starts.

    `needed`: computation continues only with its result; the optimizer waits for the others. `ahead`: it may
    start while the preceding part is still computed.
    """

    call: CollectiveCall
    share: float
    needed: bool
    ahead: bool = False


@dataclass(frozen=True)
class Schedule:
    """A step's collectives in their order. `backward_ends`: the share of computing before the optimizer.

    `operations`: that the host issues for it, about.
    """

    collectives: tuple[Started, ...]
    backward_ends: float = 1.0
    operations: int = 0


def replay(
    schedule: Schedule,
    compute_s: float,
    seconds: Callable[[CollectiveCall], float],
    kappa: float = 1.0,
) -> float:
    """Return the seconds of the step.

    Each group of workers has a channel, whose collectives run one after the other (a communicator of NCCL).
    Sharing of a link by two groups is left out. Reductions run in their order, over all groups: one may
    reduce what another has.

    Args:
        schedule: The schedule.
        compute_s: Time of a step without any collective.
        seconds: Returns the time of a collective.
        kappa: Slowdown of computation during one.
    """
    now, done = 0.0, 0.0  # the computing's clock, and the share computed
    free: dict[tuple[int | None, int], float] = {}  # when each group's channel is
    reduced = 0.0  # when all that was reduced is
    gathered = 0.0  # when the step last had what ran ahead: the next one starts then

    def busy_until() -> float:
        return max(free.values(), default=0.0)

    def compute_to(share: float) -> None:
        nonlocal now, done
        now = _computed(now, max(0.0, share - done) * compute_s, busy_until(), kappa)
        done = max(done, share)

    def end_backward() -> None:
        nonlocal now
        compute_to(schedule.backward_ends)
        now = max(now, busy_until())

    ended = False
    for started in schedule.collectives:
        if started.share > schedule.backward_ends and not ended:
            end_backward()
            ended = True
        compute_to(started.share)
        group = started.call.ranks, started.call.stride
        ready = gathered if started.ahead else now if started.needed else max(now, reduced)
        free[group] = max(ready, free.get(group, 0.0)) + seconds(started.call)
        if started.needed:
            now = max(now, free[group])
        else:
            reduced = free[group]
        if started.ahead:
            gathered = now
    if not ended:
        end_backward()
    compute_to(1.0)
    return max(now, busy_until())


def is_unhindered(operations: int, issue_s: float, step_s: float) -> bool:
    """Return whether the host issued a step without waiting for space in the device's queue.

    If all operations take equally long, the device has `operations` (1 - issue_s / step_s) left when the host
    has issued the last one. They must fit into CUDA's queue of about 1024 kernels; MAX_QUEUED is half of
    that, since an operation may be several kernels. The host issues each step in at most the mean step time:
    if `issue_s` is much longer, something else delayed the host.

    Args:
        operations: Operations of a step.
        issue_s: Time in which the host issued it.
        step_s: Mean time of a step.
    """
    return issue_s <= NEAR_HOST * step_s and operations * (1 - issue_s / step_s) <= MAX_QUEUED


def _computed(now: float, work_s: float, busy_until: float, kappa: float) -> float:
    """Return the end of work that is `kappa` times slower until `busy_until`."""
    slow_s = max(0.0, busy_until - now)
    if work_s * kappa <= slow_s:
        return now + work_s * kappa
    return now + slow_s + work_s - slow_s / kappa


def schedule_of(phases: Sequence[TracedPhase], on_cuda: bool) -> Schedule:
    """Return the schedule of a traced step, with computation timed by each phase's seconds.

    On CUDA a collective that its stream waits for is in a stream of its own (FSDP2's), before the optimizer.
    There parameters are gathered ahead, and the optimizer waits for gradients. On a CPU the host waits.
    """
    total_s = sum(p.seconds for p in phases) or 1.0
    began_s, events, backward_ends = 0.0, [], 1.0
    for phase in phases:
        updates = phase.name == "optimizer"
        if updates:
            backward_ends = began_s / total_s
        for call, reached_s in zip(phase.collectives, phase.reached_s, strict=True):
            apart = on_cuda and not updates and call.waiter == "stream"
            waited = call.waiter != "none" and not apart
            needed = waited or updates or call.kind in NEEDED
            ahead = apart and call.kind == "all_gather"
            events.append(Started(call, (began_s + reached_s) / total_s, needed, ahead))
        began_s += phase.seconds
    return Schedule(tuple(events), backward_ends, sum(p.operations for p in phases))


@dataclass(frozen=True)
class TracedPhase:
    """A phase of a step: its seconds on a device, its collectives, and their positions in it.

    `operations`: number of operations, without views.
    """

    name: str
    seconds: float
    collectives: tuple[CollectiveCall, ...]
    reached_s: tuple[float, ...]
    operations: int = 0
