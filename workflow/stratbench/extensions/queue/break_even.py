"""Simulates a queued training, as one job (a gang) or as separate worker jobs.

All modes are simulated in the same queue at the same submission times. Asynchronous workers are simulated
with several sample efficiencies (the samples that DDP needs, divided by those that they need). From these
follows the sample efficiency with which they are as fast as another mode (break even).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from stratbench.extensions.queue.background import make_poisson_arrivals
from stratbench.extensions.queue.simulator import Arrival, Cluster, Rules
from stratbench.extensions.queue.trainings import (
    PEER_CHECKPOINTS,
    STARTUP_S,
    ElasticTraining,
    Gang,
    Scaling,
    Training,
)
from stratbench.statistics.intervals import IntervalEstimate

GANG, HALF = "gang", "gang N/2"
SYNCHRONOUS, ASYNCHRONOUS = "split synchronous", "split asynchronous"
#: Modes of a training, from the simplest to the most complex. The asynchronous mode is simulated for several
#: sample efficiencies.
MODES = (GANG, HALF, SYNCHRONOUS, ASYNCHRONOUS)
#: Simulated sample efficiencies of asynchronous workers. Times between them are interpolated linearly in 1 /
#: efficiency.
WORTHS = (1.0, 0.8, 0.6)
#: Ratio of the wall time that a job of the training requests to the time that it needs.
REQUEST_FACTOR = 1.5
#: Number of synthetic jobs per GPU of the cluster. They arrive over about three days, and the first quarter
#: of them fills the cluster.
JOBS_PER_GPU = 700 / 64
#: Seconds after which the simulation of a training is stopped. Longer trainings count with this time.
MAX_S = 60 * 86400.0


@dataclass(frozen=True)
class QueuedTraining:
    """The training to simulate, whose jobs wait in a queue.

    Attributes:
        num_gpus: Number of GPUs.
        training_hours: Hours that the training takes on these GPUs, without startup and queue.
        speed_loss_per_worker: Share of its speed that a worker loses per further worker.
        pause_per_worker_change_s: Seconds for which synchronous workers pause when one joins or leaves.
        resumes_from_peers: Whether synchronous workers get their state from each other after a pause, and not
            from a checkpoint.
        are_workers_preemptible: Whether workers that are separate jobs can be preempted.
    """

    num_gpus: int
    training_hours: float
    speed_loss_per_worker: float = 0.02
    pause_per_worker_change_s: float = 60.0
    resumes_from_peers: bool = False
    are_workers_preemptible: bool = False

    @property
    def work_gpu_s(self) -> float:
        """Work of the training, in seconds of one GPU that trains alone."""
        return (
            self.num_gpus
            * Scaling(self.speed_loss_per_worker).compute_speed_per_worker(self.num_gpus)
            * self.training_hours
            * 3600
        )

    def compute_job_wall_time_s(self, workers: int, sample_efficiency: float = 1.0) -> float:
        """Return the wall time that each job of the training requests, rounded up to minutes.

        Args:
            workers: Number of workers.
            sample_efficiency: Sample efficiency of the workers.
        """
        alone_s = self.work_gpu_s / (
            workers * Scaling(self.speed_loss_per_worker).compute_speed_per_worker(workers)
        )
        return math.ceil((STARTUP_S + REQUEST_FACTOR * alone_s) / 60) * 60.0 / sample_efficiency

    def make_training_factories(
        self, sample_efficiencies: Sequence[float]
    ) -> dict[str, Callable[[], Training]]:
        """Return a function that creates the training, for each mode.

        Asynchronous workers have a mode per sample efficiency.
        """
        scaling = Scaling(self.speed_loss_per_worker)

        def make_gang(workers: int) -> Callable[[], Training]:
            return partial(
                Gang, self.work_gpu_s, self.compute_job_wall_time_s(workers), workers, scaling
            )

        def make_split_training(sample_efficiency: float, **options) -> Callable[[], Training]:
            requested_s = self.compute_job_wall_time_s(self.num_gpus, sample_efficiency)
            scaled = Scaling(self.speed_loss_per_worker, sample_efficiency)
            options["is_preemptible"] = self.are_workers_preemptible
            return partial(
                ElasticTraining, self.work_gpu_s, requested_s, self.num_gpus, scaled, **options
            )

        recovery = (
            {"resumes_from_peers": True, "checkpoints": PEER_CHECKPOINTS}
            if self.resumes_from_peers
            else {}
        )
        return {
            GANG: make_gang(self.num_gpus),
            HALF: make_gang(max(1, self.num_gpus // 2)),
            SYNCHRONOUS: make_split_training(
                1.0,
                is_synchronous=True,
                pause_per_worker_change_s=self.pause_per_worker_change_s,
                **recovery,
            ),
        } | {name_asynchronous_mode(e): make_split_training(e) for e in sample_efficiencies}


def name_asynchronous_mode(sample_efficiency: float) -> str:
    """Return the name of the mode of asynchronous workers with a sample efficiency."""
    return f"{ASYNCHRONOUS} {sample_efficiency:g}"


class QueueBlock(NamedTuple):
    """Jobs of other users in one simulated queue, and submission times of the training."""

    arrivals: Sequence[Arrival]
    submission_times_s: Sequence[float]


@dataclass(frozen=True)
class TrainingQueue:
    """A simulated cluster, and one or more queues (blocks) to which the training is submitted."""

    nodes: int
    gpus_per_node: int
    rules: Rules
    blocks: Sequence[QueueBlock]


@dataclass
class ModeTimes:
    """Simulated times of a training from submission to result, in all modes.

    Attributes:
        hours_by_mode: Hours by mode, shape [blocks, submission times].
        mean_busy_gpu_share: Mean share of GPUs that other users' jobs used.
    """

    hours_by_mode: dict[str, np.ndarray]
    mean_busy_gpu_share: float

    def compute_mean_hours(self, mode: str) -> IntervalEstimate:
        """Return the mean hours of a training in a mode, with a 95 % interval."""
        return compute_jackknife_interval(
            lambda kept: float(self.hours_by_mode[mode][kept].mean()), len(self.hours_by_mode[mode])
        )

    def compute_mode_time_ratio(self, mode: str, other_mode: str) -> IntervalEstimate:
        """Return the mean time in `mode` divided by that in `other_mode`.

        The ratio has a 95 % interval. Both modes have the same submission times.
        """

        def compute_mean_ratio(blocks: np.ndarray) -> float:
            hours, other_hours = self.hours_by_mode[mode], self.hours_by_mode[other_mode]
            return float(hours[blocks].mean() / other_hours[blocks].mean())

        return compute_jackknife_interval(compute_mean_ratio, len(self.hours_by_mode[mode]))

    def compute_p90_hours(self, mode: str) -> float:
        """Return the hours within which 90 % of the trainings are done."""
        return float(np.quantile(self.hours_by_mode[mode], 0.9))

    def list_simulated_efficiencies(self) -> list[float]:
        """Return the simulated sample efficiencies of asynchronous workers, from high to low."""
        prefix = f"{ASYNCHRONOUS} "
        efficiencies = [
            float(a.removeprefix(prefix)) for a in self.hours_by_mode if a.startswith(prefix)
        ]
        return sorted(efficiencies, reverse=True)

    def compute_break_even_efficiency(self, other_mode: str) -> IntervalEstimate:
        """Return the sample efficiency with which asynchronous workers are as fast as another mode.

        The result has a 95 % interval. It is infinite, without an interval, if asynchronous workers are
        slower even with the highest simulated efficiency. It is 0 if they are faster even with the lowest
        one.
        """
        efficiencies = self.list_simulated_efficiencies()

        def find_break_even_efficiency(blocks: np.ndarray) -> float:
            target_h = self.hours_by_mode[other_mode][blocks].mean()
            asynchronous_h = [
                float(self.hours_by_mode[name_asynchronous_mode(e)][blocks].mean())
                for e in efficiencies
            ]
            if target_h < asynchronous_h[0]:
                return math.inf
            if target_h > asynchronous_h[-1]:
                return 0.0
            return 1 / float(np.interp(target_h, asynchronous_h, [1 / e for e in efficiencies]))

        return compute_jackknife_interval(
            find_break_even_efficiency, len(self.hours_by_mode[other_mode])
        )


def compute_jackknife_interval(
    compute_value: Callable[[np.ndarray], float], num_blocks: int
) -> IntervalEstimate:
    """Compute a positive value from all simulated queues (blocks), with a 95 % jackknife interval.

    The interval is by Student's t on logarithms (Tukey 1958; Miller 1974). There is none if a value is 0 or
    infinite.

    Args:
        compute_value: Computes the value from the indices of the blocks to use.
        num_blocks: Number of blocks.
    """
    every = np.arange(num_blocks)
    whole = compute_value(every)
    parts = [compute_value(np.delete(every, i)) for i in every] if num_blocks > 1 else []
    if not parts or not all(0 < x < math.inf for x in (whole, *parts)):
        return IntervalEstimate(whole)
    from scipy.special import stdtrit  # the import of scipy takes 0.2 s

    logs = np.log(parts)
    error = math.sqrt((num_blocks - 1) / num_blocks * float(((logs - logs.mean()) ** 2).sum()))
    half = float(stdtrit(num_blocks - 1, 0.975)) * error
    return IntervalEstimate(whole, whole * math.exp(-half), whole * math.exp(half))


def simulate_modes(
    queue: TrainingQueue,
    queued_training: QueuedTraining,
    sample_efficiencies: Sequence[float] = WORTHS,
    modes: Sequence[str] | None = None,
    on_submission_time: Callable[[], None] = lambda: None,
) -> ModeTimes:
    """Simulate a training in every mode at every submission time of a queue.

    Args:
        queue: The queue.
        queued_training: The training.
        sample_efficiencies: Sample efficiencies of asynchronous workers.
        modes: Names of the modes to simulate, or None for all.
        on_submission_time: Called after each simulated submission time.
    """
    made = queued_training.make_training_factories(sample_efficiencies)
    made = {name: made[name] for name in modes or made}
    hours: dict[str, list[list[float]]] = {name: [] for name in made}
    busy = []
    for number, (arrivals, moments) in enumerate(queue.blocks):
        base = Cluster(queue.nodes, queue.gpus_per_node, arrivals, queue.rules, number)
        for row in hours.values():
            row.append([])
        for moment_s in moments:
            base.simulate_until(moment_s)
            for name, make in made.items():
                sim, training = base.copy_cluster(), make()
                training.submit_training(sim)
                end_s = sim.now_s + MAX_S
                sim.simulate_until(end_s, is_done=lambda training=training: training.is_finished)
                took_s = training.time_to_result_s if training.is_finished else MAX_S
                hours[name][-1].append(took_s / 3600)
            on_submission_time()
        busy.append(base.busy_gpu_s / base.now_s / base.num_gpus)
    return ModeTimes({name: np.array(rows) for name, rows in hours.items()}, float(np.mean(busy)))


def iter_submission_times_s(
    stream_end_s: float, count: int, begin_share: float = 0.25, end_share: float = 0.85
) -> Iterator[float]:
    """Yield evenly spaced submission times in the middle of a stream of other users' jobs.

    Args:
        stream_end_s: Time at which the stream ends, in seconds from its begin.
        count: Number of submission times.
        begin_share: Share of the stream before the first submission time.
        end_share: Share of the stream before the end of the interval after the last submission time.
    """
    for i in range(count):
        yield stream_end_s * (begin_share + (end_share - begin_share) * i / count)


def make_poisson_queue(
    nodes: int,
    gpus_per_node: int,
    rules: Rules,
    load: float,
    hours: float,
    num_blocks: int,
    times_per_block: int,
) -> TrainingQueue:
    """Make simulated queues (blocks) with synthetic jobs of other users.

    The streams are so long that other jobs still arrive while a training of `hours` runs.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
        rules: Behaviour of the cluster.
        load: Mean share of the GPUs that the jobs use.
        hours: Duration of the training in hours.
        num_blocks: Number of blocks.
        times_per_block: Number of submission times per block.
    """
    capacity = nodes * gpus_per_node
    with_moments = math.ceil(JOBS_PER_GPU * capacity)
    jobs = math.ceil(with_moments * max(1.0, hours / 6))
    drawn = []
    for seed in range(num_blocks):
        arrivals = make_poisson_arrivals(jobs, load, capacity, seed)
        end_s = arrivals[with_moments - 1].submit_s
        drawn.append(QueueBlock(arrivals, list(iter_submission_times_s(end_s, times_per_block))))
    return TrainingQueue(nodes, gpus_per_node, rules, drawn)


def make_recorded_queue(
    nodes: int,
    gpus_per_node: int,
    rules: Rules,
    arrivals: Sequence[Arrival],
    hours: float,
    num_blocks: int,
    times_per_block: int,
    complete_from_s: float = 0.0,
) -> TrainingQueue:
    """Make simulated queues (blocks) with the recorded jobs of a cluster.

    All blocks have the same jobs, and each has some of the submission times. No training is submitted in the
    last part of the recorded time, so that it can end before.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
        rules: Behaviour of the cluster.
        arrivals: Recorded jobs.
        hours: Duration of the training in hours.
        num_blocks: Number of blocks.
        times_per_block: Number of submission times per block.
        complete_from_s: Time from which on all jobs are recorded, in seconds.

    Raises:
        ValueError: If the stream is too short for a training of `hours`.
    """
    last_s = arrivals[-1].submit_s
    whole_s = last_s - complete_from_s
    end_s = min(last_s - 3 * hours * 3600, complete_from_s + 0.9 * whole_s)
    if whole_s <= 0 or end_s < complete_from_s + 0.5 * whole_s:
        raise ValueError(
            f"the history covers {whole_s / 3600:.3g} h, which is too short for a training of {hours:.3g} h; "
            f"give the accounting of {6 * hours:.3g} h or more"
        )
    begin_share = max(0.2, complete_from_s / last_s)
    times = list(
        iter_submission_times_s(last_s, num_blocks * times_per_block, begin_share, end_s / last_s)
    )
    cut = [times[i * times_per_block : (i + 1) * times_per_block] for i in range(num_blocks)]
    return TrainingQueue(
        nodes, gpus_per_node, rules, [QueueBlock(arrivals, block_times) for block_times in cut]
    )
