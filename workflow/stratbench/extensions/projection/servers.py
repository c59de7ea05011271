"""Models a training step with parameter servers as a queue of workers at the servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerQueue:
    """Closed queue of workers, which in turn compute and are served by each server.

    Attributes:
        think_s: Seconds between two requests of a worker, for its computation and the latency of messages.
        service_s_by_server: Seconds in which each server serves one push and pull of one worker.
    """

    think_s: float
    service_s_by_server: tuple[float, ...]

    @property
    def num_workers_at_saturation(self) -> float:
        """Number of workers from which on the busiest server is always busy (saturated).

        It is the think time plus the sum of all service times, divided by the longest service time.
        """
        return (self.think_s + sum(self.service_s_by_server)) / max(self.service_s_by_server)


def compute_asynchronous_step_s(queue: ServerQueue, workers: int) -> float:
    """Return the seconds between a worker's updates, if workers do not wait for each other.

    The result is by mean value analysis, which is exact for exponential service times (Reiser and Lavenberg,
    1980).
    """
    waiting = [0.0] * len(queue.service_s_by_server)
    rate = 0.0
    for w in range(1, workers + 1):
        times = [d * (1 + q) for d, q in zip(queue.service_s_by_server, waiting, strict=True)]
        rate = w / (queue.think_s + sum(times))
        waiting = [rate * t for t in times]
    return workers / rate


def compute_synchronous_step_s(queue: ServerQueue, workers: int) -> float:
    """Return the seconds of a step in which all workers wait for each other.

    All workers compute at the same time. Then the busiest server serves their pushes one after the other.
    """
    return queue.think_s + workers * max(queue.service_s_by_server)
