"""The heartbeat of a worker: the time of its last progress, in a small file for its agent.

It tells a cell that hangs from a slow one. The file is on the node's own disk and mapped into memory: a step
costs no system call. No torch.
"""

from __future__ import annotations

import mmap
import signal
import struct
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

#: Has a process of a cell write the stacks of its threads; one that is not ready for it ignores it.
STACK_SIGNAL = signal.SIGUSR1
_FORM = struct.Struct("QQQQ")  # native: each figure is written at once
#: Behind it: how many shard groups the worker has called in this step, and their numbers.
_CALLS = struct.Struct("Q")
_CALL = struct.Struct("H")
#: The most calls of a step that are kept.
MAX_CALLS = 1024
_SIZE = _FORM.size + _CALLS.size + MAX_CALLS * _CALL.size
#: A span of a worker without a sign of life is no hang below this, in seconds.
SHORTEST_HANG_S = 10.0
#: A step may take so many times the longest one before it, anything else so many times the longest pause.
STEPS, PAUSES = 10.0, 2.0


class Heartbeat:
    """Written by a worker: `step` after each training step, `alive` wherever else it gets on."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(_SIZE))  # a mapped page without a block would fail on a full disk
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._calls = 0
        self._steps = self._longest_step_ns = self._longest_pause_ns = 0
        self._last_ns = monotonic_ns()
        self._write()

    def step(self) -> None:
        """A training step is through; on CUDA: it is queued, or known to be through."""
        now_ns = monotonic_ns()
        span_ns = now_ns - self._last_ns
        if span_ns > self._longest_step_ns:
            self._longest_step_ns = span_ns
        self._last_ns = now_ns
        self._steps += 1
        self._write()

    def call(self, group: int) -> None:
        """A shard group is called, whose workers may wait for one another in it."""
        if self._calls < MAX_CALLS:
            _CALL.pack_into(self._map, _FORM.size + _CALLS.size + self._calls * _CALL.size, group)
            self._calls += 1
            _CALLS.pack_into(self._map, _FORM.size, self._calls)

    def end_calls(self) -> None:
        """The calls that follow are of another step."""
        self._calls = 0
        _CALLS.pack_into(self._map, _FORM.size, 0)

    def alive(self) -> None:
        """Something else is through: a phase, a batch of an evaluation."""
        now_ns = monotonic_ns()
        self._longest_pause_ns = max(self._longest_pause_ns, now_ns - self._last_ns)
        self._last_ns = now_ns
        self._write()

    def _write(self) -> None:
        _FORM.pack_into(
            self._map, 0, self._steps, self._last_ns, self._longest_step_ns, self._longest_pause_ns
        )


class HeartbeatReading(NamedTuple):
    """Content of a worker's file: its steps, seconds since its last sign of life, and earlier spans.

    `longest_step_s`: from a sign to that of the next step; `longest_pause_s`: between all others, such as the
    warm-up and an evaluation's batches.
    """

    steps: int
    quiet_s: float
    longest_step_s: float
    longest_pause_s: float

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which the worker counts as hung.

        A slow training keeps its pace: 10 times its longest step is a hang. The warm-up counts as a pause. It
        is at least as long as one step with a wait for its device. On CUDA a worker queues steps ahead of its
        device, and may then wait for one of them.
        """
        steps_s, pauses_s = STEPS * self.longest_step_s, PAUSES * self.longest_pause_s
        return max(SHORTEST_HANG_S, steps_s, pauses_s)

    @property
    def hangs(self) -> bool:
        """Whether it has been silent for longer than that."""
        return self.quiet_s > self.patience_s


def read_heartbeat(path: Path, now_s: float, awake_since_s: float = 0.0) -> HeartbeatReading | None:
    """Return the heartbeat of a worker of this node, or None before its start.

    Args:
        path: File of the worker.
        now_s: Present value of `time.monotonic`.
        awake_since_s: End of the last pause of all (`telemetry.pauses`), before which silence does not
            count.
    """
    try:
        steps, last_ns, *longest_ns = _FORM.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        return None
    return HeartbeatReading(
        steps, now_s - max(last_ns / 1e9, awake_since_s), *(ns / 1e9 for ns in longest_ns)
    )


def read_calls(path: Path) -> list[int]:
    """Return the shard groups that a worker called in its last step, in order."""
    try:
        content = path.read_bytes()
        (count,) = _CALLS.unpack_from(content, _FORM.size)
        first = _FORM.size + _CALLS.size
        return [_CALL.unpack_from(content, first + i * _CALL.size)[0] for i in range(count)]
    except (OSError, struct.error):
        return []
