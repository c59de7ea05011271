"""The heartbeat tells a slow training from one that hangs."""

from __future__ import annotations

import pytest

from stratbench.telemetry import heartbeat
from stratbench.telemetry.heartbeat import Heartbeat, read_heartbeat


class Clock:
    """Time that the test moves, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(heartbeat, "monotonic_ns", lambda: round(self.s * 1e9))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def written(path, clock: Clock, steps: list[float], warm_up_s: float = 0.5) -> None:
    """A worker that warms up, then takes steps of so many seconds."""
    found = Heartbeat(path)
    for span_s in (0.0, warm_up_s, 0.0):
        clock.s += span_s
        found.record_progress()
    for span_s in steps:
        clock.s += span_s
        found.record_step()


@pytest.mark.parametrize(
    ("steps", "warm_up_s", "quiet_s", "hangs"),
    [
        ([0.1] * 50, 0.5, 9.0, False),  # a busy machine may hold a process up
        ([0.1] * 50, 0.5, 11.0, True),
        ([20.0] * 3, 30.0, 190.0, False),  # slow: the next step may come yet
        ([20.0] * 3, 30.0, 201.0, True),
        ([0.1, 30.0, 0.1], 0.5, 299.0, False),  # once as slow as that
        ([0.001] * 5, 90.0, 170.0, False),  # queued in a moment: the device takes 90 s for a step
        ([0.001] * 5, 90.0, 190.0, True),
    ],
)
def test_a_hang_is_a_silence_that_nothing_before_explains(
    tmp_path, clock, steps, warm_up_s, quiet_s, hangs
):
    written(tmp_path / "heartbeat", clock, steps, warm_up_s)
    beat = read_heartbeat(tmp_path / "heartbeat", clock.s + quiet_s)
    assert beat.steps == len(steps)
    assert beat.without_progress_s == pytest.approx(quiet_s)
    assert beat.longest_step_s == pytest.approx(max(steps))
    assert beat.longest_pause_s == pytest.approx(warm_up_s)
    assert beat.is_hung == hangs


def test_who_evaluates_is_alive(tmp_path, clock):
    found = Heartbeat(tmp_path / "heartbeat")
    found.record_step()
    for _ in range(100):
        clock.s += 9.0
        found.record_progress()
    assert not read_heartbeat(tmp_path / "heartbeat", clock.s + 9.0).is_hung


@pytest.mark.parametrize("content", [None, b"", b"half"])
def test_a_worker_that_has_not_begun_has_no_heartbeat(tmp_path, content):
    if content is not None:
        (tmp_path / "heartbeat").write_bytes(content)
    assert read_heartbeat(tmp_path / "heartbeat", 1.0) is None
