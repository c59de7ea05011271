"""Simulates a training as a gang or as separate worker jobs, in the same queue at the same times.

The module also finds the sample efficiency at which asynchronous workers break even with another mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import stdtrit

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
#: Modes from the simplest to run to the most complex. The last one is simulated once per sample efficiency.
MODES = (GANG, HALF, SYNCHRONOUS, ASYNCHRONOUS)
#: Simulated sample efficiencies of asynchronous workers; times between them are interpolated linearly in 1 /
#: w.
WORTHS = (1.0, 0.8, 0.6)
#: Ratio of the wall time that the training requests to the time that it needs.
REQUEST_FACTOR = 1.5
#: Jobs per GPU in a synthetic stream, about three days of jobs; the first quarter fills the cluster.
JOBS_PER_GPU = 700 / 64
#: Seconds after which the simulation of a training ends; a longer training counts as this long.
MAX_S = 60 * 86400.0


@dataclass(frozen=True)
class QueuedTraining:
    """The training to simulate. It takes `hours` on `width` GPUs, without startup and queue."""

    width: int
    hours: float
    loss_per_worker: float = 0.02
    pause_s: float = 60.0
    #: Whether a synchronous worker that joins gets its state from another worker, not from a checkpoint.
    resumes_from_peers: bool = False
    #: Whether workers that are separate jobs may be preempted.
    is_preemptible: bool = False

    @property
    def work_s(self) -> float:
        """Work of the training, in seconds of one GPU at full efficiency."""
        return (
            self.width
            * Scaling(self.loss_per_worker).compute_efficiency(self.width)
            * self.hours
            * 3600
        )

    def compute_request_s(self, workers: int, worth: float = 1.0) -> float:
        """Return the wall time in seconds that a job requests, rounded up to minutes.

        Args:
            workers: Number of workers.
            worth: Sample efficiency.
        """
        alone_s = self.work_s / (
            workers * Scaling(self.loss_per_worker).compute_efficiency(workers)
        )
        return math.ceil((STARTUP_S + REQUEST_FACTOR * alone_s) / 60) * 60.0 / worth

    def list_makers(self, worths: Sequence[float]) -> dict[str, Callable[[], Training]]:
        """Return a function per mode that creates the training. `worths` are sample efficiencies."""
        scaling = Scaling(self.loss_per_worker)

        def make_gang(workers: int) -> Callable[[], Training]:
            return partial(Gang, self.work_s, self.compute_request_s(workers), workers, scaling)

        def make_split_training(worth: float, **how) -> Callable[[], Training]:
            asked_s, scaled = (
                self.compute_request_s(self.width, worth),
                Scaling(self.loss_per_worker, worth),
            )
            how["is_preemptible"] = self.is_preemptible
            return partial(ElasticTraining, self.work_s, asked_s, self.width, scaled, **how)

        stops = (
            {"resumes_from_peers": True, "checkpoints": PEER_CHECKPOINTS}
            if self.resumes_from_peers
            else {}
        )
        return {
            GANG: make_gang(self.width),
            HALF: make_gang(max(1, self.width // 2)),
            SYNCHRONOUS: make_split_training(
                1.0, is_synchronous=True, pause_s=self.pause_s, **stops
            ),
        } | {name_asynchronous_mode(worth): make_split_training(worth) for worth in worths}


def name_asynchronous_mode(worth: float) -> str:
    """Return the name of the asynchronous mode with sample efficiency `worth`."""
    return f"{ASYNCHRONOUS} {worth:g}"


@dataclass(frozen=True)
class TrainingQueue:
    """The simulated cluster and queue to which the training is submitted."""

    nodes: int
    gpus_per_node: int
    rules: Rules
    #: Per block: jobs of other users, and the submission times of the training.
    blocks: Sequence[tuple[Sequence[Arrival], Sequence[float]]]


@dataclass
class ModeTimes:
    """Hours from submission to result, by mode. Each array has the shape [blocks, submission times]."""

    hours_by_mode: dict[str, np.ndarray]
    #: Mean share of the GPUs that other users' jobs use until the last submission time.
    busy_share: float

    def average_hours(self, mode: str) -> IntervalEstimate:
        """Return the mean hours of a mode, with a 95 % interval."""
        return compute_jackknife_interval(
            lambda kept: float(self.hours_by_mode[mode][kept].mean()), len(self.hours_by_mode[mode])
        )

    def compute_ratio(self, mode: str, other: str) -> IntervalEstimate:
        """Return the ratio of two modes' mean times, with a 95 % interval.

        The means of both modes are at equal submission times.
        """

        def compute_mean_ratio(kept: np.ndarray) -> float:
            return float(
                self.hours_by_mode[mode][kept].mean() / self.hours_by_mode[other][kept].mean()
            )

        return compute_jackknife_interval(compute_mean_ratio, len(self.hours_by_mode[mode]))

    def compute_late_hours(self, mode: str) -> float:
        """Return the hours within which nine out of ten trainings are done (90 % quantile)."""
        return float(np.quantile(self.hours_by_mode[mode], 0.9))

    def list_simulated_worths(self) -> list[float]:
        """Return the simulated sample efficiencies of asynchronous workers, the highest one first."""
        prefix = f"{ASYNCHRONOUS} "
        efficiencies = [
            float(a.removeprefix(prefix)) for a in self.hours_by_mode if a.startswith(prefix)
        ]
        return sorted(efficiencies, reverse=True)

    def compute_break_even(self, rival: str) -> IntervalEstimate:
        """Return the sample efficiency at which asynchronous workers take as long as another mode.

        The result has a 95 % interval, except outside of the simulated range. There it is infinite if even
        the highest efficiency is too slow, and 0 if the lowest is still faster.
        """
        worths = self.list_simulated_worths()

        def find_break_even_efficiency(kept: np.ndarray) -> float:
            target = self.hours_by_mode[rival][kept].mean()
            mine = [
                float(self.hours_by_mode[name_asynchronous_mode(worth)][kept].mean())
                for worth in worths
            ]
            if target < mine[0]:
                return math.inf
            if target > mine[-1]:
                return 0.0
            return 1 / float(np.interp(target, mine, [1 / worth for worth in worths]))

        return compute_jackknife_interval(
            find_break_even_efficiency, len(self.hours_by_mode[rival])
        )


def compute_jackknife_interval(
    value: Callable[[np.ndarray], float], blocks: int
) -> IntervalEstimate:
    """Compute a positive value over all blocks, with a 95 % jackknife interval.

    The interval is by Student's t on logarithms (Tukey 1958; Miller 1974). There is none if a value is 0 or
    infinite.

    Args:
        value: Computes the value from the indices of the blocks to use.
        blocks: Number of blocks.
    """
    every = np.arange(blocks)
    whole = value(every)
    parts = [value(np.delete(every, i)) for i in every] if blocks > 1 else []
    if not parts or not all(0 < x < math.inf for x in (whole, *parts)):
        return IntervalEstimate(whole)
    logs = np.log(parts)
    error = math.sqrt((blocks - 1) / blocks * float(((logs - logs.mean()) ** 2).sum()))
    half = float(stdtrit(blocks - 1, 0.975)) * error
    return IntervalEstimate(whole, whole * math.exp(-half), whole * math.exp(half))


def simulate_modes(
    queue: TrainingQueue,
    work: QueuedTraining,
    worths: Sequence[float] = WORTHS,
    modes: Sequence[str] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> ModeTimes:
    """Simulate every mode at every submission time of the queue.

    Args:
        queue: The queue.
        work: The training.
        worths: Sample efficiencies of asynchronous workers.
        modes: Names of the modes to simulate, or None for all.
        tick: Called after each submission time.
    """
    made = work.list_makers(worths)
    made = {name: made[name] for name in modes or made}
    hours: dict[str, list[list[float]]] = {name: [] for name in made}
    busy = []
    for number, (arrivals, moments) in enumerate(queue.blocks):
        base = Cluster(queue.nodes, queue.gpus_per_node, arrivals, queue.rules, number)
        for row in hours.values():
            row.append([])
        for moment_s in moments:
            base.run_until(moment_s)
            for name, make in made.items():
                sim, training = base.copy_cluster(), make()
                training.submit_training(sim)
                end_s = sim.now_s + MAX_S
                sim.run_until(end_s, done=lambda training=training: training.is_finished)
                took_s = training.time_to_result_s if training.is_finished else MAX_S
                hours[name][-1].append(took_s / 3600)
            tick()
        busy.append(base.busy_gpu_s / base.now_s / base.capacity)
    return ModeTimes({name: np.array(rows) for name, rows in hours.items()}, float(np.mean(busy)))


def iter_submission_times(
    last_s: float, count: int, first: float = 0.25, end: float = 0.85
) -> Iterator[float]:
    """Yield evenly spaced submission times in the middle of a stream of jobs.

    Args:
        last_s: End of the stream.
        count: Number of submission times.
        first: Fraction of the stream before the first submission time.
        end: Fraction of the stream before the end of the last interval.
    """
    for i in range(count):
        yield last_s * (first + (end - first) * i / count)


def make_poisson_queue(
    nodes: int,
    gpus_per_node: int,
    rules: Rules,
    load: float,
    hours: float,
    blocks: int,
    moments: int,
) -> TrainingQueue:
    """Make a queue with a synthetic stream of jobs per block.

    The streams are so long that other jobs still arrive while a training of `hours` runs.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
        rules: Behaviour of the cluster.
        load: Fraction of the GPUs that the jobs use.
        hours: Duration of the training.
        blocks: Number of blocks.
        moments: Submission times per block.
    """
    capacity = nodes * gpus_per_node
    with_moments = math.ceil(JOBS_PER_GPU * capacity)
    jobs = math.ceil(with_moments * max(1.0, hours / 6))
    drawn = []
    for seed in range(blocks):
        arrivals = make_poisson_arrivals(jobs, load, capacity, seed)
        end_s = arrivals[with_moments - 1].submit_s
        drawn.append((arrivals, list(iter_submission_times(end_s, moments))))
    return TrainingQueue(nodes, gpus_per_node, rules, drawn)


def make_recorded_queue(
    nodes: int,
    gpus_per_node: int,
    rules: Rules,
    arrivals: Sequence[Arrival],
    hours: float,
    blocks: int,
    moments: int,
    settled_s: float = 0.0,
) -> TrainingQueue:
    """Make a queue from one recorded stream of jobs.

    The stream's submission times are divided into blocks. The end of the stream has no submission times, so
    that trainings can end in it.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
        rules: Behaviour of the cluster.
        arrivals: Recorded jobs.
        hours: Duration of the training.
        blocks: Number of blocks.
        moments: Submission times per block.
        settled_s: Time from which on all jobs are recorded.

    Raises:
        ValueError: If the stream is too short for a training of `hours`.
    """
    last_s = arrivals[-1].submit_s
    whole_s = last_s - settled_s
    end_s = min(last_s - 3 * hours * 3600, settled_s + 0.9 * whole_s)
    if whole_s <= 0 or end_s < settled_s + 0.5 * whole_s:
        raise ValueError(
            f"the history has jobs of {whole_s / 3600:.3g} h, which is too short for a training of "
            f"{hours:.3g} h; give the accounting of {6 * hours:.3g} h or more"
        )
    first = max(0.2, settled_s / last_s)
    every = list(iter_submission_times(last_s, blocks * moments, first=first, end=end_s / last_s))
    cut = [every[i * moments : (i + 1) * moments] for i in range(blocks)]
    return TrainingQueue(nodes, gpus_per_node, rules, [(arrivals, each) for each in cut])
