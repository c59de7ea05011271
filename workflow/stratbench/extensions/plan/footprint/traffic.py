"""Computes the bytes that collectives move between ranks, and the memory that gloo needs.

The module does not import torch: if all footprints are on disk, a plan takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stratbench.telemetry.collectives import CollectiveCall

#: Purposes of memory. The first seven exist between steps, and the others only during a step.
PARTS = (
    "parameters", "gradients", "optimizer", "buffers", "buckets", "data", "received",
    "gathered", "communication", "staging", "scratch", "activations", "temporaries",
)  # fmt: skip
#: Scratch memory of gloo's ring all-reduce: two segments of 1 MiB.
GLOO_SEGMENTS_BYTES = 2 << 20


def compute_gloo_staging_bytes(call: CollectiveCall) -> int:
    """Return the bytes of temporary memory that gloo needs for a collective.

    Gloo gathers into a flat tensor, which is then copied. It scatters from a copy of the whole input.
    """
    segments_bytes = min(GLOO_SEGMENTS_BYTES, call.n_bytes)
    match call.collective_name:
        case "all_reduce":
            return segments_bytes
        case "all_gather":
            return call.n_bytes
        case "reduce_scatter":
            return call.n_bytes + segments_bytes
    return 0


def compute_wire_bytes(
    collectives: Iterable[Sequence[Any]],
    world_size: int,
    on_gloo: bool,
    samples: int = 0,
    ranks_per_node: int | None = None,
) -> float:
    """Return the bytes that a rank sends in the collectives of a step.

    Gloo scatters by an all-reduce.

    Args:
        collectives: As in `CollectiveCall.as_tuple`.
        world_size: Number of ranks.
        on_gloo: Whether the backend is gloo.
        samples: Samples that a worker computes in the step.
        ranks_per_node: Number of ranks of a node, to count only groups within a node; None for all groups.
    """
    in_place = {"reduce_scatter": "all_reduce"} if on_gloo else {}
    each = (CollectiveCall(in_place.get(kind, kind), *rest) for kind, *rest in collectives)
    return sum(
        call.compute_ring_sent_bytes(world_size, samples)
        for call in each
        if ranks_per_node is None or call.has_groups_within_nodes(ranks_per_node, world_size)
    )
