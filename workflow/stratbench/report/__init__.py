"""Reports steps and scores of a custom training program to stratbench, in a small file.

    from stratbench.report import Report

    report = Report(parameters=123_456)   # just before the first step
    report.step(samples, loss)            # after each step; the samples of all workers together
    report.score(value)                   # after each evaluation, which does not count as training time

This file needs only Python and may be copied. Only the process of rank 0 writes, and only in a cell of
stratbench. docs/engines.md describes how the reports are used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

#: The environment variable that a cell of stratbench sets to the path of the report's file.
VARIABLE = "STRATBENCH_REPORT"


class Report:
    """A report of a training, whose clock starts when the report is created.

    Times are seconds of `time.monotonic`.
    """

    def __init__(self, **facts: str | float) -> None:
        """Create the report of a training, and start its clock.

        Args:
            facts: Facts about the training: `parameters`, the model's number of parameters, shows whether two
                programs train equal models. Further facts are free.
        """
        first = os.environ.get("RANK", "0") == "0"
        path = os.environ.get(VARIABLE) if first else None
        self._file = open(path, "a", encoding="utf-8", buffering=1) if path else None  # noqa: SIM115
        self._losses: list[Any] = []
        workers = int(os.environ.get("WORLD_SIZE", "1"))
        torch = sys.modules.get("torch")
        known = {"torch": str(torch.__version__)} if torch else {}
        self._write_event("start", facts={"workers": workers, **known, **facts})

    def step(self, samples: int, loss: Any = None) -> None:
        """Report a finished step of the optimizer.

        Args:
            samples: Number of samples in the step, over all workers.
            loss: Mean loss of the samples. A tensor is read at the next `pause` or `score`, so that no step
                waits for the GPU.
        """
        now = isinstance(loss, float)
        if loss is not None and not now:
            self._losses.append(loss)
        self._write_event("step", samples=int(samples), **({"loss": loss} if now else {}))

    def pause(self) -> None:
        """Stop the clock until `score` or `resume`, before an evaluation or a checkpoint.

        Waits until the GPU has finished its work.
        """
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._write_event("pause", losses=self._pop_pending_losses())

    def resume(self) -> None:
        """Continue the clock after a `pause`, if no `score` is reported."""
        self._write_event("resume")

    def score(self, value: Any = None, test_loss: Any = None, error: Any = None) -> None:
        """Report the score of an evaluation in the task's unit. Continue the clock.

        Args:
            value: The score.
            test_loss: Mean loss on the test set.
            error: Standard error of the score.
        """
        values = {"score": value, "test_loss": test_loss, "error": error}
        numbers = {key: float(v) for key, v in values.items() if v is not None}
        self._write_event("score", losses=self._pop_pending_losses(), **numbers)

    def _pop_pending_losses(self) -> list[float]:
        losses, self._losses = [float(loss) for loss in self._losses], []
        return losses

    def _write_event(self, event: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n")
