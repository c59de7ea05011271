"""Reports a training by transformers: `Trainer(callbacks=[ReportCallback("eval_loss")])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from stratbench.report import Report


class ReportCallback(TrainerCallback):
    """A callback that reports each optimizer step, and after each evaluation the metric named `score`."""

    def __init__(self, score: str) -> None:
        self.score = score

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.report = Report(parameters=sum(p.numel() for p in given["model"].parameters()))
        self.samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.report.step(self.samples)
        if control.should_evaluate:
            self.report.pause()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if control.should_evaluate:
            self.report.pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.report.score(given["metrics"][self.score])
