"""The strategy `local-sgd`: workers train separately, and average their weights every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stratbench.cell.options import option
from stratbench.extensions.local.base import Local, count_periods, flatten_tensors
from stratbench.strategies import base


class LocalSGD(Local):
    """Trains workers separately, and averages their weights after every `period` steps.

    BatchNorm's statistics are averaged as well. An average also follows the last step. Each worker keeps its
    own momentum or AdamW moments (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019).

    Before step `start`, gradients are averaged as by DDP, but after backward. This is post-local SGD (Lin et
    al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; PyTorch's PostLocalSGDOptimizer).
    """

    summary: ClassVar[str] = "workers train alone; weights are averaged every few steps"
    rule: ClassVar[str] = (
        "W_i -= lr velocity(g_i) on worker i; after every `period` steps, W_i = mean of all workers' W"
    )
    alike_on_any_count = True
    begins_anew = None
    collectives = ("all_reduce",)

    @dataclass(frozen=True)
    class Options(base.Options):
        period: int = option(8, "number of steps between two averages of the weights", least=1)
        start: int = option(
            0, "number of first steps in which gradients are averaged as by DDP", least=0
        )

    def traits(self, gpus: int) -> base.Traits:
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=gpus == 1,
            updates_per_step=1,
            ring_copies=None if self.options.start else 2 / self.options.period,
        )

    @property
    def steps_that_change_the_work(self) -> tuple[int, ...]:
        return (0, self.options.start) if self.options.start else (0,)

    @property
    def steps_until_work_repeats(self) -> int:
        """Number of steps from one averaging of the weights to the next."""
        return self.options.period

    def count_exchanges(self, steps: int) -> int:
        alone = max(0, steps - self.options.start)
        return steps - alone + count_periods(alone, self.options.period)

    def assign_gradients_to_updated_tensors(self) -> None:
        if self.steps < self.options.start:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.average_tensors(flatten_tensors(gradients))
            self.worker.mark_phase_end("exposed_communication")

    def exchange_weights(self) -> None:
        if self.steps <= self.options.start:
            self.average_tensors(self.statistics)
        elif self.is_exchange_due(self.options.period, self.options.start):
            self.average_tensors(self.exchanged_tensors)
