"""The base of strategies that shard the model: each worker holds and updates a part of every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


class Sharded(base.Collective):
    """Base of strategies that shard the model: `wrap` turns its parameters into DTensors.

    The optimizer works on the plain tensors within them, which is the same arithmetic where it is
    element-wise. BatchNorm's running statistics are never synchronised while training: their average
    over the workers is evaluated. `wrap` also says which workers hold a model between them.
    """

    #: How many workers hold one model between them.
    group_size: int
    #: Those that this one is of; None: all.
    shard_group: ProcessGroup | None = None

    def local_tensors(self) -> list[Tensor]:
        import torch

        from stratbench.telemetry.shards import local_part

        # An optimizer over DTensors spends several times as long on dispatch.
        with torch.no_grad():
            return [local_part(p).detach() for p in self.parameters]

    def link_gradients(self) -> None:
        import torch

        from stratbench.telemetry.shards import local_part

        with torch.no_grad():
            for shard, p in zip(self.local, self.parameters, strict=True):
                shard.grad = None if p.grad is None else local_part(p.grad)
                p.grad = None

    def gradient_norm(self) -> Tensor:
        norm = super().gradient_norm()
        # Shards that are kept on the host have their norm there, where NCCL does not reach.
        on_device = norm.to(self.worker.device)
        return base.norm_of_parts(on_device, self.group_size, self.shard_group).to(norm.device)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        import torch
        import torch.distributed as dist

        from stratbench.telemetry.shards import free_gathered

        buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        own = [b.clone() for b in buffers]
        if buffers:
            mean = torch.cat([b.flatten() for b in buffers])
            dist.all_reduce(mean)
            mean /= self.worker.world_size
            for b, average in zip(buffers, mean.split([b.numel() for b in buffers]), strict=True):
                b.copy_(average.view_as(b))
        with super().evaluating() as model:
            yield model
        for b, saved in zip(buffers, own, strict=True):
            b.copy_(saved)
        # What is not freed after a forward stays gathered where no backward follows. A later step
        # would use those copies, whatever happened to the shards since.
        free_gathered(self.model)

    def report(self) -> dict[str, Any]:
        evaluated_on = "the gathered weights with the workers' mean BatchNorm statistics"
        return super().report() | {"evaluated_on": evaluated_on}
