"""Describes a collective operation, and the bytes that it moves between workers, without torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CollectiveCall:
    """One collective operation: its kind, the size of its tensor, and the ranks that take part.

    Attributes:
        kind: Kind of the collective, such as `all_reduce`.
        n_bytes: Bytes of the whole tensor: the one that is reduced, broadcast, gathered (output), scattered
            (input), or sent to one rank.
        ranks: Number of ranks that take part, or None for all.
        sample_bytes: Further bytes per sample of a worker, for a collective that exchanges activations.
        stride: Distance between consecutive ranks of a group, which is the number of interleaved groups.
        waiter: What waits for the collective. `user`: the operator that reads its new tensor (DTensor's
            activations). `stream`: the stream in which it was called, or the host on a CPU. `none`: nothing,
            until code waits for its handle.
    """

    kind: str
    n_bytes: float
    ranks: int | None = None
    sample_bytes: float = 0
    stride: int = field(default=1, compare=False)
    waiter: Literal["user", "stream", "none"] = field(default="none", compare=False)

    @property
    def listed(self) -> tuple[Any, ...]:
        """Kind and bytes, then ranks, bytes per sample and stride.

        Fields at the end that have their defaults are left out.
        """
        if self.stride > 1:
            return astuple(self)[:5]
        if self.sample_bytes:
            return astuple(self)[:4]
        return (self.kind, self.n_bytes) if self.ranks is None else astuple(self)[:3]

    def lies_within(self, node_ranks: int, world_size: int) -> bool:
        """Return whether each process group of this collective is within one node.

        Args:
            node_ranks: Number of ranks per node.
            world_size: Number of all ranks.
        """
        return node_ranks % ((self.ranks or world_size) * self.stride) == 0

    def wire_bytes(self, world_size: int, samples: int = 0) -> float:
        """Return the bytes that a rank sends, and receives, by ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, "Bandwidth optimal all-reduce
        algorithms for clusters of workstations", 2009). The bytes of a broadcast are the mean over the ranks.

        Args:
            world_size: Number of all ranks.
            samples: Samples of a worker, by which `sample_bytes` is multiplied.
        """
        n_bytes = self.n_bytes + samples * self.sample_bytes
        if self.kind == "send":
            return n_bytes
        rounds, ranks = 2 if self.kind == "all_reduce" else 1, self.ranks or world_size
        return rounds * (ranks - 1) / ranks * n_bytes
