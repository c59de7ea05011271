"""Describes a collective operation, and the bytes that it moves between workers, without torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CollectiveCall:
    """One collective operation: its kind, the size of its tensor, and the ranks that take part.

    Attributes:
        collective_name: Name of the collective, such as `all_reduce`.
        n_bytes: Bytes of the whole tensor: the one that is reduced, broadcast, gathered (output), scattered
            (input), or sent to one rank.
        group_size: Number of ranks that take part, or None for all.
        bytes_per_sample: Further bytes per sample of a worker, for a collective that exchanges activations.
        rank_stride: Distance between consecutive ranks of a group, which is the number of interleaved groups.
        waiter: What waits for the collective. `user`: the operator that reads its new tensor (DTensor's
            activations). `stream`: the stream in which it was called, or the host on a CPU. `none`: nothing,
            until code waits for its handle.
    """

    collective_name: str
    n_bytes: float
    group_size: int | None = None
    bytes_per_sample: float = 0
    rank_stride: int = field(default=1, compare=False)
    waiter: Literal["user", "stream", "none"] = field(default="none", compare=False)

    @property
    def as_tuple(self) -> tuple[Any, ...]:
        """Kind and bytes, then ranks, bytes per sample and stride.

        Fields at the end that have their defaults are left out.
        """
        if self.rank_stride > 1:
            return astuple(self)[:5]
        if self.bytes_per_sample:
            return astuple(self)[:4]
        return (
            (self.collective_name, self.n_bytes) if self.group_size is None else astuple(self)[:3]
        )

    def is_within_node(self, node_ranks: int, world_size: int) -> bool:
        """Return whether each process group of this collective is within one node.

        Args:
            node_ranks: Number of ranks per node.
            world_size: Number of all ranks.
        """
        return node_ranks % ((self.group_size or world_size) * self.rank_stride) == 0

    def count_wire_bytes(self, world_size: int, samples: int = 0) -> float:
        """Return the bytes that a rank sends (and also receives) by ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, "Bandwidth optimal all-reduce
        algorithms for clusters of workstations", 2009). The bytes of a broadcast are the mean over the ranks.

        Args:
            world_size: Number of all ranks.
            samples: Samples of a worker, by which `bytes_per_sample` is multiplied.
        """
        n_bytes = self.n_bytes + samples * self.bytes_per_sample
        if self.collective_name == "send":
            return n_bytes
        rounds, ranks = (
            2 if self.collective_name == "all_reduce" else 1,
            self.group_size or world_size,
        )
        return rounds * (ranks - 1) / ranks * n_bytes
