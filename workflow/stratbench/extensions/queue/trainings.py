"""Simulated trainings in the queue of a cluster: one job (a gang), or workers that are separate jobs.

Work is counted in seconds of one GPU at full efficiency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stratbench.extensions.queue.simulator import Cluster, SimulatedJob

#: Seconds from the start of a job's script to its first training step: imports, rendezvous, data.
STARTUP_S = 60.0


@dataclass(frozen=True)
class Scaling:
    """Speed of n workers relative to one: sample_efficiency * n / (1 + loss_per_worker (n - 1)).

    Sample efficiency is the samples that DDP needs to reach the target, divided by those that this training
    needs.
    """

    loss_per_worker: float = 0.02
    sample_efficiency: float = 1.0

    def compute_efficiency(self, workers: int) -> float:
        """Return the speed per worker, relative to that of a single worker of DDP."""
        return self.sample_efficiency / (1 + self.loss_per_worker * max(0, workers - 1))


@dataclass(frozen=True)
class SimulatedCheckpoints:
    """Interval of a synchronous training's checkpoints, and seconds for which each blocks the training."""

    interval_s: float = 1800.0
    blocking_s: float = 10.0

    @property
    def time_factor(self) -> float:
        """Factor by which checkpoints lengthen the training."""
        return 1 + self.blocking_s / self.interval_s


#: Checkpoints of a training whose workers get their state from each other: one per minute, for the case that
#: all workers are lost. Their cost was not measured; they are assumed to take the same share of time as a
#: gang's.
PEER_CHECKPOINTS = SimulatedCheckpoints(
    60.0, 60.0 * SimulatedCheckpoints().blocking_s / SimulatedCheckpoints().interval_s
)


