"""Simulates a cluster with GPUs and its queue: first come, first served, with backfill.

As in SLURM there are two passes. The main one starts jobs in their order, and stops at the first job that
does not fit. Backfill then starts later jobs that, by their requested wall times, delay no reservation. There
are no fair-share, quotas or priorities other than the order of submission.
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

#: Number of reservations if every waiting job has one, as by SLURM's default (bf_job_part_count_reserve = 0).
ALL = 10**6
#: Time since the begin of the simulation.
Seconds = float
#: Number of GPUs, by number of the node.
GpusByNode = dict[int, int]


@dataclass(frozen=True)
class Arrival:
    """A job of another user that arrives in the queue.

    Attributes:
        submit_s: When the job is submitted, on the simulation's clock.
        gpus: Number of GPUs.
        duration_s: Seconds for which the job runs.
        requested_wall_time_s: Wall time that the job requests.
    """

    submit_s: float
    gpus: int
    duration_s: float
    requested_wall_time_s: float


class JobOwner(Protocol):
    """An object that submits simulated jobs, such as a training. The simulator calls its methods."""

    def handle_job_start(self, sim: Cluster, job: SimulatedJob) -> None:
        """Handle the start of one of this owner's jobs."""

    def handle_job_end(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        """Handle the end of one of this owner's jobs.

        Args:
            sim: The simulated cluster.
            job: The job.
            reason: `done`, `limit` (the end of its wall time), `lost` (a node failed), `preempted` or
                `cancelled`.
        """

    def handle_planned_call(self, sim: Cluster, argument: object) -> None:
        """Handle a call that `Cluster.schedule_call` has planned."""


@dataclass(eq=False)
class SimulatedJob:
    """A job of the simulation. It runs on one node if possible, else in equal parts on the fewest nodes.

    Attributes:
        gpus: Number of GPUs.
        duration_s: Seconds for which the job runs.
        requested_wall_time_s: Wall time that the job requests.
        owner: The training that has submitted the job; None for jobs of other users.
        is_preemptible: Whether other jobs can preempt the job.
        submit_s: When the job was submitted.
        start_s: When its script starts.
        end_s: When it ends and its GPUs are free.
        gpus_by_node: Its number of GPUs on each node, while it runs.
    """

    gpus: int
    duration_s: float
    requested_wall_time_s: float
    owner: JobOwner | None = None
    is_preemptible: bool = False
    submit_s: float = 0.0
    start_s: float = math.nan
    end_s: float = math.nan
    gpus_by_node: GpusByNode = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """How the simulated cluster schedules jobs, and how its nodes fail.

    Attributes:
        num_reservations: Number of waiting jobs that backfill must not delay: 1 (EASY backfill), ALL (SLURM's
            default) or 0. None: there is no backfill.
        backfill_interval_s: Seconds between two runs of backfill; 0 runs it after every event.
        max_jobs_per_backfill: Number of waiting jobs that one run of backfill considers.
        job_start_delay_s: Seconds from the allocation of GPUs to the start of a job's script.
        job_end_delay_s: Seconds from the end of a job until its GPUs are free.
        node_mtbf_s: Mean seconds between failures of one node, which are exponentially distributed.
        node_repair_s: Seconds until a failed node is repaired.
        slow_node_share: Share of nodes on which the training is slower. Other users' jobs are not slower
            there.
        slow_node_factor: Factor by which the training is slower there.
    """

    num_reservations: int | None = 1
    backfill_interval_s: float = 0.0
    max_jobs_per_backfill: int = 100
    job_start_delay_s: float = 0.0
    job_end_delay_s: float = 0.0
    node_mtbf_s: float = math.inf
    node_repair_s: float = 3600.0
    slow_node_share: float = 0.0
    slow_node_factor: float = 1.0


class Cluster:
    """A simulated cluster at the time `now_s`, with its queue. `simulate_until` advances the time."""

    def __init__(
        self,
        nodes: int,
        gpus_per_node: int,
        arrivals: Sequence[Arrival],
        rules: Rules,
        seed: int = 0,
    ) -> None:
        """Make an empty cluster, in which all GPUs are idle.

        Args:
            nodes: Number of nodes.
            gpus_per_node: GPUs of each node.
            arrivals: Jobs of other users, sorted by submission time.
            rules: How the cluster schedules jobs, and how nodes fail.
            seed: Seed that decides which nodes are slow, and when nodes fail.
        """
        if wide := next((a for a in arrivals if a.gpus > nodes * gpus_per_node), None):
            raise ValueError(
                f"a job requests {wide.gpus} GPUs, but the cluster has {nodes * gpus_per_node}: it would "
                "wait forever; simulate more nodes"
            )
        slow = random.Random(seed)
        self.rules, self.per_node, self.now_s = rules, gpus_per_node, 0.0
        self.speed = [
            1 / rules.slow_node_factor if slow.random() < rules.slow_node_share else 1.0
            for _ in range(nodes)
        ]
        self.queue: list[SimulatedJob] = []
        self.running: list[SimulatedJob] = []
        #: Number of GPUs and wait in seconds of other users' started jobs, in the order of their starts.
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
                self._add_event(
                    self._random.expovariate(1 / rules.node_mtbf_s), "node_failure", node
                )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the cluster."""
        return len(self._free) * self.per_node

    def copy_cluster(self) -> Cluster:
        """Return a copy of the cluster that has the same future jobs and node failures.

        Raises:
            ValueError: If a job has an owner, because the owner's state cannot be copied.
        """
        if any(job.owner for job in (*self.queue, *self.running)):
            raise ValueError(
                "the simulated cluster has a job of a training, so it cannot be copied; "
                "copy it before a training is submitted"
            )
        other = copy(self)
        twins = {id(job): copy(job) for job in (*self.queue, *self.running)}
        other.queue = [twins[id(job)] for job in self.queue]
        other.running = [twins[id(job)] for job in self.running]
        other._free, other._up, other.waits = self._free.copy(), self._up.copy(), self.waits[:]
        other._events = [(t, n, kind, twins.get(id(x), x)) for t, n, kind, x in self._events]
        other._random = random.Random()
        other._random.setstate(self._random.getstate())
        return other

    # --- methods for owners of jobs ---------------------------------------------------------------

    def submit_job(self, job: SimulatedJob) -> None:
        """Add a job to the end of the queue, at the present time."""
        job.submit_s = self.now_s
        self.queue.append(job)
        self._changed = True

    def cancel_job(self, job: SimulatedJob) -> None:
        """Remove a job from the queue, or stop it if it runs."""
        if job in self.queue:
            self.queue.remove(job)
        elif job in self.running:
            self._stop_job(job, "cancelled")

    def schedule_call(self, owner: JobOwner, time_s: float, argument: object) -> None:
        """Plan a call of `owner.handle_planned_call(sim, argument)` at a simulated time.

        Args:
            owner: Object whose method is called.
            time_s: Simulated time of the call.
            argument: Argument of the call.
        """
        self._add_event(time_s, "planned_call", (owner, argument))

    def set_job_duration(self, job: SimulatedJob, duration_s: float) -> None:
        """Set for how long a running job runs. It ends earlier if its requested wall time is shorter."""
        job.duration_s = duration_s
        self._schedule_job_end(job)

    # --- events ----------------------------------------------------------------------------------

    def simulate_until(
        self, time_s: float = math.inf, is_done: Callable[[], bool] = lambda: False
    ) -> None:
        """Simulate until a time, until `is_done` returns True, or until no event is left."""
        rules = self.rules
        if self._changed:
            self._schedule_jobs(not rules.backfill_interval_s)
        while not is_done():
            arrival = event = backfill = math.inf
            if self._next_arrival < len(self._arrivals):
                arrival = self._arrivals[self._next_arrival].submit_s
            if self._events:
                event = self._events[0][0]
            if (
                self._changed
                and self.queue
                and rules.num_reservations is not None
                and rules.backfill_interval_s
            ):
                backfill = max(self.now_s, self._next_backfill_s)
            then = min(arrival, event, backfill)
            if then > time_s or math.isinf(then):
                if math.isfinite(time_s):
                    self._advance_clock(max(self.now_s, time_s))
                return
            self._advance_clock(then)
            if arrival == then:
                next_job = self._arrivals[self._next_arrival]
                self._next_arrival += 1
                self.submit_job(
                    SimulatedJob(next_job.gpus, next_job.duration_s, next_job.requested_wall_time_s)
                )
            elif event == then:
                _, _, kind, subject = heapq.heappop(self._events)
                getattr(self, f"_handle_{kind}")(subject)
            due = then not in (arrival, event)
            self._schedule_jobs(due or not rules.backfill_interval_s)

    def _advance_clock(self, until_s: float) -> None:
        used = sum(sum(job.gpus_by_node.values()) for job in self.running)
        self.busy_gpu_s += (until_s - self.now_s) * used
        self.now_s = until_s

    def _add_event(self, time_s: float, kind: str, subject: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, kind, subject))

    def _handle_job_end(self, job: SimulatedJob) -> None:
        # If the end of the job was changed after this event was planned, the event has no effect.
        if job in self.running and job.end_s <= self.now_s:
            self._stop_job(job, "done" if job.duration_s <= job.requested_wall_time_s else "limit")

    def _handle_planned_call(self, owner_and_argument: tuple[JobOwner, object]) -> None:
        """Make a call that `schedule_call` planned for the present time."""
        owner, argument = owner_and_argument
        owner.handle_planned_call(self, argument)

    def _handle_node_failure(self, node: int) -> None:
        self._up[node] = False
        for job in [j for j in self.running if node in j.gpus_by_node]:
            self._stop_job(job, "lost")
        self._add_event(self.now_s + self.rules.node_repair_s, "node_repair", node)

    def _handle_node_repair(self, node: int) -> None:
        self._up[node] = self._changed = True
        self._add_event(
            self.now_s + self._random.expovariate(1 / self.rules.node_mtbf_s), "node_failure", node
        )

    def _schedule_job_end(self, job: SimulatedJob) -> None:
        ran_s = min(job.duration_s, job.requested_wall_time_s)
        job.end_s = job.start_s + ran_s + self.rules.job_end_delay_s
        if math.isfinite(job.end_s):
            self._add_event(job.end_s, "job_end", job)

    def _start_job(self, job: SimulatedJob, gpus_by_node: GpusByNode) -> None:
        self.queue.remove(job)
        job.gpus_by_node = gpus_by_node
        job.start_s = self.now_s + self.rules.job_start_delay_s
        for node, gpus in gpus_by_node.items():
            self._free[node] -= gpus
        self.running.append(job)
        self._schedule_job_end(job)
        if job.owner is None:
            self.waits.append((job.gpus, job.start_s - job.submit_s))
        else:
            job.owner.handle_job_start(self, job)

    def _stop_job(self, job: SimulatedJob, reason: str) -> None:
        self.running.remove(job)
        for node, gpus in job.gpus_by_node.items():
            self._free[node] += gpus
        self._changed = True
        if job.owner is not None:
            job.owner.handle_job_end(self, job, reason)
        # A job of another user whose node failed is submitted again, and continues where it was.
        elif reason == "lost":
            self.submit_job(
                SimulatedJob(job.gpus, max(1.0, job.end_s - self.now_s), job.requested_wall_time_s)
            )

    # --- scheduling ------------------------------------------------------------------------------

    def _schedule_jobs(self, runs_backfill: bool) -> None:
        waiting = iter(self.queue[:])
        for job in waiting:
            at = self._find_gpus_for_job(
                np.where(self._up, self._free, 0), job
            ) or self._make_room_by_preemption(job)
            if at is None:
                if runs_backfill and self.rules.num_reservations is not None:
                    self._next_backfill_s = self.now_s + self.rules.backfill_interval_s
                    self._changed = False
                    self._backfill_jobs([job, *waiting][: self.rules.max_jobs_per_backfill])
                return
            self._start_job(job, at)

    def _find_gpus_for_job(self, free: np.ndarray, job: SimulatedJob) -> GpusByNode | None:
        """Return the GPUs, by node, on which a job can start, or None.

        `free` has the number of free GPUs of each node.
        """
        gpus = job.gpus
        if gpus > free.sum():
            return None
        if gpus <= self.per_node:
            fits = np.flatnonzero(free >= gpus)
            # The job gets the node with the fewest free GPUs that are enough.
            return {int(fits[np.argmin(free[fits])]): gpus} if fits.size else None
        nodes = -(-gpus // self.per_node)
        each = -(-gpus // nodes)
        fits = np.flatnonzero(free >= each)[:nodes]
        return {int(node): each for node in fits} if fits.size == nodes else None

    def _make_room_by_preemption(self, job: SimulatedJob) -> GpusByNode | None:
        """Stop preemptible jobs so that another job can start, if this is possible.

        Return the numbers of GPUs for that job, by node, or None.
        """
        if job.is_preemptible or not any(j.is_preemptible for j in self.running):
            return None
        at = self._find_gpus_for_job(
            np.where(self._up, self._count_free_or_preemptible_gpus(), 0), job
        )
        if at is not None:
            self._preempt_jobs(at)
        return at

    def _count_free_or_preemptible_gpus(self) -> np.ndarray:
        free = self._free.copy()
        for job in self.running:
            if job.is_preemptible:
                for node, gpus in job.gpus_by_node.items():
                    free[node] += gpus
        return free

    def _preempt_jobs(self, gpus_by_node: GpusByNode) -> None:
        """Stop preemptible jobs until these GPUs are free. The job that started last is stopped first."""
        for victim in [j for j in reversed(self.running) if j.is_preemptible]:
            if any(
                self._free[node] < gpus and node in victim.gpus_by_node
                for node, gpus in gpus_by_node.items()
            ):
                self._stop_job(victim, "preempted")

    def _backfill_jobs(self, waiting: list[SimulatedJob]) -> None:
        plan = _FreeGpuPlan(
            self.now_s,
            self._count_free_or_preemptible_gpus(),
            self._iter_expected_job_ends(),
            self._up,
        )
        reserved = 0
        for job in waiting:
            if job not in self.queue:
                continue
            free = plan.count_gpus_free_throughout(self.now_s, job.requested_wall_time_s)
            # A preemptible job starts only on free GPUs, and gets no reservation.
            if job.is_preemptible:
                at = self._find_gpus_for_job(np.minimum(free, self._free), job)
                if at is not None:
                    self._start_job(job, at)
                continue
            begin_s, at = self.now_s, self._find_gpus_for_job(free, job)
            if at is not None:
                self._preempt_jobs(at)
                self._start_job(job, at)
            elif reserved < self.rules.num_reservations:
                reserved += 1
                begin_s, at = self._find_earliest_job_start(plan, job)
            if at is not None:
                plan.reserve_gpus(begin_s, job.requested_wall_time_s, at)

    def _iter_expected_job_ends(self) -> Iterator[tuple[Seconds, GpusByNode]]:
        """Yield each running job's latest end by its requested wall time, and its GPUs.

        Preemptible jobs are left out.
        """
        for job in self.running:
            if not job.is_preemptible:
                yield (
                    max(job.start_s + job.requested_wall_time_s, self.now_s + 1e-6),
                    job.gpus_by_node,
                )

    def _find_earliest_job_start(
        self, plan: _FreeGpuPlan, job: SimulatedJob
    ) -> tuple[Seconds, GpusByNode | None]:
        for i in np.flatnonzero(self._find_times_with_enough_gpus(plan.free, job)):
            at = self._find_gpus_for_job(
                plan.count_gpus_free_throughout(plan.times[i], job.requested_wall_time_s), job
            )
            if at is not None:
                return plan.times[i], at
        return math.inf, None

    def _find_times_with_enough_gpus(self, free: np.ndarray, job: SimulatedJob) -> np.ndarray:
        """Return a mask of the times at which a job fits on the free GPUs.

        `free` has the number of free GPUs, shape [times, nodes].
        """
        if job.gpus <= self.per_node:
            return free.max(1) >= job.gpus
        nodes = -(-job.gpus // self.per_node)
        return (free >= -(-job.gpus // nodes)).sum(1) >= nodes


class _FreeGpuPlan:
    """Plan of the free GPUs of each node at future times, shape [times, nodes]."""

    def __init__(
        self,
        now_s: float,
        free: np.ndarray,
        leaving: Iterator[tuple[Seconds, GpusByNode]],
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

    def count_gpus_free_throughout(self, begin_s: float, duration_s: float) -> np.ndarray:
        """Return how many GPUs of each node are free during a whole time interval."""
        begin = bisect_left(self.times, begin_s)
        return self.free[begin : max(bisect_left(self.times, begin_s + duration_s), begin + 1)].min(
            0
        )

    def reserve_gpus(self, begin_s: float, duration_s: float, gpus_by_node: GpusByNode) -> None:
        """Reserve GPUs for a time interval.

        Args:
            begin_s: Begin of the interval.
            duration_s: Length of the interval.
            gpus_by_node: Number of GPUs to reserve, by node.
        """
        end_s = begin_s + duration_s
        begin, stop = bisect_left(self.times, begin_s), bisect_left(self.times, end_s)
        if stop == len(self.times) or self.times[stop] != end_s:
            self.times.insert(stop, end_s)
            self.free = np.concatenate([self.free[:stop], self.free[stop - 1 :]])
        for node, gpus in gpus_by_node.items():
            self.free[begin:stop, node] -= gpus
