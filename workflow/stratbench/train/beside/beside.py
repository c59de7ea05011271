"""What happens beside the training of a worker, such as keeping checkpoints. The loop knows none of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from stratbench.strategies.base import Strategy, Worker
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.train.job import Job
from stratbench.workload.data.device_data import DeviceData


class Start(NamedTuple):
    """Where the training of a worker begins."""

    #: Steps that were taken before, and the losses of those of the epoch in progress.
    steps: int = 0
    losses: tuple[Tensor, ...] = ()
    #: The results of the epochs before.
    epochs: tuple[dict[str, Any], ...] = ()


class Beside:
    """One thing that happens beside the training. The loop asks once per stretch of steps, none in a step."""

    @classmethod
    def takes(cls, job: Job) -> bool:
        """Return whether it happens in this cell."""
        raise NotImplementedError

    def __init__(
        self, job: Job, strategy: Strategy, data: DeviceData, worker: Worker, phases: Phases
    ) -> None:
        """The strategy is set up."""
        self.job, self.strategy, self.data = job, strategy, data
        self.worker, self.phases = worker, phases

    def begin(self, clock: StepClock, epochs: list[dict[str, Any]]) -> Start:
        """Say where the training begins, which is warmed up, and make it what it was there.

        Args:
            clock: Of the training.
            epochs: The results of its epochs, to which the loop adds.
        """
        return Start()

    def next_stop(self) -> int | None:
        """Say after how many steps of the whole training the clock shall stand next.

        None: it need not.
        """
        return None

    def between(self, step: int, losses: list[Tensor]) -> None:
        """Do what is to be done after `step`, while the clock stands.

        `losses`: of the epoch in progress.
        """

    def end(self, status: str, chosen: bool) -> dict[str, Any]:
        """Finish, after everything was measured; returns its part of the worker's result.

        Args:
            status: How the training ended.
            chosen: Whether this worker speaks for all: rank 0, or of a server's workers who evaluated.
        """
        return {}
