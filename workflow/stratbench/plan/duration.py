"""Predicts how long a cell will take, as a range: from the study's records or from the device's rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import counted
from stratbench.plan.device_rates import Device
from stratbench.plan.footprint.footprint import Footprint

# A step's fastest and slowest time on a device follow from its datasheet and these. Training of
# convolutional networks reaches 10 to 50 % of the peak with images of 224 pixels; small images are bound
# by memory, and small batches by the time that the host takes to launch each operation.
GPU_UTILISATION = (0.5, 0.1)
MEMORY_UTILISATION = (0.8, 0.4)
GPU_LAUNCH_S = (2e-6, 10e-6)
#: Share of the link's rate that a collective gets. At best it hides behind backward, at worst it does not.
LINK_UTILISATION = (0.9, 0.4)
#: Share of a CPU's measured matrix-product rate that training on it gets.
CPU_UTILISATION = (0.7, 0.1)
CPU_LAUNCH_S = (2e-6, 30e-6)
#: Bytes a second that one parameter-server process takes in, applies and hands out, all workers together.
#: Over TCP at least 2.1e9 were measured (benchmarks/results/ps_transport.md).
SERVER_BYTES_PER_S = (30e9, 2e9)
#: Start of the processes, rendezvous, data and warm-up, in seconds.
STARTUP_S = (10.0, 120.0)

SPREAD = 0.1  # of a single measurement
#: From one strategy's time to another's: faster by no more than this, slower by no more than that.
OTHER_STRATEGY = (0.5, 6.0)


@dataclass(frozen=True)
class Span:
    """A range of seconds and where it comes from."""

    low_s: float
    high_s: float
    source: str

    def __add__(self, other: Span) -> Span:
        return Span(self.low_s + other.low_s, self.high_s + other.high_s, self.source)

    def times(self, low: float, high: float) -> Span:
        return Span(self.low_s * low, self.high_s * high, self.source)


@dataclass(frozen=True)
class Projected:
    """A training that the study's records were projected to: its time, and its global batch."""

    span: Span
    global_batch: int


@dataclass(frozen=True)
class Work:
    """What a cell computes and sends: in one step of a worker, and in the whole training."""

    footprint: Footprint
    batch: int  # samples of one push or step on one worker
    pushes: int  # pushes in a step: 1 but for strategies that split their batch
    wire_bytes: float  # sent by a rank in a step, and as many received
    awaited_bytes: float  # of them, what the next layer waits for, so that no computation hides it
    server_bytes: (
        float  # taken in and handed out by a server process in a step, all workers; else 0
    )
    steps: int  # of the whole training
    test_samples: int
    evaluations: int
    replicas: int
    nodes: int
    least_nodes: int  # fewer than `nodes` where a scattered cell may lie closer together
    bubble_share: float = 0.0  # of a step, in which a worker waits for others' layers
    slowdown: float = 1.0  # how many times slower the slowest worker is made on purpose
    recomputes: bool = False  # whether nearly all of forward is computed once more in backward


@dataclass(frozen=True)
class Step:
    """What a step takes on a device at one end of its range, in seconds.

    `link_s`: of what is sent at the link's rate; `awaited_s`: of that, what the next layer waits for;
    `server_s`: of a server that takes longer than the link. `hides`: whether computing goes on beside it.
    """

    compute_s: float
    link_s: float
    awaited_s: float
    server_s: float
    hides: bool

    def seconds(self, slower: float = 1.0) -> float:
        """The whole of it, with links so many times slower than the device's."""
        sent_s = max(self.link_s * slower, self.server_s)
        if not self.hides:
            return self.compute_s + sent_s
        awaited_s = self.awaited_s * slower
        return max(self.compute_s, sent_s - awaited_s) + awaited_s


@dataclass(frozen=True)
class Times:
    """A cell's times on a device, where they are known. `train`: by records, if there are any.

    `link_s`: of a step's communication, at best and at worst. `steps`: a step at best and at worst.
    """

    by_device: Span | None
    train: Span | None
    total: Span | None
    link_s: tuple[float, float]
    steps: tuple[Step, Step] | None


def times_on(device: Device, work: Work, measured: Span | None) -> Times:
    """The times of a cell on `device`; `measured`: of its training, by records."""
    steps = (
        None if device.flops_per_s is None else (step_on(device, work, 0), step_on(device, work, 1))
    )
    by_device = steps and span_by_device(work, device, steps)
    train = measured or by_device
    return Times(
        by_device=by_device,
        train=train,
        total=None if train is None else train + overhead_span(work, device),
        link_s=(communication_s(work, device, 0), communication_s(work, device, 1)),
        steps=steps,
    )


