"""Predicts a cell's time as a range, from records or from the device's rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import format_count
from stratbench.extensions.plan.device_rates import Device
from stratbench.extensions.plan.footprint.footprint import Footprint
from stratbench.extensions.plan.needs import CellToPlan, Needs

#: Low and high end of a range.
LowHigh = tuple[float, float]
# Indices into the tuples below. Each tuple has a value for the best case, one for the worst case, and a usual
# one, by which cells are compared. They were chosen from published trainings, which reach up to 74 % of a
# GPU's peak rate.
BEST, WORST, USUAL = range(3)
GPU_UTILISATION = (0.8, 0.2, 0.7)
MEMORY_UTILISATION = (0.8, 0.4, 0.8)
GPU_LAUNCH_S = (2e-6, 10e-6, 10e-6)
#: Fraction of the link's rate that a collective reaches: at best, at worst and usually.
LINK_UTILISATION = (0.9, 0.4, 0.7)
#: Fraction of the computation during which communication goes on: at best, at worst and usually.
HIDING = (1.0, 0.0, 0.7)
#: Fraction of the CPU's measured rate that training reaches: at best, at worst and usually. The rate is that
#: of matrix products.
CPU_UTILISATION = (0.7, 0.1, 0.3)
CPU_LAUNCH_S = (2e-6, 30e-6, 8e-6)
#: Bytes per second that one process of a parameter server receives, applies and sends, for all workers: at
#: best, at worst and usually. Over TCP at least 2.1e9 were measured (benchmarks/results/ps_transport.md).
SERVER_BYTES_PER_S = (30e9, 2e9, 8e9)
#: Fraction of memory traffic and kernel launches that remains after torch.compile fuses operations.
COMPILED = 0.5
#: Bytes per second of copies between a GPU and its host: at best, at worst and usually.
HOST_COPY_BYTES_PER_S = (24e9, 6e9, 12e9)
#: Bytes per second of the host's memory in the optimizer's step: at best, at worst and usually.
HOST_OPTIMIZER_BYTES_PER_S = (40e9, 10e9, 20e9)
FP32_BYTES = 4
#: Number of copies per step between GPU and host: parameters for forward and for backward, and gradients.
HOST_COPIES = 3
#: Bytes per parameter that the host's optimizer reads and writes: weight, gradient and two moments.
HOST_OPTIMIZER_BYTES = 28
#: Seconds for the start of processes, rendezvous, data and warm-up: at best and at worst.
STARTUP_S = (10.0, 120.0)

SPREAD = 0.1  # assumed relative error of one measured time
#: Minimum and maximum ratio of a strategy's time to the measured time of another strategy.
OTHER_STRATEGY = (0.5, 6.0)


@dataclass(frozen=True)
class Span:
    """Range of a time in seconds, with a text on where it comes from."""

    low_s: float
    high_s: float
    source: str

    def __iter__(self) -> Iterator[float]:
        """Yield the low and the high end of the range, in seconds."""
        return iter((self.low_s, self.high_s))

    def __add__(self, other: Span) -> Span:
        return Span(self.low_s + other.low_s, self.high_s + other.high_s, self.source)

    def multiply_ends(self, low_factor: float, high_factor: float) -> Span:
        return Span(self.low_s * low_factor, self.high_s * high_factor, self.source)


@dataclass(frozen=True)
class ProjectedDuration:
    """Duration of a training that is projected from records, and its global batch."""

    span: Span
    global_batch: int


@dataclass(frozen=True)
class PlannedStep:
    """Predicted seconds of the parts of a step: at best, at worst, or usually.

    Attributes:
        compute_s: Computation; None if the device's rate is unknown.
        link_s: Transfers at the link's rate.
        awaited_s: Part of the transfers that the next layer waits for.
        server_s: Time of a parameter server for all workers.
        host_s: Copies and updates of states on the host.
        hidden_share: Fraction of computation that hides communication.
    """

    compute_s: float | None
    link_s: float
    awaited_s: float
    server_s: float
    host_s: float
    hidden_share: float

    @property
    def sending_s(self) -> float:
        """Seconds of communication, over the slower of link and server."""
        return max(self.link_s, self.server_s)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step. The device's rate has to be known."""
        hidden_s = self.hidden_share * self.compute_s
        sends_s = max(0.0, self.sending_s - self.awaited_s - hidden_s)
        return self.compute_s + self.awaited_s + sends_s + self.host_s

    @property
    def waiting_share(self) -> float:
        """Fraction of the step in which nothing is computed. The device's rate has to be known."""
        return 1 - self.compute_s / self.seconds


def predict_step_duration(
    device: Device, s: CellToPlan, needs: Needs, rate_case: int
) -> PlannedStep:
    """Predict the duration of a cell's step: at best, at worst, or usually.

    Args:
        device: The device.
        s: The cell.
        needs: Needs of the cell.
        rate_case: BEST, WORST, or USUAL for comparisons.
    """
    utilisation = LINK_UTILISATION[rate_case]

    def compute_transfer_s(n_bytes: float, bytes_within_node: float = 0.0) -> float:
        """Return the seconds to send bytes to other workers, within and between nodes."""
        rest_s = (n_bytes - bytes_within_node) / device.get_slowest_link_bytes_per_s(needs.nodes)
        return (rest_s + bytes_within_node / device.get_slowest_link_bytes_per_s(1)) / utilisation

    return PlannedStep(
        compute_s=None
        if device.flops_per_s is None
        else _predict_compute_s(device, s, needs, rate_case),
        # With parameter servers, a node's link carries the bytes of all its workers and servers.
        link_s=max(
            compute_transfer_s(needs.wire_bytes, needs.sent_bytes_within_node),
            compute_transfer_s(needs.link_bytes or 0.0),
        ),
        awaited_s=compute_transfer_s(needs.awaited_bytes, needs.awaited_bytes_within_node),
        server_s=needs.served_bytes / SERVER_BYTES_PER_S[rate_case],
        host_s=compute_offload_s_per_rate_case(needs.slowest_rank_footprint)[rate_case],
        hidden_share=HIDING[rate_case],
    )


