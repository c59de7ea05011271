"""Writes and reads a worker's heartbeat: a file with the time of its last progress.

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

#: Signal on which a process of a cell writes the stacks of its threads. Processes without a handler ignore
#: it.
STACK_SIGNAL = signal.SIGUSR1
# Layout of the first fields: the number of steps, and three times in ns. In native byte order the CPU writes
# each number in one operation.
_FORM = struct.Struct("QQQQ")
#: Layout of the field after the times: the number of shard groups that the worker has called in this step.
_CALLS = struct.Struct("Q")
#: Layout of the entry for one called shard group: its number.
_CALL = struct.Struct("H")
#: Largest number of calls of shard groups that are stored per step.
MAX_CALLS = 1024
_SIZE = _FORM.size + _CALLS.size + MAX_CALLS * _CALL.size
#: Shortest time in seconds without progress after which a worker counts as hung.
SHORTEST_HANG_S = 10.0
#: A worker counts as hung if its time without progress is longer than both limits: STEPS times its longest
#: step, and PAUSES times its longest time before progress outside of steps.
STEPS, PAUSES = 10.0, 2.0


class Heartbeat:
    """The heartbeat file that a worker writes after each training step and at other progress."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            # Disk blocks are allocated now, because on a full disk a later write to the map would crash.
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._calls = 0
        self._steps = self._longest_step_ns = self._longest_pause_ns = 0
        self._last_ns = monotonic_ns()
        self._write_times()

    def record_step(self) -> None:
        """Store that a training step has ended (on CUDA: that it is queued)."""
        now_ns = monotonic_ns()
        span_ns = now_ns - self._last_ns
        if span_ns > self._longest_step_ns:
            self._longest_step_ns = span_ns
        self._last_ns = now_ns
        self._steps += 1
        self._write_times()

    def record_group_call(self, group_number: int) -> None:
        """Store that the worker calls a shard group, where workers may wait for each other."""
        if self._calls < MAX_CALLS:
            _CALL.pack_into(
                self._map, _FORM.size + _CALLS.size + self._calls * _CALL.size, group_number
            )
            self._calls += 1
            _CALLS.pack_into(self._map, _FORM.size, self._calls)

    def delete_group_calls(self) -> None:
        """Delete the stored calls of shard groups, because another step begins."""
        self._calls = 0
        _CALLS.pack_into(self._map, _FORM.size, 0)

    def record_progress(self) -> None:
        """Store progress outside of training steps: a phase, or a batch of an evaluation."""
        now_ns = monotonic_ns()
        self._longest_pause_ns = max(self._longest_pause_ns, now_ns - self._last_ns)
        self._last_ns = now_ns
        self._write_times()

    def _write_times(self) -> None:
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
    def hang_threshold_s(self) -> float:
        """Seconds without progress after which the worker counts as hung.

        Steps of a slow training take similar times, so 10 times the longest step is a hang. The warm-up
        counts as a pause, which is at least as long as a step with a wait for the device. On CUDA a worker
        queues steps ahead of its device, and may then wait for one of them.
        """
        steps_s, pauses_s = STEPS * self.longest_step_s, PAUSES * self.longest_pause_s
        return max(SHORTEST_HANG_S, steps_s, pauses_s)

    @property
    def is_hung(self) -> bool:
        """Whether the worker has made no progress for longer than `hang_threshold_s`."""
        return self.without_progress_s > self.hang_threshold_s


def read_heartbeat(path: Path, now_s: float, awake_since_s: float = 0.0) -> HeartbeatReading | None:
    """Return the content of a worker's heartbeat file on this node. None before the worker starts.

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
    """Return, in order, the numbers of the shard groups that a worker's present step called.

    The list is empty without a file.
    """
    try:
        content = path.read_bytes()
        (count,) = _CALLS.unpack_from(content, _FORM.size)
        first = _FORM.size + _CALLS.size
        return [_CALL.unpack_from(content, first + i * _CALL.size)[0] for i in range(count)]
    except (OSError, struct.error):
        return []
