"""Reports a training by Lightning: `Trainer(callbacks=[ReportCallback(score="val_accuracy")])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from stratbench.report import Report


class ReportCallback(Callback):
    """A callback that reports each optimizer step, and after each validation the logged metric `score`."""

    def __init__(self, score: str) -> None:
        self.score = score

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.report = Report(parameters=sum(p.numel() for p in pl_module.parameters()))
        self.steps, self.samples = trainer.global_step, 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch[0]) * trainer.world_size
        # A batch that only accumulated gradients is no step.
        if trainer.global_step > self.steps:
            whole = outputs["loss"].detach() * trainer.accumulate_grad_batches
            self.report.step(self.samples, whole)
            self.steps, self.samples = trainer.global_step, 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.report.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.report.score(trainer.callback_metrics[self.score])
