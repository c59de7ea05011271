"""`local-sgd`: workers train by themselves, and average their weights every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stratbench.cell.options import option
from stratbench.extensions.local.base import Local, flattened, periods
from stratbench.strategies import base


class LocalSGD(Local):
    """Every `period` steps the mean over the workers replaces their weights and BatchNorm statistics.

    So it does after the last step, whatever is left of a period. Momentum, or AdamW's moments, stay each
    worker's own (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al.,
    "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, as PyTorch's PostLocalSGDOptimizer does).
    Before step `start` gradients are averaged, as by DDP but after backward: post-local SGD of the latter
    paper.
    """

    summary: ClassVar[str] = "workers train alone, weights averaged every few steps"
    rule: ClassVar[str] = (
        "W_i -= lr velocity(g_i) on worker i; after every `period` steps, W_i = mean of all workers' W"
    )
    alike_on_any_count = True
    begins_anew = None
    collectives = ("all_reduce",)

    @dataclass(frozen=True)
    class Options(base.Options):
        period: int = option(8, "steps between two averages of the weights", least=1)
        start: int = option(
            0, "steps in which gradients are averaged, before workers train by themselves", least=0
        )

    def traits(self, gpus: int) -> base.Traits:
        return base.Traits(
            synchronous_alone=True,
            equals_ddp=gpus == 1,
            updates_per_step=1,
            ring_copies=None if self.options.start else 2 / self.options.period,
        )

    @property
    def first_steps(self) -> tuple[int, ...]:
        return (0, self.options.start) if self.options.start else (0,)

    @property
    def period(self) -> int:
        return self.options.period

    def exchanges(self, steps: int) -> int:
        alone = max(0, steps - self.options.start)
        return steps - alone + periods(alone, self.options.period)

    def link_gradients(self) -> None:
        if self.steps < self.options.start:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.average(flattened(gradients))
            self.worker.mark("exposed_communication")

    def exchange(self) -> None:
        if self.steps <= self.options.start:
            self.average(self.statistics)
        elif self.is_due(self.options.period, self.options.start):
            self.average(self.exchanged)
