"""Simulated trainings in a cluster's queue: one job (a gang), or a job per worker.

The work of a training is counted in seconds of one GPU that trains alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stratbench.extensions.queue.simulator import Cluster, SimulatedJob

#: Seconds from the start of a job's script to its first training step, for imports, rendezvous and data.
STARTUP_S = 60.0


@dataclass(frozen=True)
class Scaling:
    """How the speed of a training depends on the number of its workers.

    The speed of n workers, relative to one, is `sample_efficiency * n / (1 + speed_loss_per_worker * (n -
    1))`. Sample efficiency is the number of samples that DDP needs for the target score, divided by the
    number that this training needs.
    """

    speed_loss_per_worker: float = 0.02
    sample_efficiency: float = 1.0

    def compute_speed_per_worker(self, workers: int) -> float:
        """Return the speed per worker, relative to one worker that trains alone with DDP."""
        return self.sample_efficiency / (1 + self.speed_loss_per_worker * max(0, workers - 1))


@dataclass(frozen=True)
class SimulatedCheckpoints:
    """Checkpoints of a simulated synchronous training.

    Attributes:
        interval_s: Seconds between two checkpoints.
        blocking_s: Seconds for which each checkpoint blocks the training.
    """

    interval_s: float = 1800.0
    blocking_s: float = 10.0

    @property
    def training_time_factor(self) -> float:
        """Factor by which checkpoints make the training longer."""
        return 1 + self.blocking_s / self.interval_s


#: Checkpoints of workers that get their state from each other. These need a checkpoint only if all workers
#: are lost. There is one per minute. By assumption, they take the same share of the time as checkpoints of a
#: gang.
PEER_CHECKPOINTS = SimulatedCheckpoints(
    60.0, 60.0 * SimulatedCheckpoints().blocking_s / SimulatedCheckpoints().interval_s
)


@dataclass
class Training:
    """A simulated training. Times are in seconds on the simulation's clock.

    Attributes:
        work_gpu_s: Work of the training, in seconds of one GPU that trains alone.
        requested_wall_time_s: Wall time that each job of the training requests.
        workers: Number of workers.
        scaling: How the speed depends on the number of workers.
        checkpoints: Checkpoints of a synchronous training.
        startup_s: Seconds from the start of a job to its first training step.
        submit_s: When the training was submitted; NaN before.
        finish_time_s: When the training was done; NaN before.
        remaining_work_gpu_s: Work that is left, in the unit of `work_gpu_s`.
    """

    work_gpu_s: float
    requested_wall_time_s: float
    workers: int
    scaling: Scaling = Scaling()
    checkpoints: SimulatedCheckpoints = SimulatedCheckpoints()
    startup_s: float = STARTUP_S
    submit_s: float = math.nan
    finish_time_s: float = math.nan
    remaining_work_gpu_s: float = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the training is done."""
        return not math.isnan(self.finish_time_s)

    @property
    def time_to_result_s(self) -> float:
        """Seconds from the training's submission to its end, with its wait in the queue. NaN before."""
        return self.finish_time_s - self.submit_s

    def submit_training(self, sim: Cluster) -> None:
        """Submit the training to the simulated queue at the present time."""
        self.submit_s, self.remaining_work_gpu_s = sim.now_s, self.work_gpu_s
        self.submit_jobs(sim)

    def submit_jobs(self, sim: Cluster) -> None:
        """Submit the jobs of the training to the simulated queue."""
        raise NotImplementedError

    def handle_planned_call(self, sim: Cluster, argument: object) -> None:
        """Do nothing, because only a training with a job per worker plans calls."""