def compute_offload_s_per_rate_case(footprint: Footprint) -> tuple[float, ...]:
    """Return the seconds per step that offloaded parameters take: at best, at worst, usually.

    The seconds are 0 without such parameters.
    """
    n_bytes = footprint.host_bytes.get("parameters", 0)
    updated_bytes = n_bytes / FP32_BYTES * HOST_OPTIMIZER_BYTES
    return tuple(
        HOST_COPIES * n_bytes / copies + updated_bytes / updates
        for copies, updates in zip(HOST_COPY_BYTES_PER_S, HOST_OPTIMIZER_BYTES_PER_S, strict=True)
    )


def _predict_compute_s(device: Device, s: CellToPlan, needs: Needs, rate_case: int) -> float:
    """Predict the seconds of a step's computation: at best, at worst, or usually."""
    f, batch = needs.slowest_rank_footprint, s.samples_per_step
    launch_s = GPU_LAUNCH_S if device.is_gpu else CPU_LAUNCH_S
    flops_s = f.executed_flops_per_sample * batch / estimate_training_flops_per_s(device, rate_case)
    if rate_case == USUAL and device.attention_utilisation:
        slower = GPU_UTILISATION[USUAL] / device.attention_utilisation
        flops_s *= 1 + f.attention_share * (slower - 1)
    fused = COMPILED if s.settings.compile else 1.0
    memory_s = 0.0
    if device.memory_bytes_per_s:
        rate = device.memory_bytes_per_s * MEMORY_UTILISATION[rate_case]
        memory_s = fused * f.touched_bytes.evaluate_at(batch) / rate
    launches_s = fused * f.operations_per_step * launch_s[rate_case]
    if rate_case == BEST:
        compute_s = max(flops_s, memory_s, launches_s)
    elif rate_case == WORST:  # nothing overlaps, and all workers wait for the slowest one
        compute_s = (flops_s + memory_s + launches_s) * s.slowdown
    else:  # usually the host launches operations while the device computes
        compute_s = max(flops_s + memory_s, launches_s) * s.slowdown
    return compute_s * s.steps_per_batch / (1 - s.bubble_share)


def estimate_training_flops_per_s(device: Device, rate_case: int) -> float:
    """Return the floating-point operations per second of training: best, worst or usual."""
    utilisation = GPU_UTILISATION if device.is_gpu else CPU_UTILISATION
    return device.flops_per_s * utilisation[rate_case]


def estimate_time_outside_steps(device: Device, s: CellToPlan, needs: Needs) -> Span:
    """Return the seconds of a cell outside of its training steps: start-up and evaluations.

    Args:
        device: The device.
        s: The cell.
        needs: Needs of the cell.
    """
    if device.flops_per_s is None:
        return Span(*STARTUP_S, "")
    flops = (
        needs.slowest_rank_footprint.flops_per_sample
        * s.data.test_samples
        * (s.settings.epochs or 0)
    )
    fast_s = flops / s.mesh.replicas / estimate_training_flops_per_s(device, BEST)
    return Span(
        STARTUP_S[0] + fast_s,
        STARTUP_S[1] + flops / estimate_training_flops_per_s(device, WORST),
        "",
    )


def estimate_time_from_records(cell: Cell, records: Iterable[Mapping[str, Any]]) -> Span | None:
    """Estimate a cell's training time from the record of the most similar cell, or None.

    Only records of the same experiment and model count, since they have the same batch, data and precision.
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
        source = f"{format_count(len(times_s), 'record')} of this cell's repeats"
        return Span(min(times_s) * (1 - SPREAD), max(times_s) * (1 + SPREAD), source)
    if same:
        nearest = min(same, key=lambda r: abs(r["cell"]["gpus"] - cell.gpus))
        return _scale_recorded_time(nearest, cell.gpus)
    # The time of a user's command says nothing about the times of other strategies.
    timed = [r for r in timed if "program" not in r]
    beside = [r for r in timed if r["cell"]["gpus"] == cell.gpus] or timed
    if not beside:
        return None
    nearest = min(beside, key=lambda r: abs(r["cell"]["gpus"] - cell.gpus))
    return _scale_recorded_time(nearest, cell.gpus).multiply_ends(*OTHER_STRATEGY)


def _scale_recorded_time(record: Mapping[str, Any], gpus: int) -> Span:
    """Scale a record's time to another worker count: between perfect scaling and no scaling."""
    seconds, workers = record["time"]["train_time_s"], record["cell"]["gpus"]
    scaled_s = seconds * workers / gpus
    source = f"the record of {record['cell']['strategy']} on {workers}"
    low_s, high_s = min(seconds, scaled_s), max(seconds, scaled_s)
    return Span(low_s * (1 - SPREAD), high_s * (1 + SPREAD), source)
