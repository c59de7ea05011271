"""Collectives: the bytes that they move between ranks, and the memory that gloo takes for them.

No torch here: if all footprints are on disk, a plan takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

#: What memory is for. The first six exist between the steps; the rest come and go within one.
PARTS = (
    "parameters", "gradients", "optimizer", "buffers", "buckets", "data",
    "gathered", "communication", "staging", "scratch", "activations", "temporaries",
)  # fmt: skip
#: Scratch of gloo's ring all-reduce: two segments of 1 MiB.
GLOO_SEGMENTS_BYTES = 2 << 20


@dataclass(frozen=True)
class CollectiveCall:
    """One collective operation: its kind, and the bytes of the tensor that all ranks share.

    `n_bytes` is the whole tensor: what is reduced, broadcast, gathered (output), scattered (input), or
    sent to one rank. `ranks`: how many take part, where that is not all; None: all.
    """

    kind: str
    n_bytes: int
    ranks: int | None = None

    @property
    def listed(self) -> tuple[Any, ...]:
        """Kind and bytes, and the ranks where they are not all."""
        return (self.kind, self.n_bytes) if self.ranks is None else astuple(self)

    def wire_bytes(self, world_size: int) -> float:
        """Bytes that a rank sends (and as many that it receives) by the ring algorithms.

        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009: an all-reduce is a reduce-scatter and an all-gather. For a broadcast the mean over the
        ranks.
        """
        if self.kind == "send":
            return self.n_bytes
        rounds, ranks = 2 if self.kind == "all_reduce" else 1, self.ranks or world_size
        return rounds * (ranks - 1) / ranks * self.n_bytes

    def on_gloo(self) -> CollectiveCall:
        """What gloo sends in its place: it scatters by all-reducing the whole input."""
        if self.kind == "reduce_scatter":
            return replace(self, kind="all_reduce")
        return self

    def staging_bytes(self) -> int:
        """What gloo allocates meanwhile.

        It gathers into a flat tensor of its own and copies that; it scatters from a copy of the whole
        input.
        """
        segments_bytes = min(GLOO_SEGMENTS_BYTES, self.n_bytes)
        match self.kind:
            case "all_reduce":
                return segments_bytes
            case "all_gather":
                return self.n_bytes
            case "reduce_scatter":
                return self.n_bytes + segments_bytes
        return 0


def wire_bytes(collectives: Iterable[Sequence[Any]], world_size: int, on_gloo: bool) -> float:
    """Bytes that a rank sends for a step's collectives, given as `CollectiveCall.listed`."""
    each = (CollectiveCall(*c) for c in collectives)
    return sum((c.on_gloo() if on_gloo else c).wire_bytes(world_size) for c in each)
