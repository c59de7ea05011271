"""Measures how long threads of this process wait for a core, by the Linux kernel's counters."""

from __future__ import annotations

import os
from collections import Counter

TASKS = "/proc/self/task"


class CoreWaits:
    """Sums, per thread, the waits for a core in all spans between `begin` and `end`."""

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None
        self._waited_ns: Counter[str] = Counter()
        self._is_counted = False

    def begin_span(self) -> None:
        """Start a span in which waits are counted. Starting takes about 15 µs per thread."""
        self._before = read_core_waits_ns()

    def end(self) -> None:
        """End the span of counted waits, if a span has begun."""
        before, self._before = self._before, None
        if not before:
            return
        self._is_counted = True
        for thread, waited_ns in read_core_waits_ns().items():
            self._waited_ns[thread] += max(0, waited_ns - before.get(thread, 0))

    @property
    def longest_wait_s(self) -> float | None:
        """Longest total wait of a thread in seconds, or None if the kernel counted nothing.

        A step waits for each of its threads: the main thread, autograd's and those of OpenMP.
        """
        return max(self._waited_ns.values(), default=0) / 1e9 if self._is_counted else None


def read_core_waits_ns() -> dict[str, int]:
    """Return the nanoseconds that each thread has waited for a core.

    The result is empty if the kernel counts none.
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
        except (OSError, ValueError):  # the thread has just ended, or the kernel has no such file
            continue
        if ran_ns:  # a kernel that does not count writes zeros
            waits[thread] = waited_ns
    return waits