def span_by_device(work: Work, device: Device, steps: tuple[Step, Step]) -> Span:
    """The time of training, from what a step takes at best and at worst by the rates of the device."""
    low_s, high_s = (step.seconds() for step in steps)
    source = f"{device.name}'s peak rates" if device.is_gpu else "this host's CPU, all cells alike"
    return Span(low_s * work.steps, high_s * work.steps, source)


def step_on(device: Device, work: Work, slow: int) -> Step:
    """A step by the best rates of a device (0) or by the worst (1)."""
    f = work.footprint
    utilisation = GPU_UTILISATION if device.is_gpu else CPU_UTILISATION
    launch_s = GPU_LAUNCH_S if device.is_gpu else CPU_LAUNCH_S
    flops = (f.training_flops_per_sample + work.recomputes * f.flops_per_sample) * work.batch
    parts_s = [flops / (device.flops_per_s * utilisation[slow])]
    if device.memory_bytes_per_s:
        rate = device.memory_bytes_per_s * MEMORY_UTILISATION[slow]
        parts_s.append(f.touched_bytes.at(work.batch) / rate)
    parts_s.append(f.operations_per_step * launch_s[slow])
    # All may wait for the slowed worker, or none.
    compute_s = (sum(parts_s) * work.slowdown if slow else max(parts_s)) * work.pushes
    compute_s /= 1 - work.bubble_share
    link_bytes_per_s = link_rate(work, device, slow)
    return Step(
        compute_s,
        work.wire_bytes / link_bytes_per_s,
        work.awaited_bytes / link_bytes_per_s,
        work.server_bytes / SERVER_BYTES_PER_S[slow],
        hides=not slow,
    )


def link_rate(work: Work, device: Device, slow: int) -> float:
    """Bytes a second of the cell's links at the best (0) or the worst (1) rate."""
    return device.link(work.nodes if slow else work.least_nodes) * LINK_UTILISATION[slow]


def communication_s(work: Work, device: Device, slow: int) -> float:
    """Seconds of a step's communication at the best (0) or the worst (1) rate."""
    link_s = work.wire_bytes / link_rate(work, device, slow)
    return max(link_s, work.server_bytes / SERVER_BYTES_PER_S[slow])


def overhead_span(work: Work, device: Device) -> Span:
    """Seconds that a cell takes beside its training: start-up and evaluations."""
    flops = work.footprint.flops_per_sample * work.test_samples * work.evaluations
    if device.flops_per_s is None:
        return Span(*STARTUP_S, "")
    utilisation = GPU_UTILISATION if device.is_gpu else CPU_UTILISATION
    fast_s = flops / work.replicas / (device.flops_per_s * utilisation[0])
    slow_s = flops / (device.flops_per_s * utilisation[1])
    return Span(STARTUP_S[0] + fast_s, STARTUP_S[1] + slow_s, "")


def span_by_records(cell: Cell, records: Iterable[Mapping[str, Any]]) -> Span | None:
    """The time of training, from the record of the most similar cell; None without any.

    Only records of the same experiment and model count: they have the same batch, data and precision.
    """
    timed = [
        r
        for r in records
        if r["time"]["train_time_s"]
        and r["status"] == "ok"
        and (r["cell"]["experiment"], r["cell"]["model"]) == (cell.experiment, cell.model)
    ]
    same = [r for r in timed if r["cell"]["strategy"] == cell.strategy]
    repeats = [r for r in same if r["cell"]["gpus"] == cell.gpus]
    if repeats:
        times_s = [r["time"]["train_time_s"] for r in repeats]
        source = f"{counted(len(times_s), 'record')} of this cell's repeats"
        return Span(min(times_s) * (1 - SPREAD), max(times_s) * (1 + SPREAD), source)
    if same:
        nearest = min(same, key=lambda r: abs(r["cell"]["gpus"] - cell.gpus))
        return _rescaled(nearest, cell.gpus)
    # What a command of the user's does says nothing of others.
    timed = [r for r in timed if "program" not in r]
    beside = [r for r in timed if r["cell"]["gpus"] == cell.gpus] or timed
    if not beside:
        return None
    nearest = min(beside, key=lambda r: abs(r["cell"]["gpus"] - cell.gpus))
    return _rescaled(nearest, cell.gpus).times(*OTHER_STRATEGY)


def _rescaled(record: Mapping[str, Any], gpus: int) -> Span:
    """A record's time on another number of workers: between perfect scaling and none."""
    seconds, workers = record["time"]["train_time_s"], record["cell"]["gpus"]
    scaled_s = seconds * workers / gpus
    source = f"the record of {record['cell']['strategy']} on {workers}"
    low_s, high_s = min(seconds, scaled_s), max(seconds, scaled_s)
    return Span(low_s * (1 - SPREAD), high_s * (1 + SPREAD), source)
