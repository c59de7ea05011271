"""The step clock: its arithmetic on a fake clock, its cost, and CUDA's events on fake ones."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch

from stratbench.telemetry import clock as clock_module
from stratbench.telemetry.clock import Phases, StepClock


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until the test moves it: `now.ms += 5`."""
    fake = SimpleNamespace(ms=1000)
    monkeypatch.setattr(
        clock_module, "time", SimpleNamespace(perf_counter_ns=lambda: fake.ms * 1_000_000)
    )
    return fake


def test_epochs_and_steps_add_up_and_time_between_epochs_is_not_counted(now):
    clock = StepClock("cpu")
    for steps_ms, tail_ms in (((10, 20, 30), 4), ((5, 15), 0)):
        clock.begin_epoch()
        for ms in steps_ms:
            now.ms += ms
            clock.mark_step_end()
        now.ms += tail_ms
        clock.end_epoch()
        now.ms += 1000  # an evaluation
    assert clock.step_ms == [10, 20, 30, 5, 15]
    assert clock.epoch_times_s == pytest.approx([0.064, 0.020])
    assert clock.train_time_s == pytest.approx(0.084)
    assert clock.phase_means_ms == {}


def test_a_workers_own_time_of_a_step_is_of_the_phases_in_which_it_waits_for_no_other(now):
    clock = StepClock("cpu", own=("data", "forward"))
    for epoch in range(3):
        clock.begin_epoch()
        for step in range(60):
            for phase, ms in (("data", 1), ("forward", 2 + epoch + step), ("backward", 50)):
                now.ms += ms
                clock.mark_phase_end(phase)
            now.ms += 9
            clock.mark_step_end()
        clock.end_epoch()
    own = [3 + epoch + step for epoch in range(3) for step in range(60)]
    assert clock.step_times_without_waits_ms == own[-128:]
    other = StepClock("cpu")
    other.begin_epoch()
    other.mark_step_end()
    other.end_epoch()
    assert other.step_times_without_waits_ms == []


def test_an_epoch_without_steps_counts_its_wall_clock(now):
    clock = StepClock("cpu")
    clock.begin_epoch()
    now.ms += 7
    clock.end_epoch()
    assert clock.train_time_s == pytest.approx(0.007)
    assert clock.step_ms == []


def test_marks_split_a_step_and_the_rest_is_other(now):
    clock = StepClock("cpu")
    clock.begin_epoch()
    for extra in (0, 10):
        for phase, ms in (("forward", 3), ("server_wait", 1), ("backward", 6), ("server_wait", 2)):
            now.ms += ms + (extra if phase == "backward" else 0)
            clock.mark_phase_end(phase)
        if extra:
            now.ms += 8
            clock.mark_phase_end("rare")  # the mean is over the steps that have it
        now.ms += 4
        clock.mark_step_end()
    clock.end_epoch()
    means_ms = {"forward": 3, "server_wait": 3, "backward": 11, "other": 4, "rare": 8}
    assert clock.phase_means_ms == means_ms
    assert clock.step_ms == [16, 34]


def test_an_unfinished_step_belongs_to_no_step(now):
    clock = StepClock("cpu")
    clock.begin_epoch()
    now.ms += 3
    clock.mark_phase_end("forward")
    clock.end_epoch()
    clock.begin_epoch()
    now.ms += 5
    clock.mark_step_end()
    clock.end_epoch()
    assert clock.step_ms == [5]
    assert clock.phase_means_ms == {}


def test_wrong_order_and_unknown_devices_are_refused():
    clock = StepClock("cpu")
    with pytest.raises(RuntimeError, match="no epoch"):
        clock.end_epoch()
    clock.begin_epoch()
    with pytest.raises(RuntimeError, match="has not ended"):
        clock.begin_epoch()
    with pytest.raises(ValueError, match="'meta'"):
        StepClock("meta")


def test_too_many_phase_names_are_refused():
    clock = StepClock("cpu")
    clock.begin_epoch()
    for number in range(255):
        clock.mark_phase_end(f"phase{number}")
    clock.mark_phase_end("phase0")
    with pytest.raises(ValueError, match="use the same names in each step"):
        clock.mark_phase_end("phase255")


@pytest.mark.timeout(300)
def test_five_marks_and_a_tick_cost_little_more_than_noting_six_times():
    """benchmarks/speed/telemetry_cost.py says what that is in microseconds, and of a step."""

    def cpu_of_a_step(steps: int = 3000) -> float:
        clock = StepClock("cpu")
        clock.begin_epoch()
        begun = time.process_time()
        for _ in range(steps):
            for phase in ("data", "forward", "backward", "optimizer", "server_wait"):
                clock.mark_phase_end(phase)
            clock.mark_step_end()
        return (time.process_time() - begun) / steps

    def cpu_of_a_note(count: int = 18_000) -> float:
        notes = []

        def note() -> None:
            notes.append(time.perf_counter_ns())

        begun = time.process_time()
        for _ in range(count):
            note()
        return (time.process_time() - begun) / count

    pairs = [(cpu_of_a_step(), cpu_of_a_note()) for _ in range(7)]
    # Of those pairs some were taken at one speed of the machine.
    print(
        ", ".join(
            f"{1e6 * step:.2f} us per step, {1e9 * note:.0f} ns a note" for step, note in pairs
        )
    )
    assert min(step / (6 * note) for step, note in pairs) < 5


