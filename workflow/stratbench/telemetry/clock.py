"""Defines two clocks: for training steps, and for the phases around the training.

`StepClock` times epochs and steps without synchronising the device between steps. `Phases` times set-up,
warm-up, evaluation and other phases outside of the training.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stratbench.telemetry.heartbeat import Heartbeat
from stratbench.telemetry.machine.core_waits import CoreWaits
from stratbench.telemetry.timeline import PhaseLog

#: Largest number of CUDA events that are kept unread. Above it, each end of a step reads the events of
#: completed steps.
_UNREAD_EVENTS = 4096
#: Number of steps at the end of a training whose time without waits (`own_ms`) is kept. They take about 1 KiB
#: per worker in a record.
OWN_STEPS = 128
#: Number of steps after each start of the clock for which the host's time to queue the step is measured. In
#: the first, caches may be cold. In the second, the host may have to wait for the device.
_ISSUED_STEPS = 2
# Label of a time stamp that ends a step. The labels of phases are 1, 2 and so on.
_STEP = 0


def synchronise(device: torch.device) -> None:
    """Wait until a device has completed all queued work. A CPU has no such queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Times training epochs and their steps on one device.

    The caller calls `begin_epoch()`, `mark_step_end()` after each step, and `end_epoch()`. Only `begin_epoch`
    and `end_epoch` synchronise the device. On a CPU a mark reads the monotonic clock. On CUDA a mark records
    an event in the current stream, which `end_epoch` reads. A step's time is then the time between two events
    on the device, including waits for the host.

    `mark_phase_end(name)` ends the phase `name` of the current step, which began at the preceding mark. The
    time between a step's last phase and its end is the phase `other`. On CUDA, phases are times of the
    current stream: a collective on its own stream counts only if the current stream waits for it.

    `begin_epoch` leaves a CUDA device idle, so that the host need not wait for space in the device's queue.
    The time in which the host queues the next steps is then its own (`shortest_step_launch_ms`).
    """

    def __init__(
        self,
        device: torch.device | str,
        heartbeat: Heartbeat | None = None,
        own: Collection[str] = (),
    ) -> None:
        """Create a clock that does not run yet.

        Args:
            device: CPU or CUDA device.
            heartbeat: Heartbeat that is updated after every step, or None.
            own: Phases in which this worker waits for no other worker.

        Raises:
            ValueError: If the device is neither a CPU nor a CUDA device.
        """
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"StepClock: device {str(device)!r}, expected 'cpu' or 'cuda'")
        self._on_cuda = self.device.type == "cuda"
        self._heartbeat = heartbeat
        self._running = self._goes_on = False
        self._begun_ns = 0
        self._stamps: Any = [] if self._on_cuda else array("q")
        self._labels = array("B")
        self._spare_events: list[torch.cuda.Event] = []
        self._label_of: dict[str, int] = {}
        self._epoch_starts_s: list[float] = []
        self._epoch_times_s: list[float] = []
        self._step_ms = array("d")
        # By phase: number of steps that contain the phase, and the sum of the phase's times in ms.
        self._phases: dict[str, tuple[int, float]] = {}
        self._own = own
        self._own_ms: deque[float] = deque(maxlen=OWN_STEPS)
        self._issue_ms: float | None = None
        self._issued_ns = self._left_to_issue = 0
        #: Counter of the time that threads wait for a CPU core while the clock runs.
        self.core_waits = CoreWaits()

    @property
    def is_running(self) -> bool:
        """Whether the clock of an epoch has begun and not ended."""
        return self._running

    def begin_epoch(self, continues_epoch: bool = False) -> None:
        """Start the clock of an epoch, after waiting for the device.

        Args:
            continues_epoch: Whether the time is added to the preceding epoch, which was interrupted.
        """
        if self._running:
            raise RuntimeError(
                "StepClock.begin_epoch: the preceding epoch has not ended; call end_epoch() first"
            )
        self._running, self._goes_on = True, continues_epoch
        synchronise(self.device)
        self.core_waits.begin_span()
        self._begun_ns = self._issued_ns = time.perf_counter_ns()
        self._left_to_issue = _ISSUED_STEPS if self._on_cuda else 0
        self._stamps.append(self._record_cuda_event() if self._on_cuda else self._begun_ns)

    def mark_step_end(self) -> None:
        """Mark the end of a training step."""
        if self._left_to_issue:
            self._record_step_launch_time()
        self._stamps.append(self._record_cuda_event() if self._on_cuda else time.perf_counter_ns())
        self._labels.append(_STEP)
        if self._heartbeat is not None:
            self._heartbeat.record_step()
        if self._on_cuda and len(self._labels) > _UNREAD_EVENTS:
            self._compute_oldest_step_times()

    def mark_phase_end(self, phase: str) -> None:
        """Mark the end of the phase named `phase` within the current step."""
        self._stamps.append(self._record_cuda_event() if self._on_cuda else time.perf_counter_ns())
        self._labels.append(self._label_of.get(phase) or self._add_phase_label(phase))

    def end_epoch(self) -> None:
        """Stop the epoch's clock after waiting for the device, and compute the epoch's step times."""
        if not self._running:
            raise RuntimeError("StepClock.end_epoch: no epoch has begun; call begin_epoch() first")
        if self._on_cuda and self._heartbeat is not None:
            self._wait_for_each_step(self._heartbeat)
        synchronise(self.device)
        elapsed_ns = time.perf_counter_ns() - self._begun_ns
        self.core_waits.end_span()
        self._running = False
        if self._goes_on:
            self._epoch_times_s[-1] += elapsed_ns / 1e9
        else:
            self._epoch_starts_s.append(self._begun_ns / 1e9)
            self._epoch_times_s.append(elapsed_ns / 1e9)
        self._compute_step_times(len(self._labels))
        if self._on_cuda:
            self._spare_events.extend(self._stamps)
        del self._stamps[:]

    @property
    def epoch_times_s(self) -> list[float]:
        """Wall-clock time of each ended epoch, in seconds."""
        return list(self._epoch_times_s)

    @property
    def epoch_starts_s(self) -> list[float]:
        """Start of each ended epoch on the clock `time.perf_counter`, in seconds.

        All processes of a node share the clock. On Linux `time.perf_counter` reads CLOCK_MONOTONIC, which
        counts from the node's boot, so the clocks of two nodes cannot be compared.
        """
        return list(self._epoch_starts_s)

    @property
    def train_time_s(self) -> float:
        """Wall-clock time of all ended epochs in seconds, without the time between epochs."""
        return sum(self._epoch_times_s)

    @property
    def step_ms(self) -> list[float]:
        """Time in ms of each step of the ended epochs, in order."""
        return self._step_ms.tolist()

    @property
    def phase_means_ms(self) -> dict[str, float]:
        """Mean time per step of each phase, in ms.

        The mean is over the steps that contain the phase.
        """
        return {phase: total_ms / steps for phase, (steps, total_ms) in self._phases.items()}

    @property
    def step_times_without_waits_ms(self) -> list[float]:
        """Time of each of the last OWN_STEPS steps in ms, without waits for other workers."""
        return list(self._own_ms)

    @property
    def shortest_step_launch_ms(self) -> float | None:
        """Shortest time in ms in which the host queued a step on the GPU. None if not measured.

        Only the first two steps after each `begin_epoch` count. Before the first step there is no time, nor
        on a CPU, where the host is the device. It may include waits for the device if a step has more
        operations than the device's queue can hold.
        """
        return self._issue_ms

    def export_measured_times(self) -> dict[str, Any]:
        """Return the measured times of all ended epochs as values for JSON.

        `load_measured_times` loads these values.
        """
        return {
            "epoch_starts_s": self.epoch_starts_s,
            "epoch_times_s": self.epoch_times_s,
            "step_ms": self.step_ms,
            "phases": dict(self._phases),
        }

    def load_measured_times(self, measured_times: dict[str, Any]) -> None:
        """Replace the measured times by those that another clock exported, and continue from them."""
        self._epoch_starts_s = list(measured_times["epoch_starts_s"])
        self._epoch_times_s = list(measured_times["epoch_times_s"])
        self._step_ms = array("d", measured_times["step_ms"])
        self._phases = {name: (n, ms) for name, (n, ms) in measured_times["phases"].items()}

    def _record_step_launch_time(self) -> None:
        """Store how long the host took to queue the training step that ends now."""
        now_ns = time.perf_counter_ns()
        took_ms = (now_ns - self._issued_ns) / 1e6
        self._issue_ms = took_ms if self._issue_ms is None else min(took_ms, self._issue_ms)
        self._issued_ns = now_ns
        self._left_to_issue -= 1

    def _record_cuda_event(self) -> torch.cuda.Event:
        event = (
            self._spare_events.pop() if self._spare_events else torch.cuda.Event(enable_timing=True)
        )
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _add_phase_label(self, phase: str) -> int:
        label = len(self._label_of) + 1
        if label > 255:
            raise ValueError(
                f"StepClock.mark_phase_end: {phase!r} is the 256th phase name, and 255 are allowed; "
                "use the same names in each step"
            )
        self._label_of[phase] = label
        return label

    def _measure_span_ms(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) if self._on_cuda else (stop - start) / 1e6

    def _wait_for_each_step(self, heartbeat: Heartbeat) -> None:
        """Wait for the end of each queued step, and update the heartbeat after each."""
        first = bisect_left(self._stamps, True, key=lambda event: not event.query())
        for event in self._stamps[first:]:
            event.synchronize()
            heartbeat.record_progress()

    def _compute_oldest_step_times(self) -> None:
        """Compute the times of at most two steps: the oldest that the device has completed."""
        for _ in range(2):
            mark_count = self._labels.index(_STEP) + 1
            if mark_count < len(self._labels) and self._stamps[mark_count].query():
                self._compute_step_times(mark_count)

    def _compute_step_times(self, mark_count: int) -> None:
        """Compute step times from the first `mark_count` marks. The last one is the end of a step."""
        name_of = {label: phase for phase, label in self._label_of.items()}
        step_start = before = self._stamps[0]
        in_step: dict[str, float] = {}
        for label, stamp in zip(
            self._labels[:mark_count], self._stamps[1 : mark_count + 1], strict=True
        ):
            span_ms = self._measure_span_ms(before, stamp)
            before = stamp
            if label != _STEP:
                phase = name_of[label]
                in_step[phase] = in_step.get(phase, 0.0) + span_ms
                continue
            self._step_ms.append(self._measure_span_ms(step_start, stamp))
            step_start = stamp
            if self._own:
                self._own_ms.append(sum(in_step.get(phase, 0.0) for phase in self._own))
            if in_step:
                in_step["other"] = in_step.get("other", 0.0) + span_ms
            for phase, phase_ms in in_step.items():
                steps, total_ms = self._phases.get(phase, (0, 0.0))
                self._phases[phase] = steps + 1, total_ms + phase_ms
            in_step = {}
        if self._on_cuda:
            self._spare_events.extend(self._stamps[:mark_count])
        del self._stamps[:mark_count], self._labels[:mark_count]


class Phases:
    """Measures the wall-clock time of phases outside of the training: `with phases("setup"): ...`.

    The device is synchronised at both ends, so a phase's time includes the work that it has queued. The times
    of phases with the same name are added. Each start and end is written to `log`, except for the end of a
    phase that raises an exception.
    """

    def __init__(self, device: torch.device | str, log: PhaseLog) -> None:
        self.device = torch.device(device)
        self._log = log
        self._total_ns: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronise(self.device)
        self._log.write_phase_event(name, "start")
        begun_ns = time.perf_counter_ns()
        yield
        synchronise(self.device)
        elapsed_ns = time.perf_counter_ns() - begun_ns
        self._total_ns[name] = self._total_ns.get(name, 0) + elapsed_ns
        self._log.write_phase_event(name, "end")

    def compute_seconds_by_phase(self) -> dict[str, float]:
        """Return the total seconds of each phase. The key of the phase `setup` is `setup_s`."""
        return {f"{name}_s": ns / 1e9 for name, ns in self._total_ns.items()}
