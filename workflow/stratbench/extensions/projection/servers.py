"""Models a training step with parameter servers as a queue of workers at the servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerQueue:
    """Closed queue of workers, which in turn compute and are served by servers with equal parts.

    Attributes:
        think_s: Seconds between two requests of a worker, for its computation and the latency of messages.
        service_s: Seconds in which the servers serve one push and pull of one worker.
    """

    think_s: float
    service_s: float

    @property
    def num_workers_at_saturation(self) -> float:
        """Number of workers from which on the servers are always busy (saturated).

        It is the think time plus the service time, divided by the service time.
        """
        return (self.think_s + self.service_s) / self.service_s


def compute_asynchronous_step_s(queue: ServerQueue, workers: int) -> float:
    """Return the seconds between a worker's updates, if workers do not wait for each other.

    The result is by mean value analysis, which is exact for exponential service times (Reiser and Lavenberg,
    1980).
    """
    waiting = rate = 0.0
    for w in range(1, workers + 1):
        served_s = queue.service_s * (1 + waiting)
        rate = w / (queue.think_s + served_s)
        waiting = rate * served_s
    return workers / rate


def compute_synchronous_step_s(queue: ServerQueue, workers: int) -> float:
    """Return the seconds of a step in which all workers wait for each other.

    All workers compute at the same time. Then the servers serve their pushes one after the other.
    """
    return queue.think_s + workers * queue.service_s
