"""Trainings in the queue of a simulated cluster: one gang, or workers that are separate jobs.

Work is counted in seconds of one GPU at full efficiency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stratbench.extensions.queue.simulator import Cluster, SimulatedJob

#: From a job's first line to its first training step: imports, rendezvous, data.
STARTUP_S = 60.0


@dataclass(frozen=True)
class Scaling:
    """Speed of n workers: n / (1 + loss (n - 1)) times one worker's, times sample efficiency.

    `worth`: the samples that DDP needs to the target, over those that this training needs.
    """

    loss: float = 0.02
    worth: float = 1.0

    def of_each(self, workers: int) -> float:
        """Return the efficiency of each worker."""
        return self.worth / (1 + self.loss * max(0, workers - 1))


@dataclass(frozen=True)
class SimulatedCheckpoints:
    """Period of a synchronous training's checkpoints, and the time that each blocks it."""

    every_s: float = 1800.0
    takes_s: float = 10.0

    @property
    def overhead(self) -> float:
        """Relative overhead."""
        return 1 + self.takes_s / self.every_s


#: Of a training whose workers have their state from each other: it is kept every minute for when nobody is
#: left, during the training. No measured cost stands against a gang's, so it is given the same share of time.
BESIDE = SimulatedCheckpoints(
    60.0, 60.0 * SimulatedCheckpoints().takes_s / SimulatedCheckpoints().every_s
)


@dataclass
class Training:
    """A training that is submitted once, and followed until it is done."""

    work_s: float
    #: The wall time that each of its jobs requests.
    request_s: float
    workers: int
    scaling: Scaling = Scaling()
    checkpoints: SimulatedCheckpoints = SimulatedCheckpoints()
    startup_s: float = STARTUP_S
    submit_s: float = math.nan
    done_s: float = math.nan
    left_s: float = 0.0

    @property
    def finished(self) -> bool:
        return not math.isnan(self.done_s)

    @property
    def time_to_result_s(self) -> float:
        """Time from the submission to the end, the queue included, or NaN before it."""
        return self.done_s - self.submit_s

    def begin(self, sim: Cluster) -> None:
        """Submits it now."""
        self.submit_s, self.left_s = sim.now_s, self.work_s
        self.enqueue(sim)

    def enqueue(self, sim: Cluster) -> None:
        raise NotImplementedError

    def woken(self, sim: Cluster, note: object) -> None:
        """Only a split training waits for anything but its jobs."""


