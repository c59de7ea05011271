"""A strategy as a user may write it, to hold the contract of `strategies/base.py`: gradients a step late."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from stratbench.strategies import base
from stratbench.strategies.ddp import DDP


class Late(DDP):
    """As ddp, but each update is by the gradients of the step before; the first is by zeros."""

    summary: ClassVar[str] = "replicas, gradients averaged by all-reduce and used a step late"

    def traits(self, gpus: int) -> base.Traits:
        return base.Traits(updates_per_step=1, ring_copies=2, kept_copies=1)

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        module = super().wrap(model, worker)
        self.late = [torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
        self.scratch = torch.zeros(1 << 10, dtype=torch.uint8)
        return module

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        return super().list_persistent_tensors() | {"communication": [self.scratch]}

    def extra_state(self) -> list[Tensor]:
        return self.late

    def assign_gradients_to_updated_tensors(self) -> None:
        for late, parameter in zip(self.late, self.parameters, strict=True):
            fresh = parameter.grad.clone()
            parameter.grad.copy_(late)
            late.copy_(fresh)
