"""Pauses of a node: spans in which the processes of a cell were stopped, for whatever reason.

SLURM suspends a job, a user presses Ctrl-Z, a laptop's lid is closed, a virtual machine is frozen. A thread
of the cell's agent sees its own clock jump. A slow machine is distinguished by the kernel, which counts how
long a ready thread had to wait for a core. No torch.
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

#: How often the thread looks, in seconds: by so much a pause may have begun later than it says.
PERIOD_S = 0.5
#: A shorter jump is no pause, in seconds: memory that is read back from a disk takes its time, too.
SHORTEST_S = 2.0
#: The same where the kernel does not count waits for a core: on crowded machines 4 s were seen.
SHORTEST_UNCOUNTED_S = 15.0
#: The CPU time within a pause, in seconds, that only processes have that were not stopped.
WORK_S = 0.1
#: The share of the training time up to which pauses change no figure that is compared.
NEGLIGIBLE = 0.01
#: Why there was one, in a sentence.
CAUSES = "its job was suspended, its processes were stopped, or the machine slept"
#: Counts the time in which the machine sleeps, which `time.monotonic` does not.
_WITH_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Pause(NamedTuple):
    """A pause: its begin on `time.monotonic`, its length, and the part that this clock leaves out."""

    begin_s: float
    length_s: float
    asleep_s: float

    @property
    def end_s(self) -> float:
        """Its end on `time.monotonic`."""
        return self.begin_s + self.length_s - self.asleep_s


class _Moment(NamedTuple):
    """An instant on both clocks, and the thread's waiting time for a core until then."""

    monotonic_s: float
    with_sleep_s: float
    waited_s: float


class PauseWatch:
    """Watches for pauses of this process, in a thread, until `stop`."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []
        self._looked_s = self._awake_since_s = time.monotonic()
        self._new_look = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and end the thread."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Have `pauses` hold what has happened until now, one that has just ended included."""
        now_s = time.monotonic()
        with self._new_look:
            self._new_look.wait_for(lambda: self._looked_s >= now_s or self._ended.is_set())

    @property
    def stopped_s(self) -> float:
        """Seconds of all pauses, by `time.monotonic`."""
        return sum(pause.length_s - pause.asleep_s for pause in self.pauses)

    @property
    def awake_since_s(self) -> float:
        """The end of the last pause, or when the watch began, by `time.monotonic`."""
        return self._awake_since_s

    def _watch(self) -> None:
        with contextlib.ExitStack() as opened:
            try:
                counts = opened.enter_context(open("/proc/thread-self/schedstat", "rb"))
            except OSError:
                counts = None
            shortest_s = SHORTEST_UNCOUNTED_S if counts is None else SHORTEST_S
            before = _now(counts)
            is_last = False
            while not is_last:
                is_last = self._ended.wait(PERIOD_S)
                now = _now(counts)
                pause = _pause_between(before, now, shortest_s)
                with self._new_look:
                    if pause is not None:
                        self.pauses.append(pause)
                        self._awake_since_s = now.monotonic_s
                    self._looked_s = now.monotonic_s
                    self._new_look.notify_all()
                before = now


def _now(counts: Any) -> _Moment:
    """Return this instant, read while the thread has its core.

    Its wait then counts in this span.
    """
    while True:
        waited_s = _waited_s(counts)
        moment = _Moment(time.monotonic(), time.clock_gettime(_WITH_SLEEP), waited_s)
        if _waited_s(counts) == waited_s:
            return moment


def _waited_s(counts: Any) -> float:
    """Return the seconds that this thread has waited for a core.

    Return 0 if they are not counted.
    """
    return 0.0 if counts is None else int(os.pread(counts.fileno(), 128, 0).split()[1]) / 1e9


def _pause_between(before: _Moment, now: _Moment, shortest_s: float) -> Pause | None:
    """The pause between two looks.

    None where the period and the waits for a core explain their distance.
    """
    passed_s = now.with_sleep_s - before.with_sleep_s
    length_s = passed_s - PERIOD_S - (now.waited_s - before.waited_s)
    if length_s < shortest_s:
        return None
    asleep_s = passed_s - (now.monotonic_s - before.monotonic_s)
    return Pause(before.monotonic_s, length_s, min(max(asleep_s, 0.0), length_s))


def pauses_of_workers(pauses: Sequence[Pause], samples: Path, origin_s: float) -> Iterator[Pause]:
    """Yield the pauses in which no sampled process of the cell worked.

    In others, only the agent may have been stopped.

    Args:
        pauses: Pauses of the agent.
        samples: File of the node's sampler.
        origin_s: Origin of the file's times.
    """
    each: dict[str, list[tuple[float, float]]] = {}
    for row in read_samples(samples) if pauses else ():
        if row["kind"] == "process" and row["cpu_time_s"]:
            each.setdefault(row["id"], []).append((row["t_s"], float(row["cpu_time_s"])))
    for pause in pauses:
        first_s, last_s = (pause.begin_s + PERIOD_S - origin_s, pause.end_s - PERIOD_S - origin_s)
        within = [[cpu_s for t_s, cpu_s in its if first_s < t_s < last_s] for its in each.values()]
        if not any(cpu_s and cpu_s[-1] - cpu_s[0] > WORK_S for cpu_s in within):
            yield pause
