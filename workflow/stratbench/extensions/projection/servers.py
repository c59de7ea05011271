"""Steps with parameter servers as a queue, and the worker count at which they are saturated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerQueue:
    """A closed queue: each worker thinks for `think_s`, then each server serves it in turn.

    `think_s`: its computing, and the latency of what it sends, for which no other worker waits. `demands_s`:
    seconds of each server for one push and pull of one worker (bytes over its rate, and what it applies).
    """

    think_s: float
    demands_s: tuple[float, ...]

    @property
    def knee(self) -> float:
        """Number of workers above which the busiest server is the limit: (Z + sum D) / max D."""
        return (self.think_s + sum(self.demands_s)) / max(self.demands_s)


def asynchronous(queue: ServerQueue, workers: int) -> float:
    """Return the seconds between two updates of a worker.

    Mean value analysis, exact for exponential service (Reiser and Lavenberg, 1980).
    """
    waiting = [0.0] * len(queue.demands_s)
    rate = 0.0
    for w in range(1, workers + 1):
        times = [d * (1 + q) for d, q in zip(queue.demands_s, waiting, strict=True)]
        rate = w / (queue.think_s + sum(times))
        waiting = [rate * t for t in times]
    return workers / rate


def synchronous(queue: ServerQueue, workers: int) -> float:
    """Return seconds of a step that waits for all: equal workers, then each server takes all pushes."""
    return queue.think_s + workers * max(queue.demands_s)
