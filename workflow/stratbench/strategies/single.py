"""`single`: training in one process, with which the overhead of other strategies is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.strategies.base import Traits, Worker
from stratbench.strategies.collective import Collective, describe_ring_traffic

if TYPE_CHECKING:
    from torch import nn


class Single(Collective):
    """Training in one process, without a process group."""

    family = "alone"
    summary: ClassVar[str] = "one process, no distribution"
    rule: ClassVar[str] = "W -= lr velocity(g), where g is the gradient of the whole batch"
    max_workers = 1
    needs_group = False
    collectives = ()
    buffers_note = "there is one worker"
    rigid = "it has one worker"
    begins_anew = None

    def traits(self, gpus: int) -> Traits:
        return Traits(
            is_synchronous_on_one_worker=True, equals_ddp=True, updates_per_step=1, ring_copies=0
        )

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        return model

    def communication(self) -> dict[str, Any]:
        return describe_ring_traffic(0)
