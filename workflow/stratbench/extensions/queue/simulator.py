"""A cluster of GPUs and its queue on a virtual clock, event by event: first come first served, with backfill.

As SLURM does it there are two passes. The main one starts jobs in their order and stops at the first that
does not fit. Backfill goes on behind it, by the wall times that jobs have asked for, and starts what delays
no reservation. Nothing is known of fair-share, of quotas or of priorities other than the order of submission.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

#: Reservations of SLURM's default: every waiting job holds one (bf_job_part_count_reserve = 0).
ALL = 10**6


@dataclass(frozen=True)
class Arrival:
    """A job of others. It runs `duration_s`, and asks for a wall time of `request_s`."""

    submit_s: float
    gpus: int
    duration_s: float
    request_s: float


class Owner(Protocol):
    """Owner of simulated jobs, with callbacks on their events."""

    def started(self, sim: Cluster, job: SimulatedJob) -> None: ...

    def ended(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        """Handle the end of a job.

        Args:
            sim: The cluster.
            job: The job.
            reason: done, limit (the wall time is over), lost (a node failed), preempted or cancelled.
        """

    def woken(self, sim: Cluster, note: object) -> None: ...


@dataclass(eq=False)
class SimulatedJob:
    """A job, on one node if it fits, else in equal parts on the fewest nodes."""

    gpus: int
    duration_s: float
    request_s: float
    owner: Owner | None = None
    preemptible: bool = False
    submit_s: float = 0.0
    start_s: float = math.nan
    end_s: float = math.nan
    at: dict[int, int] = field(default_factory=dict)  # node -> GPUs


@dataclass(frozen=True)
class Rules:
    """Behaviour of a cluster; the delays are measured inputs."""

    #: Number of waiting jobs with a reservation: 1 is EASY, ALL is SLURM's default, 0 lets anything pass that
    #: fits, None is no backfill.
    reserve: int | None = 1
    #: Backfill runs at its multiples; 0: after every event.
    backfill_s: float = 0.0
    #: Number of waiting jobs that backfill considers.
    depth: int = 100
    #: From the allocation to a job's first line, and from its last one until the GPUs are free.
    start_delay_s: float = 0.0
    end_delay_s: float = 0.0
    #: Mean time between the failures of one node, exponential, and how long it then is away.
    node_mtbf_s: float = math.inf
    repair_s: float = 3600.0
    #: The share of nodes that are slower, and how many times; others' durations are as given everywhere.
    slow_share: float = 0.0
    slow_factor: float = 1.0


class Cluster:
    """The state at `now_s`: `run_until` advances it, `branch` copies it."""

    def __init__(
        self,
        nodes: int,
        gpus_per_node: int,
        arrivals: Sequence[Arrival],
        rules: Rules,
        seed: int = 0,
    ) -> None:
        """`arrivals` by `submit_s`; `seed`: of which nodes are slow and when they fail."""
        if wide := next((a for a in arrivals if a.gpus > nodes * gpus_per_node), None):
            raise ValueError(
                f"a job asks for {wide.gpus} GPUs, of a cluster of {nodes * gpus_per_node}; it would "
                "wait forever"
            )
        slow = random.Random(seed)
        self.rules, self.per_node, self.now_s = rules, gpus_per_node, 0.0
        self.speed = [
            1 / rules.slow_factor if slow.random() < rules.slow_share else 1.0 for _ in range(nodes)
        ]
        self.queue: list[SimulatedJob] = []
        self.running: list[SimulatedJob] = []
        #: (GPUs, seconds) of others' jobs that have started, in this order.
        self.waits: list[tuple[int, float]] = []
        self.busy_gpu_s = 0.0
        self._free = np.full(nodes, gpus_per_node)
        self._up = np.ones(nodes, dtype=bool)
        self._arrivals, self._next_arrival = arrivals, 0
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0
        self._next_backfill_s, self._changed = 0.0, False
        self._random = random.Random(seed + 1)
        if math.isfinite(rules.node_mtbf_s):
            for node in range(nodes):
                self._at(self._random.expovariate(1 / rules.node_mtbf_s), "fail", node)

    @property
    def capacity(self) -> int:
        """All GPUs."""
        return len(self._free) * self.per_node

    def branch(self) -> Cluster:
        """Return an independent copy; all copies have the same arrivals and failures.

        ValueError if a job has an owner, since the owner's state is not copied.
        """
        if any(job.owner for job in (*self.queue, *self.running)):
            raise ValueError("branch: a job here has an owner; branch before its training begins")
        other = copy(self)
        twins = {id(job): copy(job) for job in (*self.queue, *self.running)}
        other.queue = [twins[id(job)] for job in self.queue]
        other.running = [twins[id(job)] for job in self.running]
        other._free, other._up, other.waits = self._free.copy(), self._up.copy(), self.waits[:]
        other._events = [(t, n, kind, twins.get(id(x), x)) for t, n, kind, x in self._events]
        other._random = random.Random()
        other._random.setstate(self._random.getstate())
        return other

    # --- what owners call ------------------------------------------------------------------------

    def submit(self, job: SimulatedJob) -> None:
        job.submit_s = self.now_s
        self.queue.append(job)
        self._changed = True

    def cancel(self, job: SimulatedJob) -> None:
        """Takes it out of the queue, or ends it."""
        if job in self.queue:
            self.queue.remove(job)
        elif job in self.running:
            self._stop(job, "cancelled")

    def wake(self, owner: Owner, at_s: float, note: object) -> None:
        """Call `owner.woken(sim, note)` at a time.

        Args:
            owner: The owner.
            at_s: The time.
            note: Its argument.
        """
        self._at(at_s, "wake", (owner, note))

    def lasts(self, job: SimulatedJob, duration_s: float) -> None:
        """The running job turns out to need so long.

        It ends earlier where its wall time does.
        """
        job.duration_s = duration_s
        self._end_at(job)

    # --- events ----------------------------------------------------------------------------------

    def run_until(self, at_s: float = math.inf, done: Callable[[], bool] = lambda: False) -> None:
        """Run until that time, until `done`, or until nothing can happen any more."""
        rules = self.rules
        if self._changed:
            self._schedule(not rules.backfill_s)
        while not done():
            arrival = event = backfill = math.inf
            if self._next_arrival < len(self._arrivals):
                arrival = self._arrivals[self._next_arrival].submit_s
            if self._events:
                event = self._events[0][0]
            if self._changed and self.queue and rules.reserve is not None and rules.backfill_s:
                backfill = max(self.now_s, self._next_backfill_s)
            then = min(arrival, event, backfill)
            if then > at_s or math.isinf(then):
                if math.isfinite(at_s):
                    self._pass_time(max(self.now_s, at_s))
                return
            self._pass_time(then)
            if arrival == then:
                next_job = self._arrivals[self._next_arrival]
                self._next_arrival += 1
                self.submit(SimulatedJob(next_job.gpus, next_job.duration_s, next_job.request_s))
            elif event == then:
                _, _, kind, what = heapq.heappop(self._events)
                getattr(self, f"_on_{kind}")(what)
            due = then not in (arrival, event)
            self._schedule(due or not rules.backfill_s)

    def _pass_time(self, until_s: float) -> None:
        used = sum(sum(job.at.values()) for job in self.running)
        self.busy_gpu_s += (until_s - self.now_s) * used
        self.now_s = until_s

    def _at(self, at_s: float, kind: str, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, kind, what))

    def _on_end(self, job: SimulatedJob) -> None:
        if job in self.running and job.end_s <= self.now_s:  # not changed, and not stopped before
            self._stop(job, "done" if job.duration_s <= job.request_s else "limit")

    def _on_wake(self, what: tuple[Owner, object]) -> None:
        what[0].woken(self, what[1])

    def _on_fail(self, node: int) -> None:
        self._up[node] = False
        for job in [j for j in self.running if node in j.at]:
            self._stop(job, "lost")
        self._at(self.now_s + self.rules.repair_s, "repair", node)

    def _on_repair(self, node: int) -> None:
        self._up[node] = self._changed = True
        self._at(self.now_s + self._random.expovariate(1 / self.rules.node_mtbf_s), "fail", node)

    def _end_at(self, job: SimulatedJob) -> None:
        ran_s = min(job.duration_s, job.request_s)
        job.end_s = job.start_s + ran_s + self.rules.end_delay_s
        if math.isfinite(job.end_s):
            self._at(job.end_s, "end", job)

    def _start(self, job: SimulatedJob, at: dict[int, int]) -> None:
        self.queue.remove(job)
        job.at, job.start_s = at, self.now_s + self.rules.start_delay_s
        for node, gpus in at.items():
            self._free[node] -= gpus
        self.running.append(job)
        self._end_at(job)
        if job.owner is None:
            self.waits.append((job.gpus, job.start_s - job.submit_s))
        else:
            job.owner.started(self, job)

    def _stop(self, job: SimulatedJob, reason: str) -> None:
        self.running.remove(job)
        for node, gpus in job.at.items():
            self._free[node] += gpus
        self._changed = True
        if job.owner is not None:
            job.owner.ended(self, job, reason)
        elif reason == "lost":  # others have lost nothing, and queue again behind everybody
            self.submit(SimulatedJob(job.gpus, max(1.0, job.end_s - self.now_s), job.request_s))

    # --- scheduling ------------------------------------------------------------------------------

    def _schedule(self, backfill: bool) -> None:
        waiting = iter(self.queue[:])
        for job in waiting:
            at = self._room(np.where(self._up, self._free, 0), job) or self._preempting_room(job)
            if at is None:
                if backfill and self.rules.reserve is not None:
                    self._next_backfill_s = self.now_s + self.rules.backfill_s
                    self._changed = False
                    self._backfill([job, *waiting][: self.rules.depth])
                return
            self._start(job, at)

    def _room(self, free: np.ndarray, job: SimulatedJob) -> dict[int, int] | None:
        """Return where the job fits among the nodes' free GPUs, or None."""
        gpus = job.gpus
        if gpus > free.sum():
            return None
        if gpus <= self.per_node:
            fits = np.flatnonzero(free >= gpus)
            return {int(fits[np.argmin(free[fits])]): gpus} if fits.size else None  # the fullest
        nodes = -(-gpus // self.per_node)
        each = -(-gpus // nodes)
        fits = np.flatnonzero(free >= each)[:nodes]
        return {int(node): each for node in fits} if fits.size == nodes else None

    def _preempting_room(self, job: SimulatedJob) -> dict[int, int] | None:
        """Room that preemptible jobs make, which are stopped, for one that is not."""
        if job.preemptible or not any(j.preemptible for j in self.running):
            return None
        at = self._room(np.where(self._up, self._without_preemptible(), 0), job)
        if at is not None:
            self._preempt(at)
        return at

    def _without_preemptible(self) -> np.ndarray:
        free = self._free.copy()
        for job in self.running:
            if job.preemptible:
                for node, gpus in job.at.items():
                    free[node] += gpus
        return free

    def _preempt(self, at: dict[int, int]) -> None:
        """Stops preemptible jobs, the youngest first, until these GPUs are free."""
        for victim in [j for j in reversed(self.running) if j.preemptible]:
            if any(self._free[node] < gpus and node in victim.at for node, gpus in at.items()):
                self._stop(victim, "preempted")

    def _backfill(self, waiting: list[SimulatedJob]) -> None:
        plan = _Timeline(self.now_s, self._without_preemptible(), self._leaving(), self._up)
        reserved = 0
        for job in waiting:
            if job not in self.queue:
                continue
            free = plan.least_free(self.now_s, job.request_s)
            if job.preemptible:  # it takes what is free, and reserves nothing
                at = self._room(np.minimum(free, self._free), job)
                if at is not None:
                    self._start(job, at)
                continue
            begin_s, at = self.now_s, self._room(free, job)
            if at is not None:
                self._preempt(at)
                self._start(job, at)
            elif reserved < self.rules.reserve:
                reserved += 1
                begin_s, at = self._earliest(plan, job)
            if at is not None:
                plan.book(begin_s, job.request_s, at)

    def _leaving(self) -> Iterator[tuple[float, dict[int, int]]]:
        """Yield when running jobs end by their requested wall times."""
        for job in self.running:
            if not job.preemptible:
                yield max(job.start_s + job.request_s, self.now_s + 1e-6), job.at

    def _earliest(self, plan: _Timeline, job: SimulatedJob) -> tuple[float, dict[int, int] | None]:
        for i in np.flatnonzero(self._fits(plan.free, job)):
            at = self._room(plan.least_free(plan.times[i], job.request_s), job)
            if at is not None:
                return plan.times[i], at
        return math.inf, None

    def _fits(self, free: np.ndarray, job: SimulatedJob) -> np.ndarray:
        """Return at which times, of free GPUs [times, nodes], the job fits."""
        if job.gpus <= self.per_node:
            return free.max(1) >= job.gpus
        nodes = -(-job.gpus // self.per_node)
        return (free >= -(-job.gpus // nodes)).sum(1) >= nodes


class _Timeline:
    """Free GPUs of each node from each time on: `free` [times, nodes]."""

    def __init__(
        self,
        now_s: float,
        free: np.ndarray,
        leaving: Iterator[tuple[float, dict[int, int]]],
        up: np.ndarray,
    ) -> None:
        self.times, rows = [now_s], [free]
        for at_s, at in sorted(leaving, key=lambda x: x[0]):
            if at_s > self.times[-1]:
                self.times.append(at_s)
                rows.append(rows[-1].copy())
            for node, gpus in at.items():
                rows[-1][node] += gpus
        self.free = np.array(rows)
        self.free[:, ~up] = 0

    def least_free(self, begin_s: float, seconds: float) -> np.ndarray:
        """Return the minimum of free GPUs of each node, from `begin_s`, one of `times`, for so long."""
        begin = bisect_left(self.times, begin_s)
        return self.free[begin : max(bisect_left(self.times, begin_s + seconds), begin + 1)].min(0)

    def book(self, begin_s: float, seconds: float, at: dict[int, int]) -> None:
        """Book the GPUs for that long.

        Args:
            begin_s: Begin.
            seconds: Duration.
            at: GPUs by node.
        """
        end_s = begin_s + seconds
        begin, stop = bisect_left(self.times, begin_s), bisect_left(self.times, end_s)
        if stop == len(self.times) or self.times[stop] != end_s:
            self.times.insert(stop, end_s)
            self.free = np.concatenate([self.free[:stop], self.free[stop - 1 :]])
        for node, gpus in at.items():
            self.free[begin:stop, node] -= gpus
