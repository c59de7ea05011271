"""Gang or elastic: time to result of a training's modes, in the same queue at the same times.

Also the sample efficiency at which asynchronous workers break even with another mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import stdtrit

from stratbench.extensions.queue.background import poisson
from stratbench.extensions.queue.simulator import Arrival, Cluster, Rules
from stratbench.extensions.queue.trainings import (
    BESIDE,
    STARTUP_S,
    ElasticTraining,
    Gang,
    Scaling,
    Training,
)
from stratbench.statistics.intervals import IntervalEstimate

GANG, HALF = "gang", "gang N/2"
SYNCHRONOUS, ASYNCHRONOUS = "split synchronous", "split asynchronous"
#: From what is simplest to run. The last one's times are by worth.
MODES = (GANG, HALF, SYNCHRONOUS, ASYNCHRONOUS)
#: Simulated sample efficiencies of asynchronous workers; between them, time is linear in their inverse.
WORTHS = (1.0, 0.8, 0.6)
#: Ratio of a training's requested to needed wall time.
REQUEST_FACTOR = 1.5
#: Of a made stream, in which the moments lie: some three days, of which the first quarter fills the cluster.
JOBS_PER_GPU = 700 / 64
#: A training that is not done after this time is counted as done then.
MAX_S = 60 * 86400.0


@dataclass(frozen=True)
class QueuedTraining:
    """The training, in the modes' terms. `hours`: its length on `width` GPUs, startup and queue left out."""

    width: int
    hours: float
    loss: float = 0.02
    pause_s: float = 60.0
    #: Whether synchronous workers get their state from each other, and not from a checkpoint.
    from_peers: bool = False
    #: Of split workers.
    preemptible: bool = False

    @property
    def work_s(self) -> float:
        """Seconds of one GPU at full efficiency."""
        return self.width * Scaling(self.loss).of_each(self.width) * self.hours * 3600

    def request_s(self, workers: int, worth: float = 1.0) -> float:
        """Return the requested wall time of a job with so many workers, or of one worker, in minutes."""
        alone_s = self.work_s / (workers * Scaling(self.loss).of_each(workers))
        return math.ceil((STARTUP_S + REQUEST_FACTOR * alone_s) / 60) * 60.0 / worth

    def makers(self, worths: Sequence[float]) -> dict[str, Callable[[], Training]]:
        """Return functions that create the training, by mode; asynchronous ones have their efficiency."""
        scaling = Scaling(self.loss)

        def gang(workers: int) -> Callable[[], Training]:
            return partial(Gang, self.work_s, self.request_s(workers), workers, scaling)

        def split(worth: float, **how) -> Callable[[], Training]:
            asked_s, scaled = self.request_s(self.width, worth), Scaling(self.loss, worth)
            how["preemptible"] = self.preemptible
            return partial(ElasticTraining, self.work_s, asked_s, self.width, scaled, **how)

        stops = {"from_peers": True, "checkpoints": BESIDE} if self.from_peers else {}
        return {
            GANG: gang(self.width),
            HALF: gang(max(1, self.width // 2)),
            SYNCHRONOUS: split(1.0, synchronous=True, pause_s=self.pause_s, **stops),
        } | {at_worth(worth): split(worth) for worth in worths}


def at_worth(worth: float) -> str:
    """Return the name of the asynchronous mode at this sample efficiency."""
    return f"{ASYNCHRONOUS} {worth:g}"


@dataclass(frozen=True)
class TrainingQueue:
    """The cluster that the training is submitted to: a stream of others' jobs per block."""

    nodes: int
    gpus_per_node: int
    rules: Rules
    #: For each block: others' jobs, and the moments at which the training comes.
    blocks: Sequence[tuple[Sequence[Arrival], Sequence[float]]]


@dataclass
class Times:
    """Hours from submission to result, by mode, each of shape [blocks, moments]."""

    hours: dict[str, np.ndarray]
    #: Mean share of the GPUs that others use until the last moment.
    busy: float

    def mean(self, mode: str) -> IntervalEstimate:
        """Return mean hours, with a 95 % interval."""
        return jackknife(lambda kept: float(self.hours[mode][kept].mean()), len(self.hours[mode]))

    def ratio(self, mode: str, other: str) -> IntervalEstimate:
        """Return the ratio of the mean times at equal submission times, with a 95 % interval."""

        def ratio(kept: np.ndarray) -> float:
            return float(self.hours[mode][kept].mean() / self.hours[other][kept].mean())

        return jackknife(ratio, len(self.hours[mode]))

    def late_h(self, mode: str) -> float:
        """Hours within which nine tenths of the moments' trainings are done."""
        return float(np.quantile(self.hours[mode], 0.9))

    def worths(self) -> list[float]:
        """Return at which the asynchronous mode was simulated, the highest first."""
        prefix = f"{ASYNCHRONOUS} "
        efficiencies = [float(a.removeprefix(prefix)) for a in self.hours if a.startswith(prefix)]
        return sorted(efficiencies, reverse=True)

    def break_even(self, rival: str) -> IntervalEstimate:
        """Return the sample efficiency at which asynchronous workers tie with a mode, with a 95 % interval.

        Beyond the simulated range, it is infinite if even the highest is too slow, and 0 if the lowest is
        still faster, both without an interval.
        """
        worths = self.worths()

        def even(kept: np.ndarray) -> float:
            target = self.hours[rival][kept].mean()
            mine = [float(self.hours[at_worth(worth)][kept].mean()) for worth in worths]
            if target < mine[0]:
                return math.inf
            if target > mine[-1]:
                return 0.0
            return 1 / float(np.interp(target, mine, [1 / worth for worth in worths]))

        return jackknife(even, len(self.hours[rival]))


def jackknife(value: Callable[[np.ndarray], float], blocks: int) -> IntervalEstimate:
    """Return a positive value of all blocks, with a 95 % jackknife interval.

    On logarithms, by t (Tukey 1958; Miller 1974). `value`: function of the numbers of the retained blocks.
    There is no interval if a value is 0 or infinite.
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


def paired_times(
    queue: TrainingQueue,
    work: QueuedTraining,
    worths: Sequence[float] = WORTHS,
    modes: Sequence[str] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Times:
    """Simulate every mode (or only `modes`) at every submission time of the queue.

    Args:
        queue: The queue.
        work: The training.
        worths: Sample efficiencies of asynchronous workers.
        modes: Modes as `Work.makers` names them.
        tick: Called at each submission time.
    """
    made = work.makers(worths)
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
                sim, training = base.branch(), make()
                training.begin(sim)
                end_s = sim.now_s + MAX_S
                sim.run_until(end_s, done=lambda training=training: training.finished)
                took_s = training.time_to_result_s if training.finished else MAX_S
                hours[name][-1].append(took_s / 3600)
            tick()
        busy.append(base.busy_gpu_s / base.now_s / base.capacity)
    return Times({name: np.array(rows) for name, rows in hours.items()}, float(np.mean(busy)))


def moments_in(
    last_s: float, count: int, first: float = 0.25, end: float = 0.85
) -> Iterator[float]:
    """Yield evenly spaced submission times in the middle of a stream of jobs.

    Args:
        last_s: End of the stream.
        count: Number of times.
        first: Fraction of the stream before.
        end: Fraction of the stream at the last one.
    """
    for i in range(count):
        yield last_s * (first + (end - first) * i / count)


def poisson_queue(
    nodes: int,
    gpus_per_node: int,
    rules: Rules,
    load: float,
    hours: float,
    blocks: int,
    moments: int,
) -> TrainingQueue:
    """Return a queue with a synthetic stream of `load` per block.

    Others still come while a training of `hours` runs.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
        rules: Behaviour of the cluster.
        load: Fraction of the capacity.
        hours: Duration of the training.
        blocks: Number of blocks.
        moments: Submission times per block.
    """
    capacity = nodes * gpus_per_node
    with_moments = math.ceil(JOBS_PER_GPU * capacity)
    jobs = math.ceil(with_moments * max(1.0, hours / 6))
    drawn = []
    for seed in range(blocks):
        arrivals = poisson(jobs, load, capacity, seed)
        end_s = arrivals[with_moments - 1].submit_s
        drawn.append((arrivals, list(moments_in(end_s, moments))))
    return TrainingQueue(nodes, gpus_per_node, rules, drawn)


def recorded_queue(
    nodes: int,
    gpus_per_node: int,
    rules: Rules,
    arrivals: Sequence[Arrival],
    hours: float,
    blocks: int,
    moments: int,
    settled_s: float = 0.0,
) -> TrainingQueue:
    """Return one recorded stream, cut into blocks of submission times.

    Its end is left to the trainings.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
        rules: Behaviour of the cluster.
        arrivals: Recorded jobs.
        hours: Duration of the training.
        blocks: Number of blocks.
        moments: Submission times per block.
        settled_s: Time from which all jobs are recorded.

    Raises:
        ValueError: If the stream is too short for a training of `hours`.
    """
    last_s = arrivals[-1].submit_s
    whole_s = last_s - settled_s
    end_s = min(last_s - 3 * hours * 3600, settled_s + 0.9 * whole_s)
    if whole_s <= 0 or end_s < settled_s + 0.5 * whole_s:
        raise ValueError(
            f"the history's jobs come within {whole_s / 3600:.3g} h, which is too short for such a "
            f"training; ask sacct for {6 * hours:.3g} h or more"
        )
    first = max(0.2, settled_s / last_s)
    every = list(moments_in(last_s, blocks * moments, first=first, end=end_s / last_s))
    cut = [every[i * moments : (i + 1) * moments] for i in range(blocks)]
    return TrainingQueue(nodes, gpus_per_node, rules, [(arrivals, each) for each in cut])
