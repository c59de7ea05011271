"""Models steps with parameter servers as a queue, and finds where the servers are saturated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerQueue:
    """Closed queue of workers: a worker computes for `think_s`, then each server serves the worker.

    Attributes:
        think_s: Seconds between two requests of a worker: its computation, and the latency of its
            messages.
        service_s_by_server: Seconds that each server needs for one push and pull of one worker.
    """

    think_s: float
    service_s_by_server: tuple[float, ...]

    @property
    def saturation_workers(self) -> float:
        """Number of workers that saturates the busiest server: (Z + sum D) / max D.

        Z is the think time, and D is each server's service time.
        """
        return (self.think_s + sum(self.service_s_by_server)) / max(self.service_s_by_server)


def compute_asynchronous_step_s(queue: ServerQueue, workers: int) -> float:
    """Return the seconds between two updates of a worker, if no worker waits for another.

    Mean value analysis, exact for exponential service (Reiser and Lavenberg, 1980).
    """
    waiting = [0.0] * len(queue.service_s_by_server)
    rate = 0.0
    for w in range(1, workers + 1):
        times = [d * (1 + q) for d, q in zip(queue.service_s_by_server, waiting, strict=True)]
        rate = w / (queue.think_s + sum(times))
        waiting = [rate * t for t in times]
    return workers / rate


def compute_synchronous_step_s(queue: ServerQueue, workers: int) -> float:
    """Return the seconds of a step that waits for all workers.

    Equal workers compute at the same time, then the busiest server serves all pushes one after the other.
    """
    return queue.think_s + workers * max(queue.service_s_by_server)
