"""Measures, by Linux's counters, how long this process's threads wait for a core."""

from __future__ import annotations

import os
from collections import Counter

TASKS = "/proc/self/task"


class CoreWaits:
    """Total wait for a CPU core per thread, in spans from `begin_span` to `end_span`."""

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None
        self._waited_ns: Counter[str] = Counter()
        self._is_counted = False

    def begin_span(self) -> None:
        """Start a span in which waits for a core are counted. This takes about 15 µs per thread."""
        self._before = read_core_waits_by_thread_ns()

    def end_span(self) -> None:
        """End the span in which waits are counted, if one has begun."""
        before, self._before = self._before, None
        if not before:
            return
        self._is_counted = True
        for thread, waited_ns in read_core_waits_by_thread_ns().items():
            self._waited_ns[thread] += max(0, waited_ns - before.get(thread, 0))

    @property
    def longest_core_wait_s(self) -> float | None:
        """Longest total time in seconds that a thread has waited for a core. None if not counted.

        A step waits for each of its threads: the main thread, autograd's and those of OpenMP.
        """
        return max(self._waited_ns.values(), default=0) / 1e9 if self._is_counted else None


def read_core_waits_by_thread_ns() -> dict[str, int]:
    """Return each thread's total wait for a CPU core in nanoseconds, by thread id.

    A thread's waits count from its start. The result is empty if the kernel counts none.
    """
    waits = {}
    try:
        threads = os.listdir(TASKS)
    except OSError:
        return {}
    for thread in threads:
        try:
            with open(f"{TASKS}/{thread}/schedstat", "rb") as file:
                ran_ns, waited_ns, _ = map(int, file.read().split())
        except (OSError, ValueError):
            # The thread has just ended, or the kernel has no such file.
            continue
        # A kernel that does not count waits shows zeros, also for the time that a thread ran.
        if ran_ns:
            waits[thread] = waited_ns
    return waits
