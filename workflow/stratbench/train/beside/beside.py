"""Defines the interface of activities besides the training, such as writing checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from stratbench.strategies.base import Strategy, Worker
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.train.job import Job
from stratbench.workload.data.device_data import DeviceData


class TrainingStart(NamedTuple):
    """Point at which a worker's training begins, with what an interrupted training has done before."""

    #: Number of training steps that were taken before.
    steps: int = 0
    #: Losses of the steps of the epoch in progress that were taken before.
    losses: tuple[Tensor, ...] = ()
    #: Results of the epochs that were finished before.
    epochs: tuple[dict[str, Any], ...] = ()


class Beside:
    """Activity of a worker beside its training, such as writing checkpoints.

    The training loop calls it while the clock is stopped, so that it does not count as training.
    """

    @classmethod
    def is_active_in(cls, job: Job) -> bool:
        """Return whether this activity takes place in the cell that the job trains."""
        raise NotImplementedError

    def __init__(
        self, job: Job, strategy: Strategy, data: DeviceData, worker: Worker, phases: Phases
    ) -> None:
        """Create the activity of a worker, after the set-up of the worker's strategy."""
        self.job, self.strategy, self.data = job, strategy, data
        self.worker, self.phases = worker, phases

    def restore_training_start(
        self, clock: StepClock, epochs: list[dict[str, Any]]
    ) -> TrainingStart:
        """Restore the state of an interrupted training after warm-up; return where training begins.

        Args:
            clock: Clock of the training steps.
            epochs: Results of the finished epochs, to which the loop adds.
        """
        return TrainingStart()

    def find_next_clock_stop_step(self) -> int | None:
        """Return the step after which the clock stops next for this activity. None if never."""
        return None

    def act_after_step(self, step: int, losses: list[Tensor]) -> None:
        """Carry out the activity after a step, while the clock is stopped.

        `losses` are the losses of the epoch in progress.
        """

    def end(self, status: str, reports_for_all: bool) -> dict[str, Any]:
        """End the activity after all measurements. Return entries to add to the worker's result.

        Args:
            status: Status of the training, such as `ok`.
            reports_for_all: Whether this worker reports the results for all: rank 0, or the one that
                evaluated for the servers.
        """
        return {}
