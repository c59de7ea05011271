"""What a worker of a synchronous cell keeps of its training, and how it goes on from there.

All that the next steps and the record depend on: weights, buffers, what the optimizer and the strategy
keep, loss scale, counts, the generators of random numbers, the losses of the epoch in progress, the
results of epochs, and the clock's times. The order of the samples follows from the seed and the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratbench.strategies.base import Collective, Worker
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.train.restarts import attempts, checkpoints
from stratbench.workload.generators import Generators


class Keeper:
    """Keeps a worker's state every so many steps. All workers of a cell do so after the same ones.

    A checkpoint is copied while the clock stands, and written beside the training.
    """

    def __init__(
        self,
        strategy: Collective,
        worker: Worker,
        clock: StepClock,
        phases: Phases,
        epochs: list[dict[str, Any]],
        steps_per_epoch: int,
    ) -> None:
        """`strategy`: set up, and warmed up. `epochs`: their results, to which others are added."""
        self.steps_per_epoch = steps_per_epoch
        self._strategy, self._worker, self._clock = strategy, worker, clock
        self._phases, self._epochs = phases, epochs
        self._every = worker.settings.checkpoint_every
        self._folder = attempts.folder_of(worker.folder, worker.rank)
        self._writer = checkpoints.Writer(self._folder, self._forget)
        self._losses: list[Tensor] = []
        #: After how many steps the state is kept next.
        self.next_due: int = self._every
        #: Checkpoints of this attempt and those before it, as far as their work counts.
        self._before = {"count": 0, "held_up_s": 0.0, "written_s": 0.0}

    def go_on(self, step: int) -> list[dict[str, Any]]:
        """Make the training what it was after `step` (0: as it is); returns the results of epochs then.

        Raises `checkpoints.Damaged` where the file is not what was written, and deletes it: the next
        attempt takes the one before.
        """
        if not step:
            return []
        self.next_due = step + self._every
        with self._phases("resume"):
            return self._load(step)

    def _load(self, step: int) -> list[dict[str, Any]]:
        random = Generators.now(self._worker.device).tensors()
        with checkpoints.deleted_if_damaged(self._folder, step):
            facts = checkpoints.read_facts(self._folder, step)
            losses = torch.zeros(facts["losses"], dtype=getattr(torch, facts["loss_dtype"]))
            step_ms = torch.zeros(step, dtype=torch.float64)
            tensors = [*self._strategy.state_tensors(), *random, step_ms, losses]
            checkpoints.read_into(self._folder, step, tensors)
        self._strategy.go_on(facts["counts"])
        self._clock.load_history(facts["clock"] | {"step_ms": step_ms.tolist()})
        Generators.of_tensors(random).put_back(self._worker.device)
        self._before, self._losses = facts["kept"], list(losses.to(self._worker.device))
        return facts["epochs"]

    def take_losses(self) -> list[Tensor]:
        """The losses of the steps that were taken before of the epoch that begins now, once."""
        losses, self._losses = self._losses, []
        return losses

    def keep(self, step: int, losses: list[Tensor]) -> None:
        """Keep the state after `step`; `losses`: of the epoch in progress. The clock must stand."""
        with self._phases("checkpoint"):
            self._writer.settle()
            kept = torch.stack(losses).cpu() if losses else torch.zeros(0)
            clock, own = self._clock.history(), self.facts()
            step_ms = torch.tensor(clock.pop("step_ms"), dtype=torch.float64)
            facts = {
                "counts": self._strategy.counts(),
                "clock": clock,
                "epochs": list(self._epochs),  # written beside the training, which adds to it
                "losses": len(kept),
                "loss_dtype": str(kept.dtype).removeprefix("torch."),
                "kept": own | {"count": own["count"] + 1},
            }
            more = [*Generators.now(self._worker.device).tensors(), step_ms, kept]
            self._writer.take(step, self._strategy.state_tensors(), more=more, facts=facts)
        self.next_due = step + self._every

    def facts(self) -> dict[str, Any]:
        """How many checkpoints there were, and the seconds of holding up the training and of writing."""
        writer, before = self._writer, self._before
        return {
            "count": before["count"] + len(writer.held_up_s),
            "held_up_s": before["held_up_s"] + self._phases.as_dict().get("checkpoint_s", 0.0),
            "written_s": before["written_s"] + sum(writer.written_s),
        }

    def close(self) -> dict[str, Any]:
        """Wait for the last one to be written; returns the facts, with the bytes of one."""
        self._writer.settle()
        return self.facts() | {"bytes": sum(t.nbytes for t in self._strategy.state_tensors())}

    def _forget(self, folder: Path, step: int) -> None:
        attempts.forget_older(self._worker.folder, self._worker.rank, self._worker.world_size)
