"""Clocks of a training cell: the time of the training steps, and of everything around them.

`StepClock` times epochs and steps without synchronising the device between steps; `Phases` times what a cell
does outside training (set-up, warm-up, evaluation).
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

#: Events kept unread on CUDA, at least; beyond that, each tick reads one step that is through.
_UNREAD_EVENTS = 4096
#: The last steps of which `own_ms` is kept: about 1 KiB of a record for each worker.
OWN_STEPS = 128
#: Steps after each start of the clock of which it notes in what time the host issues them. The first finds
#: the device idle and may find caches cold, the second may have to wait for the device.
_ISSUED_STEPS = 2
_STEP = 0  # index of a tick among the stamps; named phases count from 1


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done all work queued on it (at once on a CPU)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Times training epochs on one device: `begin()`, a `tick()` after each step, `end()`.

    Only `begin` and `end` synchronise the device. On a CPU a tick reads the monotonic clock. On CUDA it
    records an event in the current stream, which `end` reads: a step's time is then the time between two
    events on the device, including waits for the host.

    `mark(name)` says that the phase `name` of the current step ends here: the time since the mark or tick
    before it belongs to that phase. The time between a step's last mark and its tick is `other`. On CUDA
    these are spans of the current stream. A collective on its own stream counts only as far as the current
    stream waited for it.

    `begin` leaves a CUDA device idle, so that the host does not wait for space in its queue. The time to
    issue the next steps is then the host's own (`issue_ms`).

    `heartbeat` is told of every step. `own`: the phases in which this worker waits for no other.
    """

    def __init__(
        self,
        device: torch.device | str,
        heartbeat: Heartbeat | None = None,
        own: Collection[str] = (),
    ) -> None:
        """Raise ValueError for a device other than a CPU or a CUDA device."""
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
        self._phases: dict[str, tuple[int, float]] = {}  # steps that have it, and ms in all
        self._own = own
        self._own_ms: deque[float] = deque(maxlen=OWN_STEPS)
        self._issue_ms: float | None = None
        self._issued_ns = self._left_to_issue = 0
        #: Waits for a core while the clock runs.
        self.core_waits = CoreWaits()

    @property
    def running(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self._running

    def begin(self, goes_on: bool = False) -> None:
        """Start an epoch: wait for the device, then start the clock. `goes_on`: with the last epoch."""
        if self._running:
            raise RuntimeError("StepClock.begin: the epoch before has not been ended")
        self._running, self._goes_on = True, goes_on
        synchronise(self.device)
        self.core_waits.begin()
        self._begun_ns = self._issued_ns = time.perf_counter_ns()
        self._left_to_issue = _ISSUED_STEPS if self._on_cuda else 0
        self._stamps.append(self._event() if self._on_cuda else self._begun_ns)

    def tick(self) -> None:
        """Mark the end of a training step."""
        if self._left_to_issue:
            self._note_issue()
        self._stamps.append(self._event() if self._on_cuda else time.perf_counter_ns())
        self._labels.append(_STEP)
        if self._heartbeat is not None:
            self._heartbeat.step()
        if self._on_cuda and len(self._labels) > _UNREAD_EVENTS:
            self._collect_oldest()

    def mark(self, phase: str) -> None:
        """Mark the end of `phase` within the current step."""
        self._stamps.append(self._event() if self._on_cuda else time.perf_counter_ns())
        self._labels.append(self._label_of.get(phase) or self._new_label(phase))

    def end(self) -> None:
        """End the epoch: wait for the device, stop the clock, read the stamps."""
        if not self._running:
            raise RuntimeError("StepClock.end: no epoch has been begun")
        if self._on_cuda and self._heartbeat is not None:
            self._wait_by_steps(self._heartbeat)
        synchronise(self.device)
        elapsed_ns = time.perf_counter_ns() - self._begun_ns
        self.core_waits.end()
        self._running = False
        if self._goes_on:
            self._epoch_times_s[-1] += elapsed_ns / 1e9
        else:
            self._epoch_starts_s.append(self._begun_ns / 1e9)
            self._epoch_times_s.append(elapsed_ns / 1e9)
        self._collect(len(self._labels))
        if self._on_cuda:
            self._spare_events.extend(self._stamps)
        del self._stamps[:]

    @property
    def epoch_times_s(self) -> list[float]:
        """Wall clock of each ended epoch, in seconds."""
        return list(self._epoch_times_s)

    @property
    def epoch_starts_s(self) -> list[float]:
        """Start of each ended epoch, on a clock that all processes of a node share.

        On Linux `time.perf_counter` reads CLOCK_MONOTONIC, which counts from the node's boot: the clocks of
        two nodes do not compare.
        """
        return list(self._epoch_starts_s)

    @property
    def train_time_s(self) -> float:
        """Wall clock of all ended epochs, in seconds, without what happened between them."""
        return sum(self._epoch_times_s)

    @property
    def step_ms(self) -> list[float]:
        """Time of every step of the ended epochs, in ms, in order."""
        return self._step_ms.tolist()

    @property
    def phase_means_ms(self) -> dict[str, float]:
        """Mean time of each phase in a step, in ms, over the steps in which it was marked."""
        return {phase: total_ms / steps for phase, (steps, total_ms) in self._phases.items()}

    @property
    def own_ms(self) -> list[float]:
        """Milliseconds of each of the last steps in phases without waiting for other workers."""
        return list(self._own_ms)

    @property
    def issue_ms(self) -> float | None:
        """Minimum time in ms in which the host issued a step, of the first two after each `begin`.

        None on a CPU, where host and device are one, and before the first step. If a step has more operations
        than the device's queue, the host may have waited for it.
        """
        return self._issue_ms

    def history(self) -> dict[str, Any]:
        """Return a copy of all that it has measured until its `end`, for `load_history`.

        JSON can hold it.
        """
        return {
            "epoch_starts_s": self.epoch_starts_s,
            "epoch_times_s": self.epoch_times_s,
            "step_ms": self.step_ms,
            "phases": dict(self._phases),
        }

    def load_history(self, history: dict[str, Any]) -> None:
        """Go on from what another clock has measured."""
        self._epoch_starts_s = list(history["epoch_starts_s"])
        self._epoch_times_s = list(history["epoch_times_s"])
        self._step_ms = array("d", history["step_ms"])
        self._phases = {name: (n, ms) for name, (n, ms) in history["phases"].items()}

    def _note_issue(self) -> None:
        """Note how long the host took to issue the step that ends here."""
        now_ns = time.perf_counter_ns()
        took_ms = (now_ns - self._issued_ns) / 1e6
        self._issue_ms = took_ms if self._issue_ms is None else min(took_ms, self._issue_ms)
        self._issued_ns = now_ns
        self._left_to_issue -= 1

    def _event(self) -> torch.cuda.Event:
        event = (
            self._spare_events.pop() if self._spare_events else torch.cuda.Event(enable_timing=True)
        )
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _new_label(self, phase: str) -> int:
        label = len(self._label_of) + 1
        if label > 255:
            raise ValueError(f"StepClock.mark: {phase!r} is the 256th phase; names must recur")
        self._label_of[phase] = label
        return label

    def _span_ms(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) if self._on_cuda else (stop - start) / 1e6

    def _wait_by_steps(self, heartbeat: Heartbeat) -> None:
        """Wait for the device step by step, since its queue may take much longer than one step."""
        first = bisect_left(self._stamps, True, key=lambda event: not event.query())
        for event in self._stamps[first:]:
            event.synchronize()
            heartbeat.alive()

    def _collect_oldest(self) -> None:
        """Read up to two of the oldest steps, if the device has completed them. Never waits."""
        for _ in range(2):
            length = self._labels.index(_STEP) + 1
            if length < len(self._labels) and self._stamps[length].query():
                self._collect(length)

    def _collect(self, length: int) -> None:
        """Read the first `length` stamps after the start, which end with a step's."""
        name_of = {label: phase for phase, label in self._label_of.items()}
        step_start = before = self._stamps[0]
        in_step: dict[str, float] = {}
        for label, stamp in zip(self._labels[:length], self._stamps[1 : length + 1], strict=True):
            span_ms = self._span_ms(before, stamp)
            before = stamp
            if label != _STEP:
                phase = name_of[label]
                in_step[phase] = in_step.get(phase, 0.0) + span_ms
                continue
            self._step_ms.append(self._span_ms(step_start, stamp))
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
            self._spare_events.extend(self._stamps[:length])
        del self._stamps[:length], self._labels[:length]


class Phases:
    """Wall clock of named phases outside the timed training: `with phases("setup"): ...`.

    The device is synchronised at both ends, so a phase's time holds the work it queued. A
    phase that happens several times is summed. Each start and end is written to `log`; a phase that
    ends by an exception has no end.
    """

    def __init__(self, device: torch.device | str, log: PhaseLog) -> None:
        self.device = torch.device(device)
        self._log = log
        self._total_ns: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronise(self.device)
        self._log.write(name, "start")
        begun_ns = time.perf_counter_ns()
        yield
        synchronise(self.device)
        elapsed_ns = time.perf_counter_ns() - begun_ns
        self._total_ns[name] = self._total_ns.get(name, 0) + elapsed_ns
        self._log.write(name, "end")

    def as_dict(self) -> dict[str, float]:
        """Return seconds of each phase so far, `setup` under the key `setup_s`."""
        return {f"{name}_s": ns / 1e9 for name, ns in self._total_ns.items()}
