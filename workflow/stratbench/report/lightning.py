"""A report of what Lightning's Trainer does: `Trainer(callbacks=[ReportCallback(score="val_accuracy")])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from stratbench.report import Report


class ReportCallback(Callback):
    """Reports each step of the optimizer, and after each validation the logged metric named `score`."""

    def __init__(self, score: str) -> None:
        self.score = score

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.report = Report(parameters=sum(p.numel() for p in pl_module.parameters()))
        self.steps, self.samples = trainer.global_step, 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch[0]) * trainer.world_size
        if trainer.global_step > self.steps:  # else gradients are only accumulated
            whole = outputs["loss"].detach() * trainer.accumulate_grad_batches
            self.report.step(self.samples, whole)
            self.steps, self.samples = trainer.global_step, 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.report.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.report.score(trainer.callback_metrics[self.score])
