"""Saves the training state of a synchronous worker in checkpoints, and resumes from them.

The state is everything on which later steps and the record depend. It has the weights, the buffers, the
states of optimizer, strategy and random generators, and the loss scale. It also has the losses, the results
of epochs and the measured times. The order of samples is not saved, because it follows from the seed and the
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratbench.extensions.checkpoints import attempts, checkpoints
from stratbench.extensions.checkpoints.keys import Checkpoints
from stratbench.strategies.collective import Collective
from stratbench.telemetry.clock import StepClock
from stratbench.train.beside.beside import Beside, TrainingStart
from stratbench.train.job import Job
from stratbench.workload.generators import Generators


class CheckpointWriter(Beside):
    """Saves a worker's training state after every `checkpoint_every` steps, the same ones on all workers.

    The state is copied while the training clock is stopped, and written during the training.
    """

    strategy: Collective

    @classmethod
    def is_active_in(cls, job: Job) -> bool:
        return "checkpoints" in job.settings.more and not job.is_in_block

    def restore_training_start(
        self, clock: StepClock, epochs: list[dict[str, Any]]
    ) -> TrainingStart:
        """Restore the training state from the checkpoint from which this attempt resumes.

        Without a checkpoint, training starts from the beginning.

        Raises:
            DamagedCheckpoint: The checkpoint is damaged. It was deleted, so that the next attempt resumes
                from an earlier checkpoint.
        """
        self._clock, self._epochs = clock, epochs
        self._every = self.worker.settings.get_extension_keys(Checkpoints).checkpoint_every
        self._folder = attempts.get_checkpoint_folder(self.worker.folder, self.worker.rank)
        self._writer = checkpoints.AsyncCheckpointWriter(
            self._folder, self._delete_older_checkpoints
        )
        #: Number and seconds of the checkpoints that earlier attempts wrote.
        self._before = {"count": 0, "held_up_s": 0.0, "written_s": 0.0}
        step = self.job.earlier_attempts[-1]["next_step"] if self.job.earlier_attempts else 0
        self._next_due = step + self._every
        if not step:
            return TrainingStart()
        with self.phases("resume"):
            return self._load_training_state(step)

    def find_next_clock_stop_step(self) -> int:
        return self._next_due

    def _load_training_state(self, step: int) -> TrainingStart:
        random = Generators.capture_states(self.worker.device).convert_to_tensors()
        with checkpoints.delete_checkpoint_if_damaged(self._folder, step):
            metadata = checkpoints.read_checkpoint_metadata(self._folder, step)
            loss_dtype = getattr(torch, metadata["loss_dtype"])
            losses = torch.zeros(metadata["losses"], dtype=loss_dtype)
            step_ms = torch.zeros(step, dtype=torch.float64)
            tensors = [*self.strategy.list_training_state_tensors(), *random, step_ms, losses]
            checkpoints.read_checkpoint_into_tensors(self._folder, step, tensors)
        self.strategy.load_step_counts(metadata["counts"])
        self._clock.load_measured_times(metadata["clock"] | {"step_ms": step_ms.tolist()})
        Generators.from_tensors(random).restore_states(self.worker.device)
        self._before = metadata["kept"]
        return TrainingStart(step, tuple(losses.to(self.worker.device)), tuple(metadata["epochs"]))

    def act_after_step(self, step: int, losses: list[Tensor]) -> None:
        with self.phases("checkpoint"):
            self._writer.wait_for_checkpoint_write()
            stacked = torch.stack(losses).cpu() if losses else torch.zeros(0)
            clock, own = self._clock.export_measured_times(), self.summarize_checkpoints()
            step_ms = torch.tensor(clock.pop("step_ms"), dtype=torch.float64)
            metadata = {
                "counts": self.strategy.export_step_counts(),
                "clock": clock,
                # The training appends to this list during the write, so a copy is written.
                "epochs": list(self._epochs),
                "losses": len(stacked),
                "loss_dtype": str(stacked.dtype).removeprefix("torch."),
                "kept": own | {"count": own["count"] + 1},
            }
            constant = [
                *Generators.capture_states(self.worker.device).convert_to_tensors(),
                step_ms,
                stacked,
            ]
            self._writer.start_checkpoint_write_unless_busy(
                step,
                self.strategy.list_training_state_tensors(),
                constant_tensors=constant,
                metadata=metadata,
            )
        self._next_due = step + self._every

    def summarize_checkpoints(self) -> dict[str, Any]:
        """Return the number of checkpoints, the seconds for which training waited, and those of writing."""
        writer, before = self._writer, self._before
        return {
            "count": before["count"] + len(writer.held_up_s),
            "held_up_s": before["held_up_s"]
            + self.phases.compute_seconds_by_phase().get("checkpoint_s", 0.0),
            "written_s": before["written_s"] + sum(writer.written_s),
        }

    def end(self, status: str, reports_for_all: bool) -> dict[str, Any]:
        """Wait until the last checkpoint is on disk.

        Return the number and times of all checkpoints, and the bytes per checkpoint.
        """
        self._writer.wait_for_checkpoint_write()
        one = sum(t.nbytes for t in self.strategy.list_training_state_tensors())
        return {"checkpoints": self.summarize_checkpoints() | {"bytes": one}}

    def _delete_older_checkpoints(self, folder: Path, step: int) -> None:
        attempts.delete_checkpoints_before_common_step(
            self.worker.folder, self.worker.rank, self.worker.world_size
        )
