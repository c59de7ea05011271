"""Detects pauses of a node: time spans in which a cell's processes were stopped.

SLURM may suspend a job, a user may press Ctrl-Z or close a laptop, and a virtual machine may be frozen. A
thread of the cell's agent then sees its clock jump. On a slow machine the kernel counts how long the thread
waits for a core, which distinguishes it from a pause. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stratbench.telemetry.timeline import read_samples

#: Seconds between two readings of the clock. A pause may begin up to this time later than recorded.
PERIOD_S = 0.5
#: Shortest jump of the clock in seconds that counts as a pause. Shorter jumps may come from swapped memory.
SHORTEST_S = 2.0
#: Shortest jump in seconds that counts as a pause if the kernel does not count waits for a core. On crowded
#: machines threads wait up to 4 s.
SHORTEST_UNCOUNTED_S = 15.0
#: CPU time in seconds above which a process counts as running, not stopped, during a pause.
MIN_RUNNING_CPU_S = 0.1
#: Share of a cell's training time that pauses may take without invalidating its measurements.
NEGLIGIBLE_PAUSE_SHARE = 0.01
#: Possible causes of a pause, as the end of a sentence.
PAUSE_CAUSES = "its job was suspended, its processes were stopped, or the machine slept"
#: Clock that also counts while the machine sleeps. `time.monotonic` does not.
_WITH_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Pause(NamedTuple):
    """A time span in which the processes of a cell were stopped.

    Attributes:
        begin_s: Begin of the pause in seconds of `time.monotonic`.
        length_s: Length of the pause in seconds, including sleep.
        asleep_s: Seconds of the pause in which the machine slept. `time.monotonic` does not count them.
    """

    begin_s: float
    length_s: float
    asleep_s: float

    @property
    def end_s(self) -> float:
        """End of the pause in seconds of `time.monotonic`."""
        return self.begin_s + self.length_s - self.asleep_s


class _ClockReading(NamedTuple):
    """Seconds on two clocks, and seconds that the reading thread has waited for a core."""

    monotonic_s: float
    with_sleep_s: float
    waited_s: float


class PauseWatch:
    """Detector of pauses of this process. A thread runs until `stop` is called."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []
        self._looked_s = self._awake_since_s = time.monotonic()
        self._new_look = threading.Condition()
        self._ended = threading.Event()
        self._start_thread = threading.Thread(
            target=self._detect_pauses, name="pauses", daemon=True
        )
        self._start_thread.start()

    def stop(self) -> None:
        """Detect pauses a last time, and end the thread."""
        self._ended.set()
        self._start_thread.join()

    def wait_for_latest_reading(self) -> None:
        """Wait until `pauses` contains all pauses up to now, also one that has just ended."""
        now_s = time.monotonic()
        with self._new_look:
            self._new_look.wait_for(lambda: self._looked_s >= now_s or self._ended.is_set())

    @property
    def total_pause_s(self) -> float:
        """Total length of all pauses so far, in seconds of `time.monotonic`."""
        return sum(pause.length_s - pause.asleep_s for pause in self.pauses)

    @property
    def awake_since_s(self) -> float:
        """End of the last pause in seconds of `time.monotonic`. Without a pause, begin of the watch."""
        return self._awake_since_s

    def _detect_pauses(self) -> None:
        with contextlib.ExitStack() as opened:
            try:
                schedstat_file = opened.enter_context(open("/proc/thread-self/schedstat", "rb"))
            except OSError:
                schedstat_file = None
            shortest_s = SHORTEST_UNCOUNTED_S if schedstat_file is None else SHORTEST_S
            before = _read_clocks(schedstat_file)
            is_last = False
            while not is_last:
                is_last = self._ended.wait(PERIOD_S)
                now = _read_clocks(schedstat_file)
                pause = _find_pause(before, now, shortest_s)
                with self._new_look:
                    if pause is not None:
                        self.pauses.append(pause)
                        self._awake_since_s = now.monotonic_s
                    self._looked_s = now.monotonic_s
                    self._new_look.notify_all()
                before = now


def _read_clocks(schedstat_file: Any) -> _ClockReading:
    """Read the clocks and the thread's total wait for a core at one moment.

    The reading is repeated if the thread has waited meanwhile.
    """
    while True:
        waited_s = _read_core_wait_s(schedstat_file)
        moment = _ClockReading(time.monotonic(), time.clock_gettime(_WITH_SLEEP), waited_s)
        if _read_core_wait_s(schedstat_file) == waited_s:
            return moment


def _read_core_wait_s(schedstat_file: Any) -> float:
    """Return how many seconds this thread has waited for a CPU core so far.

    The result is 0 if the kernel does not count such waits.
    """
    return (
        0.0
        if schedstat_file is None
        else int(os.pread(schedstat_file.fileno(), 128, 0).split()[1]) / 1e9
    )


def _find_pause(before: _ClockReading, now: _ClockReading, shortest_s: float) -> Pause | None:
    """Return the pause between two readings of the clocks, or None if there was none.

    There was none if the period of the readings and waits for a core explain the time between the readings.
    """
    passed_s = now.with_sleep_s - before.with_sleep_s
    length_s = passed_s - PERIOD_S - (now.waited_s - before.waited_s)
    if length_s < shortest_s:
        return None
    asleep_s = passed_s - (now.monotonic_s - before.monotonic_s)
    return Pause(before.monotonic_s, length_s, min(max(asleep_s, 0.0), length_s))


def iter_worker_pauses(pauses: Sequence[Pause], samples: Path, origin_s: float) -> Iterator[Pause]:
    """Yield the agent's pauses in which the cell's other processes used no CPU time.

    In the remaining pauses only the agent may have been stopped.

    Args:
        pauses: Pauses of the agent.
        samples: File of the node's sampler.
        origin_s: Time of `time.monotonic` that is 0 in the file.
    """
    each: dict[str, list[tuple[float, float]]] = {}
    for row in read_samples(samples) if pauses else ():
        if row["kind"] == "process" and row["cpu_time_s"]:
            each.setdefault(row["id"], []).append((row["t_s"], float(row["cpu_time_s"])))
    for pause in pauses:
        first_s, last_s = (pause.begin_s + PERIOD_S - origin_s, pause.end_s - PERIOD_S - origin_s)
        within = [[cpu_s for t_s, cpu_s in its if first_s < t_s < last_s] for its in each.values()]
        if not any(cpu_s and cpu_s[-1] - cpu_s[0] > MIN_RUNNING_CPU_S for cpu_s in within):
            yield pause
