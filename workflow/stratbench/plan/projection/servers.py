"""Steps with parameter servers as a queue, and the count of workers at which the servers are full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Queue:
    """A closed queue: each of the workers computes for `think_s`, then each server serves it in turn.

    `demands_s`: seconds of each server for one push and pull of one worker (bytes over its rate, and what
    it applies).
    """

    think_s: float
    demands_s: tuple[float, ...]

    @property
    def knee(self) -> float:
        """Workers above which the busiest server is the limit: (Z + sum D) / max D."""
        return (self.think_s + sum(self.demands_s)) / max(self.demands_s)


@dataclass(frozen=True)
class Flow:
    """`updates_per_s` of all workers, seconds between two updates of a worker, and their mean staleness."""

    updates_per_s: float
    step_s: float
    staleness: float


def asynchronous(queue: Queue, workers: int) -> Flow:
    """Mean value analysis, exact for exponential service (Reiser and Lavenberg, 1980).

    An update is stale by those that others made between its pull and its push: about W - 1.
    """
    waiting = [0.0] * len(queue.demands_s)
    rate = 0.0
    for w in range(1, workers + 1):
        times = [d * (1 + q) for d, q in zip(queue.demands_s, waiting, strict=True)]
        rate = w / (queue.think_s + sum(times))
        waiting = [rate * t for t in times]
    return Flow(rate, workers / rate, workers - 1)


def synchronous(queue: Queue, workers: int, slowest_s: float | None = None) -> float:
    """Seconds of a step that waits for all: the slowest worker, then each server takes all pushes.

    `slowest_s`: expected time of the slowest worker; by default all are alike.
    """
    return (queue.think_s if slowest_s is None else slowest_s) + workers * max(queue.demands_s)


def slowest_of(series: Sequence[Sequence[float]], workers: int, draws: int = 200) -> float:
    """Expected seconds of the slowest of so many workers, by resampling whole series of step times.

    `series`: steps x of each measured worker. Whole series, since a slow worker stays slow: single steps
    drawn apart overstate what the others wait for. Deterministic.
    """
    steps = min(len(s) for s in series)
    if not steps:
        raise ValueError("series without a step: nothing to draw from")
    random = Random(0)
    total_s = 0.0
    for _ in range(draws):
        drawn = [(random.choice(series), random.randrange(steps)) for _ in range(workers)]
        # Each starts somewhere in its own series: workers are alike, not in step.
        total_s += (
            sum(max(s[(first + i) % steps] for s, first in drawn) for i in range(steps)) / steps
        )
    return total_s / draws
