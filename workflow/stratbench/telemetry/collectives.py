"""A collective operation, and the bytes that it moves between workers. No torch here."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CollectiveCall:
    """One collective operation: its kind, and the bytes of the tensor that all ranks share.

    `n_bytes` is the whole tensor: what is reduced, broadcast, gathered (output), scattered (input), or
    sent to one rank. `ranks`: how many take part, where that is not all; None: all. `sample_bytes`: what
    comes to it for each sample that the worker computes on, where activations are exchanged. `stride`: how
    far a group's ranks are from each other; so many groups lie side by side. `waiter`: what waits for it:
    `user`, whatever reads the new tensor that it makes (DTensor's activations); `stream`, the stream in which
    it was called, on a CPU the host; `none` until its handle is waited for.
    """

    kind: str
    n_bytes: float
    ranks: int | None = None
    sample_bytes: float = 0
    stride: int = field(default=1, compare=False)
    waiter: Literal["user", "stream", "none"] = field(default="none", compare=False)

    @property
    def listed(self) -> tuple[Any, ...]:
        """Kind and bytes, followed by ranks, bytes per sample and stride, if not the default."""
        if self.stride > 1:
            return astuple(self)[:5]
        if self.sample_bytes:
            return astuple(self)[:4]
        return (self.kind, self.n_bytes) if self.ranks is None else astuple(self)[:3]

    def lies_within(self, node_ranks: int, world_size: int) -> bool:
        """Return whether each of the parallel groups is on one node with so many ranks."""
        return node_ranks % ((self.ranks or world_size) * self.stride) == 0

    def wire_bytes(self, world_size: int, samples: int = 0) -> float:
        """Return bytes that a rank sends (and also receives) by the ring algorithms.

        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: an
        all-reduce is a reduce-scatter and an all-gather. For a broadcast the mean over the ranks.
        """
        n_bytes = self.n_bytes + samples * self.sample_bytes
        if self.kind == "send":
            return n_bytes
        rounds, ranks = 2 if self.kind == "all_reduce" else 1, self.ranks or world_size
        return rounds * (ranks - 1) / ranks * n_bytes