@dataclass
class Gang(Training):
    """A training with all workers in one job, at the speed of its slowest node.

    If a node fails or the wall time of the job ends, the job is submitted again, and resumes from the last
    checkpoint.
    """

    def submit_jobs(self, sim: Cluster) -> None:
        sim.submit_job(SimulatedJob(self.workers, math.inf, self.requested_wall_time_s, self))

    def _compute_work_per_second(self, sim: Cluster, job: SimulatedJob) -> float:
        """Return how much work the running job does per second."""
        slowest = min(sim.speed[node] for node in job.gpus_by_node)
        each = self.scaling.compute_speed_per_worker(self.workers)
        return self.workers * each * slowest / self.checkpoints.training_time_factor

    def handle_job_start(self, sim: Cluster, job: SimulatedJob) -> None:
        sim.set_job_duration(
            job,
            self.startup_s + self.remaining_work_gpu_s / self._compute_work_per_second(sim, job),
        )

    def handle_job_end(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        if reason == "done":
            self.finish_time_s = sim.now_s
            return
        kept_s = max(0.0, sim.now_s - job.start_s - self.startup_s)
        # Only a job that ends at its time limit saves a checkpoint of its last step.
        if reason != "limit":
            kept_s = kept_s // self.checkpoints.interval_s * self.checkpoints.interval_s
        self.remaining_work_gpu_s -= kept_s * self._compute_work_per_second(sim, job)
        self.submit_jobs(sim)


@dataclass
class ElasticTraining(Training):
    """A training with a job of one GPU per worker. A job that ends is submitted again.

    The speeds of asynchronous workers add up. Synchronous workers have the speed of the slowest one, and
    pause when one joins or leaves. They resume from the last checkpoint when a worker is lost or preempted.

    Attributes:
        is_synchronous: Whether the workers are synchronous.
        pause_per_worker_change_s: Seconds for which synchronous workers pause when one joins or leaves.
        resumes_from_peers: Whether synchronous workers resume from a checkpoint only when a worker is lost.
            Preempted workers then leave after a step, and the last one saves the state.
        is_preemptible: Whether the jobs of the workers can be preempted.
        worker_jobs: Queued and running jobs of the workers.
    """

    is_synchronous: bool = False
    pause_per_worker_change_s: float = 60.0
    resumes_from_peers: bool = False
    is_preemptible: bool = False
    worker_jobs: list[SimulatedJob] = field(default_factory=list)
    _first_step_time_s: float = math.nan
    #: Speed of each worker that trains, relative to a node that is not slow, by `id` of its job.
    _speed_by_job_id: dict[int, float] = field(default_factory=dict)
    #: Time until which the done work was subtracted. During a pause it is the end of the pause.
    _work_counted_until_s: float = 0.0
    #: Work that was left at the last checkpoint.
    _work_left_at_checkpoint_gpu_s: float = 0.0
    #: Time of the last checkpoint.
    _last_checkpoint_time_s: float = 0.0
    #: Number of the last planned end of the training. Ends that were planned before have no effect.
    _last_planned_end_number: int = 0

    def submit_jobs(self, sim: Cluster) -> None:
        self._work_left_at_checkpoint_gpu_s = self.remaining_work_gpu_s
        for _ in range(self.workers):
            self._submit_worker_job(sim)

    def _submit_worker_job(self, sim: Cluster) -> None:
        job = SimulatedJob(
            1, math.inf, self.requested_wall_time_s, self, is_preemptible=self.is_preemptible
        )
        self.worker_jobs.append(job)
        sim.submit_job(job)

    @property
    def _work_per_second(self) -> float:
        if not self._speed_by_job_id:
            return 0.0
        n, speeds = len(self._speed_by_job_id), self._speed_by_job_id.values()
        each = self.scaling.compute_speed_per_worker(n)
        if self.is_synchronous:
            return n * min(speeds) * each / self.checkpoints.training_time_factor
        return sum(speeds) * each

    def _subtract_done_work(self, sim: Cluster) -> None:
        """Subtract the work done until now from the work that is left."""
        if sim.now_s <= self._work_counted_until_s:
            return
        self.remaining_work_gpu_s -= (
            sim.now_s - self._work_counted_until_s
        ) * self._work_per_second
        self._work_counted_until_s = sim.now_s
        every_s = self.checkpoints.interval_s
        if self.is_synchronous and sim.now_s >= self._last_checkpoint_time_s + every_s:
            self._last_checkpoint_time_s += (
                (sim.now_s - self._last_checkpoint_time_s) // every_s * every_s
            )
            self._work_left_at_checkpoint_gpu_s = (
                self.remaining_work_gpu_s
                + (sim.now_s - self._last_checkpoint_time_s) * self._work_per_second
            )

    def _pause_training(self, sim: Cluster) -> None:
        """Let synchronous workers pause, because one has joined or left."""
        self._work_counted_until_s = max(
            self._work_counted_until_s, sim.now_s + self.pause_per_worker_change_s
        )
        if not self.resumes_from_peers:
            self._work_left_at_checkpoint_gpu_s, self._last_checkpoint_time_s = (
                self.remaining_work_gpu_s,
                sim.now_s,
            )

    def _plan_training_end(self, sim: Cluster) -> None:
        self._last_planned_end_number += 1
        if self._work_per_second:
            begin_s = max(sim.now_s, self._work_counted_until_s)
            sim.schedule_call(
                self,
                begin_s + max(0.0, self.remaining_work_gpu_s) / self._work_per_second,
                self._last_planned_end_number,
            )

    def handle_job_start(self, sim: Cluster, job: SimulatedJob) -> None:
        sim.schedule_call(self, job.start_s + self.startup_s, job)

    def handle_planned_call(self, sim: Cluster, argument: object) -> None:
        if self.is_finished:
            return
        if isinstance(argument, SimulatedJob):
            # The job may have ended during its startup. Then it starts no worker.
            if argument in sim.running:
                self._start_worker(sim, argument)
        elif argument == self._last_planned_end_number:
            self._subtract_done_work(sim)
            self.finish_time_s = sim.now_s
            for job in self.worker_jobs[:]:
                sim.cancel_job(job)

    def _start_worker(self, sim: Cluster, job: SimulatedJob) -> None:
        self._subtract_done_work(sim)
        if math.isnan(self._first_step_time_s):
            self._first_step_time_s = self._work_counted_until_s = self._last_checkpoint_time_s = (
                sim.now_s
            )
        elif self.is_synchronous:
            # Workers that start at the same time as the first one cause no pause.
            if sim.now_s > self._first_step_time_s:
                self._pause_training(sim)
        elif not self._speed_by_job_id:
            self._work_counted_until_s = sim.now_s
        self._speed_by_job_id[id(job)] = min(sim.speed[node] for node in job.gpus_by_node)
        self._plan_training_end(sim)

    def handle_job_end(self, sim: Cluster, job: SimulatedJob, reason: str) -> None:
        self.worker_jobs.remove(job)
        if self.is_finished:
            return
        self._subtract_done_work(sim)
        if self._speed_by_job_id.pop(id(job), None) is not None:
            if self.is_synchronous:
                if reason == "lost" or (reason == "preempted" and not self.resumes_from_peers):
                    self.remaining_work_gpu_s = self._work_left_at_checkpoint_gpu_s
                self._pause_training(sim)
            self._plan_training_end(sim)
        self._submit_worker_job(sim)
