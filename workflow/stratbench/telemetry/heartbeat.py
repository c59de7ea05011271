"""Writes and reads the heartbeat of a worker: the time of its last progress, in a small file.

The worker's agent uses it to distinguish a cell that hangs from a slow one. The file is on the node's own
disk and mapped into memory, so that a step needs no system call. This module imports no torch.
"""

from __future__ import annotations

import mmap
import signal
import struct
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

#: Signal that makes a process of a cell write the stacks of its threads; others ignore it.
STACK_SIGNAL = signal.SIGUSR1
_FORM = struct.Struct("QQQQ")  # native byte order, so that each number is written at once
#: Number of shard groups that the worker has called in this step, behind the times.
_CALLS = struct.Struct("Q")
#: Number of one shard group that the worker has called.
_CALL = struct.Struct("H")
#: Largest number of calls per step that are stored.
MAX_CALLS = 1024
_SIZE = _FORM.size + _CALLS.size + MAX_CALLS * _CALL.size
#: Shortest time in seconds without progress that counts as a hang.
SHORTEST_HANG_S = 10.0
#: A worker hangs if a step takes this many times the longest earlier step, or another phase this many times
#: the longest earlier pause.
STEPS, PAUSES = 10.0, 2.0


class Heartbeat:
    """The heartbeat file that a worker writes after each training step and at other progress."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(_SIZE))  # a mapped page without a block would fail on a full disk
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._calls = 0
        self._steps = self._longest_step_ns = self._longest_pause_ns = 0
        self._last_ns = monotonic_ns()
        self._write_file()

    def record_step(self) -> None:
        """Store that a training step is complete, or on CUDA that the step is queued."""
        now_ns = monotonic_ns()
        span_ns = now_ns - self._last_ns
        if span_ns > self._longest_step_ns:
            self._longest_step_ns = span_ns
        self._last_ns = now_ns
        self._steps += 1
        self._write_file()

    def record_group_call(self, group: int) -> None:
        """Store that a shard group is called, in which workers may wait for each other."""
        if self._calls < MAX_CALLS:
            _CALL.pack_into(self._map, _FORM.size + _CALLS.size + self._calls * _CALL.size, group)
            self._calls += 1
            _CALLS.pack_into(self._map, _FORM.size, self._calls)

    def forget_calls(self) -> None:
        """Forget the stored calls of shard groups, because another step begins."""
        self._calls = 0
        _CALLS.pack_into(self._map, _FORM.size, 0)

    def record_progress(self) -> None:
        """Store progress other than a training step: a phase, or a batch of an evaluation."""
        now_ns = monotonic_ns()
        self._longest_pause_ns = max(self._longest_pause_ns, now_ns - self._last_ns)
        self._last_ns = now_ns
        self._write_file()

    def _write_file(self) -> None:
        _FORM.pack_into(
            self._map, 0, self._steps, self._last_ns, self._longest_step_ns, self._longest_pause_ns
        )


class HeartbeatReading(NamedTuple):
    """The content of a worker's heartbeat file.

    Attributes:
        steps: Number of completed steps.
        without_progress_s: Seconds since the last progress.
        longest_step_s: Longest time in seconds from any progress to the end of the next step.
        longest_pause_s: Longest time in seconds before other progress, such as the warm-up or a batch of an
            evaluation.
    """

    steps: int
    without_progress_s: float
    longest_step_s: float
    longest_pause_s: float

    @property
    def max_without_progress_s(self) -> float:
        """Seconds without progress after which the worker counts as hung.

        Steps of a slow training take similar times, so 10 times the longest step is a hang. The warm-up
        counts as a pause, which is at least as long as a step with a wait for the device. On CUDA a worker
        queues steps ahead of its device, and may then wait for one of them.
        """
        steps_s, pauses_s = STEPS * self.longest_step_s, PAUSES * self.longest_pause_s
        return max(SHORTEST_HANG_S, steps_s, pauses_s)

    @property
    def is_hung(self) -> bool:
        """Whether the worker has made no progress for longer than `max_without_progress_s`."""
        return self.without_progress_s > self.max_without_progress_s


def read_heartbeat(path: Path, now_s: float, awake_since_s: float = 0.0) -> HeartbeatReading | None:
    """Return the heartbeat of a worker of this node, or None before its start.

    Args:
        path: File of the worker.
        now_s: Present value of `time.monotonic`.
        awake_since_s: End of the last pause of the node (`telemetry.pauses`). The time before it does not
            count.
    """
    try:
        steps, last_ns, *longest_ns = _FORM.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        return None
    return HeartbeatReading(
        steps, now_s - max(last_ns / 1e9, awake_since_s), *(ns / 1e9 for ns in longest_ns)
    )


def read_shard_group_calls(path: Path) -> list[int]:
    """Return the numbers of the shard groups that a worker has called, in order.

    The list has the calls of the worker's last step.
    """
    try:
        content = path.read_bytes()
        (count,) = _CALLS.unpack_from(content, _FORM.size)
        first = _FORM.size + _CALLS.size
        return [_CALL.unpack_from(content, first + i * _CALL.size)[0] for i in range(count)]
    except (OSError, struct.error):
        return []
