"""Collectives: the bytes that they move between ranks, and the memory that gloo takes for them.

No torch here: if all footprints are on disk, a plan takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    sent to one rank.
    """

    kind: str
    n_bytes: int

    def wire_bytes(self, world_size: int) -> float:
        """Bytes that a rank sends (and as many that it receives) by the ring algorithms.

        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009: an all-reduce is a reduce-scatter and an all-gather. For a broadcast the mean over the
        ranks.
        """
        if self.kind == "send":
            return self.n_bytes
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (world_size - 1) / world_size * self.n_bytes

    def on_gloo(self) -> CollectiveCall:
        """What gloo sends in its place: it scatters by all-reducing the whole input."""
        if self.kind == "reduce_scatter":
            return CollectiveCall("all_reduce", self.n_bytes)
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


def wire_bytes(collectives: Iterable[tuple[str, int]], world_size: int, on_gloo: bool) -> float:
    """Bytes that a rank sends for a step's collectives, given as (kind, bytes)."""
    each = (CollectiveCall(*c) for c in collectives)
    return sum((c.on_gloo() if on_gloo else c).wire_bytes(world_size) for c in each)