class FakeGpu:
    """A device whose time the test moves; events read it when they are recorded."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.done_ms = float("inf")  # what was recorded later has not happened yet
        self.synchronised = 0
        self.events_made = 0

    def event(self, enable_timing: bool = False) -> FakeEvent:
        assert enable_timing
        self.events_made += 1
        return FakeEvent(self)

    def synchronize(self, device: torch.device) -> None:
        self.synchronised += 1


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.ms: float | None = None

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.ms = self._gpu.ms

    def query(self) -> bool:
        return self.ms <= self._gpu.done_ms

    def synchronize(self) -> None:
        self._gpu.done_ms = max(self._gpu.done_ms, self.ms)

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.ms - self.ms


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return fake


def test_the_heartbeat_goes_on_while_a_device_catches_up_with_its_steps(gpu):
    """Queued in a moment, two of them through: an epoch's end waits for each of the others."""
    alive = []
    heartbeat = SimpleNamespace(
        record_step=lambda: None, record_progress=lambda: alive.append(gpu.done_ms)
    )
    clock = StepClock("cuda:1", heartbeat)
    clock.begin_epoch()
    gpu.done_ms = 2.0
    for _ in range(5):
        gpu.ms += 1.0
        clock.mark_step_end()
    clock.end_epoch()
    assert alive == [3.0, 4.0, 5.0]
    assert clock.step_ms == [1.0] * 5


def test_cuda_steps_come_from_events_and_only_the_ends_synchronise(gpu):
    clock = StepClock("cuda:1")
    for _ in range(2):
        clock.begin_epoch()
        for ms in (3.0, 4.0):
            gpu.ms += ms
            clock.mark_phase_end("forward")
            gpu.ms += 1
            clock.mark_step_end()
        assert gpu.synchronised % 2 == 1
        clock.end_epoch()
    assert gpu.synchronised == 4
    assert clock.step_ms == [4, 5, 4, 5]
    assert clock.phase_means_ms == {"forward": 3.5, "other": 1}
    assert len(clock.epoch_times_s) == 2
    assert gpu.events_made == 5  # the second epoch uses the first one's again


def test_the_hosts_time_is_the_shortest_in_which_it_issued_one_of_an_epochs_first_two_steps(
    gpu, now
):
    clock, on_cpu = StepClock("cuda:1"), StepClock("cpu")
    assert clock.shortest_step_launch_ms is None
    # The third waits for room in the device's queue; what lies between two epochs is of no step.
    for steps_ms, shortest_ms in (((9, 6, 3), 6), ((7, 8), 6), ((5,), 5)):
        for each in (clock, on_cpu):
            each.begin_epoch()
        synchronised = gpu.synchronised
        for ms in steps_ms:
            now.ms += ms
            gpu.ms += 10
            for each in (clock, on_cpu):
                each.mark_phase_end("forward")
                each.mark_step_end()
        assert gpu.synchronised == synchronised
        for each in (clock, on_cpu):
            each.end_epoch()
        now.ms += 1
        assert clock.shortest_step_launch_ms == shortest_ms
    assert on_cpu.shortest_step_launch_ms is None


@pytest.mark.parametrize(("behind_ms", "most"), [(0, 16), (30, 50), (math.inf, 601)])
def test_cuda_events_do_not_pile_up_in_a_long_epoch(gpu, monkeypatch, behind_ms, most):
    """One epoch of 200 steps of 3 events; the device is `behind_ms` behind the host."""
    monkeypatch.setattr(clock_module, "_UNREAD_EVENTS", 12)
    clock = StepClock("cuda:1")
    clock.begin_epoch()
    for i in range(200):
        gpu.ms += i % 3
        clock.mark_phase_end("forward")
        gpu.ms += 1
        clock.mark_phase_end("backward")
        gpu.done_ms = gpu.ms - behind_ms
        clock.mark_step_end()
    assert gpu.synchronised == 1
    clock.end_epoch()
    assert clock.step_ms == [1 + i % 3 for i in range(200)]
    assert clock.phase_means_ms == {"forward": pytest.approx(0.995), "backward": 1, "other": 0}
    assert gpu.events_made <= most + 5


class Sink(list):
    def write_phase_event(self, phase: str, event: str) -> None:
        self.append((phase, event))


def test_phases_sum_by_name_and_are_logged(now):
    sink = Sink()
    phases = Phases("cpu", sink)
    with phases("setup"):
        now.ms += 500
    for _ in range(2):
        with phases("eval"):
            now.ms += 250
    assert phases.compute_seconds_by_phase() == {"setup_s": 0.5, "eval_s": 0.5}
    assert sink == [("setup", "start"), ("setup", "end")] + [("eval", "start"), ("eval", "end")] * 2


def test_a_phase_that_fails_has_no_end_and_its_error_passes(now):
    sink = Sink()
    phases = Phases("cpu", sink)

    def fail() -> None:
        with phases("setup"):
            now.ms += 10
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        fail()
    assert phases.compute_seconds_by_phase() == {}
    assert sink == [("setup", "start")]


def test_phases_wait_for_the_device_at_both_ends(gpu):
    with Phases("cuda:1", Sink())("eval"):
        assert gpu.synchronised == 1
    assert gpu.synchronised == 2