@dataclass
class Gang(Training):
    """All workers in one job, at the pace of the slowest node.

    After a loss, or the end of its wall time, it resumes from its last checkpoint, at the end of the queue.
    """

    def enqueue(self, sim: Cluster) -> None:
        sim.submit(SimulatedJob(self.workers, math.inf, self.request_s, self))

    def _rate(self, sim: Cluster, job: SimulatedJob) -> float:
        """Return its speed. A gang on equal parts of several nodes may have more GPUs than requested."""
        slowest = min(sim.speed[node] for node in job.at)
        each = self.scaling.of_each(self.workers)
        return self.workers * each * slowest / self.checkpoints.overhead

    def started(self, sim: Cluster, job: SimulatedJob) -> None:
        sim.lasts(job, self.startup_s + self.left_s / self._rate(sim, job))

    def ended(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        if reason == "done":
            self.done_s = sim.now_s
            return
        kept_s = max(0.0, sim.now_s - job.start_s - self.startup_s)
        if reason != "limit":  # the end of its wall time is announced
            kept_s = kept_s // self.checkpoints.every_s * self.checkpoints.every_s
        self.left_s -= kept_s * self._rate(sim, job)
        self.enqueue(sim)


@dataclass
class ElasticTraining(Training):
    """Each worker is a job of one GPU; one that ends is submitted again, behind everybody.

    Asynchronous workers add up their speeds. `synchronous` ones run at the pace of the slowest, and stop for
    `pause_s` when one joins or leaves. They resume from the last checkpoint when one is lost or preempted.
    With `from_peers` they do so only when one is lost: a preempted one leaves after a step, and the last one
    saves the state first.
    """

    synchronous: bool = False
    pause_s: float = 60.0
    from_peers: bool = False
    preemptible: bool = False
    jobs: list[SimulatedJob] = field(default_factory=list)
    _first_step_s: float = math.nan
    _speeds: dict[int, float] = field(default_factory=dict)  # id of a job that trains -> speed
    _since_s: float = 0.0  # work is counted up to then; later than now in a pause
    _saved_left_s: float = 0.0  # work that was left at the last checkpoint
    _saved_at_s: float = 0.0
    _plan: int = 0  # number of the last planned end: earlier ones are void

    def enqueue(self, sim: Cluster) -> None:
        self._saved_left_s = self.left_s
        for _ in range(self.workers):
            self._submit(sim)

    def _submit(self, sim: Cluster) -> None:
        job = SimulatedJob(1, math.inf, self.request_s, self, preemptible=self.preemptible)
        self.jobs.append(job)
        sim.submit(job)

    @property
    def _rate(self) -> float:
        if not self._speeds:
            return 0.0
        n, speeds = len(self._speeds), self._speeds.values()
        each = self.scaling.of_each(n)
        if self.synchronous:
            return n * min(speeds) * each / self.checkpoints.overhead
        return sum(speeds) * each

    def _count(self, sim: Cluster) -> None:
        """Takes off what was done until now."""
        if sim.now_s <= self._since_s:
            return
        self.left_s -= (sim.now_s - self._since_s) * self._rate
        self._since_s = sim.now_s
        every_s = self.checkpoints.every_s
        if self.synchronous and sim.now_s >= self._saved_at_s + every_s:
            self._saved_at_s += (sim.now_s - self._saved_at_s) // every_s * every_s
            self._saved_left_s = self.left_s + (sim.now_s - self._saved_at_s) * self._rate

    def _pause(self, sim: Cluster) -> None:
        """Stop to continue with others: from a checkpoint, which is written or was read, or from a peer."""
        self._since_s = max(self._since_s, sim.now_s + self.pause_s)
        if not self.from_peers:
            self._saved_left_s, self._saved_at_s = self.left_s, sim.now_s

    def _plan_end(self, sim: Cluster) -> None:
        self._plan += 1
        if self._rate:
            begin_s = max(sim.now_s, self._since_s)
            sim.wake(self, begin_s + max(0.0, self.left_s) / self._rate, self._plan)

    def started(self, sim: Cluster, job: SimulatedJob) -> None:
        sim.wake(self, job.start_s + self.startup_s, job)

    def woken(self, sim: Cluster, note: object) -> None:
        if self.finished:
            return
        if isinstance(note, SimulatedJob):
            if note in sim.running:  # else it has ended while it started up
                self._join(sim, note)
        elif note == self._plan:
            self._count(sim)
            self.done_s = sim.now_s
            for job in self.jobs[:]:
                sim.cancel(job)

    def _join(self, sim: Cluster, job: SimulatedJob) -> None:
        self._count(sim)
        if math.isnan(self._first_step_s):
            self._first_step_s = self._since_s = self._saved_at_s = sim.now_s
        elif self.synchronous:
            if (
                sim.now_s > self._first_step_s
            ):  # workers that are there at the start begin with the others
                self._pause(sim)
        elif not self._speeds:
            self._since_s = sim.now_s
        self._speeds[id(job)] = min(sim.speed[node] for node in job.at)
        self._plan_end(sim)

    def ended(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        self.jobs.remove(job)
        if self.finished:
            return
        self._count(sim)
        if self._speeds.pop(id(job), None) is not None:
            if self.synchronous:
                if reason == "lost" or (reason == "preempted" and not self.from_peers):
                    self.left_s = self._saved_left_s
                self._pause(sim)
            self._plan_end(sim)
        self._submit(sim)
