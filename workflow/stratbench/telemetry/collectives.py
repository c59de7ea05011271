"""Describes a collective operation and the bytes that it moves between workers; imports no torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective: its name, its tensor's size, and the ranks.

    Attributes:
        collective_name: Name of the collective, such as `all_reduce`.
        n_bytes: Bytes of the whole tensor: the one that is reduced, broadcast, gathered (output), scattered
            (input), or sent to one rank.
        group_size: Number of ranks that take part, or None for all.
        bytes_per_sample: Bytes of the tensor in addition to `n_bytes`, per sample of a worker, if the
            collective exchanges activations.
        rank_stride: Difference between consecutive ranks of a group. A difference of 2 means that two groups
            alternate.
        waiter: What waits for the end of the collective. `user`: the operator that reads the resulting tensor
            (DTensor's activations). `stream`: the stream in which the collective was called, or the host on a
            CPU. `none`: nothing, until code waits for the collective's handle.
    """

    collective_name: str
    n_bytes: float
    group_size: int | None = None
    bytes_per_sample: float = 0
    rank_stride: int = field(default=1, compare=False)
    waiter: Literal["user", "stream", "none"] = field(default="none", compare=False)

    @property
    def as_tuple(self) -> tuple[Any, ...]:
        """Name, bytes, group size, bytes per sample and rank stride of the collective.

        Values at the end are left out if they are defaults.
        """
        if self.rank_stride > 1:
            return astuple(self)[:5]
        if self.bytes_per_sample:
            return astuple(self)[:4]
        return (
            (self.collective_name, self.n_bytes) if self.group_size is None else astuple(self)[:3]
        )

    def has_groups_within_nodes(self, ranks_per_node: int, world_size: int) -> bool:
        """Return whether the ranks of each process group of this collective are on one node.

        Args:
            ranks_per_node: Number of ranks per node.
            world_size: Number of all ranks.
        """
        return ranks_per_node % ((self.group_size or world_size) * self.rank_stride) == 0

    def compute_ring_sent_bytes(self, world_size: int, samples: int = 0) -> float:
        """Return the bytes that a rank sends, and also receives, by a ring algorithm.

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
