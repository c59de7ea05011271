"""Replays a traced step: when each collective starts, how long it takes, and what computing waits for.

Overlap follows from the schedule, not from a factor. As in dPRO (Hu et al., MLSys 2022), but from the
trace of one rank on fake tensors: all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratbench.telemetry.collectives import CollectiveCall

#: What the next operation needs. The others are waited for by the optimizer.
NEEDED = ("all_gather", "broadcast", "send")


@dataclass(frozen=True)
class Started:
    """A collective, and the share of the step's computing (0 to 1) that is done when it starts.

    `needed`: computing goes on only with its result.
    """

    call: CollectiveCall
    share: float
    needed: bool


@dataclass(frozen=True)
class Schedule:
    """A step's collectives in their order. `backward_ends`: the share of computing before the optimizer."""

    collectives: tuple[Started, ...]
    backward_ends: float = 1.0
    #: Whether a collective that is needed may start while what comes before it is still computed.
    prefetches: bool = False


@dataclass(frozen=True)
class Replayed:
    """`step_s` of a step, and how much of it is computing that waits for a collective."""

    step_s: float
    exposed_s: float
    collectives_s: float


def replay(
    schedule: Schedule,
    compute_s: float,
    seconds: Callable[[CollectiveCall], float],
    kappa: float = 1.0,
) -> Replayed:
    """The step's time.

    `compute_s`: of a step without any collective; `kappa`: how many times slower it is while one runs. All
    collectives share one channel, one after the other (ProcessGroupNCCL's stream).
    """
    now, free, done = 0.0, 0.0, 0.0  # the computing's clock, the channel's, and the share computed
    last_needed = 0.0  # when the step last had what it waited for: a prefetch starts then
    busy_s = 0.0

    def compute_to(share: float) -> None:
        nonlocal now, done
        now = _computed(now, max(0.0, share - done) * compute_s, free, kappa)
        done = max(done, share)

    ended = False
    for started in schedule.collectives:
        if started.share > schedule.backward_ends and not ended:
            compute_to(schedule.backward_ends)
            now, ended = max(now, free), True
        asked = last_needed
        compute_to(started.share)
        took_s = seconds(started.call)
        busy_s += took_s
        if not started.needed:
            free = max(now, free) + took_s
            continue
        free = max(asked if schedule.prefetches else now, free) + took_s
        now = max(now, free)
        last_needed = now
    if not ended:
        compute_to(schedule.backward_ends)
        now = max(now, free)
    compute_to(1.0)
    now = max(now, free)
    return Replayed(now, now - compute_s, busy_s)


def _computed(now: float, work_s: float, busy_until: float, kappa: float) -> float:
    """When work of `work_s` is done that begins now and is `kappa` times slower until `busy_until`."""
    slow_s = max(0.0, busy_until - now)
    if work_s * kappa <= slow_s:
        return now + work_s * kappa
    return now + slow_s + work_s - slow_s / kappa


def schedule_of(phases: Sequence[TracedPhase], prefetches: bool) -> Schedule:
    """The schedule of a traced step, its computing timed by each phase's seconds as traced."""
    total_s = sum(p.seconds for p in phases) or 1.0
    began_s, found, backward_ends = 0.0, [], 1.0
    for phase in phases:
        if phase.name == "optimizer":
            backward_ends = began_s / total_s
        for call, reached_s in zip(phase.collectives, phase.reached_s, strict=True):
            # Activations are exchanged where the next layer needs them, whatever the kind.
            needed = call.kind in NEEDED or call.sample_bytes > 0 or call.ranks is not None
            found.append(Started(call, (began_s + reached_s) / total_s, needed))
        began_s += phase.seconds
    return Schedule(tuple(found), backward_ends, prefetches)


@dataclass(frozen=True)
class TracedPhase:
    """A phase of a step: its seconds on a device, its collectives, and how far it was at each of them."""

    name: str
    seconds: float
    collectives: tuple[CollectiveCall, ...]
    reached_s: tuple[float, ...]
