"""The strategy `gossip`: workers train separately, and average weights with their neighbours on a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from stratbench.extensions.local.base import Local
from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Maximum bytes of one message. A worker has a receive buffer of this size for each neighbour.
CHUNK_BYTES = 25 << 20


class Gossip(Local):
    """Trains workers separately; after each update, each averages its weights with its two ring neighbours.

    All weights of the average are equal (a doubly stochastic matrix), so that the mean over all workers
    changes by the mean of all updates. Two workers have one neighbour each, and equal weights after each
    step. BatchNorm's statistics are averaged as well; each worker keeps its own momentum. Lian et al., "Can
    Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017 (D-PSGD), average before the
    update instead.
    """

    summary: ClassVar[str] = "workers train alone; weights are averaged with neighbours on a ring"
    rule: ClassVar[str] = (
        "W_i -= lr velocity(g_i) on worker i; then W_i = mean of W_i and its neighbours' on a ring"
    )
    begins_anew = None
    collectives = ("send", "all_reduce")

    def traits(self, gpus: int) -> base.Traits:
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=gpus == 1,
            updates_per_step=1,
            # A worker sends all its weights to each neighbour. `ring_copies` counts
            # in units of (W - 1) / W copies.
            ring_copies=min(2, gpus - 1) * gpus / max(1, gpus - 1),
        )

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        import torch

        wrapped = super().wrap(model, worker)
        rank, workers = worker.rank, worker.world_size
        self.neighbours = sorted({(rank - 1) % workers, (rank + 1) % workers} - {rank})
        largest: dict[torch.dtype, Tensor] = {}
        for chunk in split_tensors_into_chunks(self.exchanged_tensors):
            largest[chunk.dtype] = max(largest.get(chunk.dtype, chunk), chunk, key=len)
        self.received = {
            dtype: [torch.empty_like(chunk) for _ in self.neighbours]
            for dtype, chunk in largest.items()
        }
        return wrapped

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        return {"communication": [t for tensors in self.received.values() for t in tensors]}

    def exchange_weights(self) -> None:
        import torch.distributed as dist

        for chunk in split_tensors_into_chunks(self.exchanged_tensors) if self.neighbours else ():
            received = [t[: chunk.numel()] for t in self.received[chunk.dtype]]
            sends = [dist.P2POp(dist.isend, chunk, rank) for rank in self.neighbours]
            receives = [
                dist.P2POp(dist.irecv, t, rank)
                for t, rank in zip(received, self.neighbours, strict=True)
            ]
            for work in dist.batch_isend_irecv([*sends, *receives]):
                work.wait()
            for t in received:
                chunk += t
            chunk /= 1 + len(received)
            self.sent_bytes += len(sends) * chunk.nbytes


def split_tensors_into_chunks(flat_tensors: list[Tensor]) -> list[Tensor]:
    """Return views of flat tensors with at most CHUNK_BYTES bytes each."""
    return [
        chunk for flat in flat_tensors for chunk in flat.split(CHUNK_BYTES // flat.element_size())
    ]
