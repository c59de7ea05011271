"""Interface of activities besides the training, such as checkpoints, which the training loop calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from stratbench.strategies.base import Strategy, Worker
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.train.job import Job
from stratbench.workload.data.device_data import DeviceData


class Start(NamedTuple):
    """The point at which a worker's training begins: steps, losses and epochs before it."""

    #: Number of steps that were taken before, and the losses of the steps of the epoch in progress.
    steps: int = 0
    losses: tuple[Tensor, ...] = ()
    #: The results of earlier epochs.
    epochs: tuple[dict[str, Any], ...] = ()


class Beside:
    """One activity besides the training, which the loop calls between spans of steps, never within one."""

    @classmethod
    def is_active_in(cls, job: Job) -> bool:
        """Return whether this activity takes place in the cell of a job."""
        raise NotImplementedError

    def __init__(
        self, job: Job, strategy: Strategy, data: DeviceData, worker: Worker, phases: Phases
    ) -> None:
        """Create the activity for a worker whose strategy is set up."""
        self.job, self.strategy, self.data = job, strategy, data
        self.worker, self.phases = worker, phases

    def restore_start(self, clock: StepClock, epochs: list[dict[str, Any]]) -> Start:
        """Restore the state in which the training begins after warm-up; return the starting point.

        Args:
            clock: Clock of the training steps.
            epochs: Results of the finished epochs, to which the loop adds.
        """
        return Start()

    def find_next_stop(self) -> int | None:
        """Return the training step after which the clock must stop next, or None."""
        return None

    def act_after_step(self, step: int, losses: list[Tensor]) -> None:
        """Act after step `step`, while the clock is stopped. `losses` are those of the epoch in progress."""

    def end(self, status: str, chosen: bool) -> dict[str, Any]:
        """Finish the activity after all measurements, and return its part of the worker's result.

        Args:
            status: How the training ended.
            chosen: Whether this worker reports for all: rank 0, or the worker of a server that evaluated.
        """
        return {}