@dataclass
class Training:
    """A simulated training, from its submission until it is done. Work is in GPU-seconds."""

    work_s: float
    #: Wall time that each job of the training requests.
    request_s: float
    workers: int
    scaling: Scaling = Scaling()
    checkpoints: SimulatedCheckpoints = SimulatedCheckpoints()
    startup_s: float = STARTUP_S
    submit_s: float = math.nan
    done_s: float = math.nan
    remaining_work_s: float = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the training is done."""
        return not math.isnan(self.done_s)

    @property
    def time_to_result_s(self) -> float:
        """Seconds from submission to the end, including the queue, or NaN before the end."""
        return self.done_s - self.submit_s

    def submit_training(self, sim: Cluster) -> None:
        """Submit the training at the present time of the simulation."""
        self.submit_s, self.remaining_work_s = sim.now_s, self.work_s
        self.submit_jobs(sim)

    def submit_jobs(self, sim: Cluster) -> None:
        """Submit the jobs of the training to the simulated queue."""
        raise NotImplementedError

    def handle_wake(self, sim: Cluster, note: object) -> None:
        """Do nothing: only a training of separate worker jobs plans calls."""


@dataclass
class Gang(Training):
    """A training with all workers in one job, at the speed of the slowest node.

    After the loss of a node, or the end of its wall time, it is submitted again, and resumes from its last
    checkpoint.
    """

    def submit_jobs(self, sim: Cluster) -> None:
        sim.submit(SimulatedJob(self.workers, math.inf, self.request_s, self))

    def _compute_rate(self, sim: Cluster, job: SimulatedJob) -> float:
        """Return the GPU-seconds of work that are done per second."""
        slowest = min(sim.speed[node] for node in job.gpus_by_node)
        each = self.scaling.compute_efficiency(self.workers)
        return self.workers * each * slowest / self.checkpoints.time_factor

    def handle_start(self, sim: Cluster, job: SimulatedJob) -> None:
        sim.set_duration(job, self.startup_s + self.remaining_work_s / self._compute_rate(sim, job))

    def handle_end(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        if reason == "done":
            self.done_s = sim.now_s
            return
        kept_s = max(0.0, sim.now_s - job.start_s - self.startup_s)
        if reason != "limit":  # a job saves a checkpoint before the end of its wall time
            kept_s = kept_s // self.checkpoints.interval_s * self.checkpoints.interval_s
        self.remaining_work_s -= kept_s * self._compute_rate(sim, job)
        self.submit_jobs(sim)


@dataclass
class ElasticTraining(Training):
    """A training in which each worker is a job of one GPU, which is submitted again when it ends.

    The speeds of asynchronous workers add up. Synchronous workers have the speed of the slowest, and pause
    for `pause_s` when one joins or leaves. The workers resume from the last checkpoint when one is lost or
    preempted. With `resumes_from_peers` they do so only when a worker is lost. A preempted worker then leaves
    after a step, and the last worker saves the state before.
    """

    is_synchronous: bool = False
    pause_s: float = 60.0
    resumes_from_peers: bool = False
    is_preemptible: bool = False
    jobs: list[SimulatedJob] = field(default_factory=list)
    _first_step_s: float = math.nan
    # Speed of each training worker, by id of its job.
    _speeds: dict[int, float] = field(default_factory=dict)
    _counted_until_s: float = 0.0  # time until which work is counted; in the future during a pause
    _saved_work_s: float = 0.0  # work that remained at the last checkpoint
    _saved_at_s: float = 0.0
    _plan_number: int = 0  # number of the last planned end; earlier ones no longer count

    def submit_jobs(self, sim: Cluster) -> None:
        self._saved_work_s = self.remaining_work_s
        for _ in range(self.workers):
            self._submit_worker_job(sim)

    def _submit_worker_job(self, sim: Cluster) -> None:
        job = SimulatedJob(1, math.inf, self.request_s, self, is_preemptible=self.is_preemptible)
        self.jobs.append(job)
        sim.submit(job)

    @property
    def _work_rate(self) -> float:
        if not self._speeds:
            return 0.0
        n, speeds = len(self._speeds), self._speeds.values()
        each = self.scaling.compute_efficiency(n)
        if self.is_synchronous:
            return n * min(speeds) * each / self.checkpoints.time_factor
        return sum(speeds) * each

    def _subtract_done_work(self, sim: Cluster) -> None:
        """Subtract the work that was done until now."""
        if sim.now_s <= self._counted_until_s:
            return
        self.remaining_work_s -= (sim.now_s - self._counted_until_s) * self._work_rate
        self._counted_until_s = sim.now_s
        every_s = self.checkpoints.interval_s
        if self.is_synchronous and sim.now_s >= self._saved_at_s + every_s:
            self._saved_at_s += (sim.now_s - self._saved_at_s) // every_s * every_s
            self._saved_work_s = (
                self.remaining_work_s + (sim.now_s - self._saved_at_s) * self._work_rate
            )

    def _pause_training(self, sim: Cluster) -> None:
        """Pause the training because a worker has joined or left."""
        self._counted_until_s = max(self._counted_until_s, sim.now_s + self.pause_s)
        if not self.resumes_from_peers:
            self._saved_work_s, self._saved_at_s = self.remaining_work_s, sim.now_s

    def _plan_end(self, sim: Cluster) -> None:
        self._plan_number += 1
        if self._work_rate:
            begin_s = max(sim.now_s, self._counted_until_s)
            sim.schedule_wake(
                self, begin_s + max(0.0, self.remaining_work_s) / self._work_rate, self._plan_number
            )

    def handle_start(self, sim: Cluster, job: SimulatedJob) -> None:
        sim.schedule_wake(self, job.start_s + self.startup_s, job)

    def handle_wake(self, sim: Cluster, note: object) -> None:
        if self.is_finished:
            return
        if isinstance(note, SimulatedJob):
            if note in sim.running:  # the job may have ended during its startup
                self._start_worker(sim, note)
        elif note == self._plan_number:
            self._subtract_done_work(sim)
            self.done_s = sim.now_s
            for job in self.jobs[:]:
                sim.cancel(job)

    def _start_worker(self, sim: Cluster, job: SimulatedJob) -> None:
        self._subtract_done_work(sim)
        if math.isnan(self._first_step_s):
            self._first_step_s = self._counted_until_s = self._saved_at_s = sim.now_s
        elif self.is_synchronous:
            # Workers that are present at the start cause no pause.
            if sim.now_s > self._first_step_s:
                self._pause_training(sim)
        elif not self._speeds:
            self._counted_until_s = sim.now_s
        self._speeds[id(job)] = min(sim.speed[node] for node in job.gpus_by_node)
        self._plan_end(sim)

    def handle_end(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        self.jobs.remove(job)
        if self.is_finished:
            return
        self._subtract_done_work(sim)
        if self._speeds.pop(id(job), None) is not None:
            if self.is_synchronous:
                if reason == "lost" or (reason == "preempted" and not self.resumes_from_peers):
                    self.remaining_work_s = self._saved_work_s
                self._pause_training(sim)
            self._plan_end(sim)
        self._submit_worker_job(sim)
