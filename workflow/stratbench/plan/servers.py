"""Predicts the memory of a parameter-server process, and the bytes between it and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stratbench.ps.config import ServerConfig
from stratbench.strategies import strategy_class

#: A lane over TCP has a shard's gradient and its reply in memory, and one in the wire's format.
_STREAM_SHARDS = 3


@dataclass(frozen=True)
class ServerNeeds:
    """Bytes of host memory of the largest server process of a cell, by what they are for."""

    weights: int
    optimizer: int
    snapshot: int
    buffers: int
    lanes: int

    @property
    def total_bytes(self) -> int:
        return self.weights + self.optimizer + self.snapshot + self.buffers + self.lanes


def server_needs(
    strategy: str,
    options: dict[str, Any],
    workers: int,
    flat_bytes: dict[str, int],
    moments: int,
    shared_memory: bool,
    scaled: bool = False,
) -> ServerNeeds:
    """The needs of server 0, which alone keeps BatchNorm's statistics.

    `flat_bytes`: the flat weights and buffers of a worker. The policy says how many weight-sized
    tensors it keeps, and how many of them only momentum needs; `moments`: what stands in the place of
    each (SGD without momentum 0, with it 1, AdamW 2). An epoch's end is copied to be
    written. A push that is `scaled` (fp16) may overflow: what came over TCP is held until the worker
    says that it has not. Memory that workers share with the server counts as the workers'.
    """
    own = strategy_class(strategy).Options(**options)
    part_bytes = -(-flat_bytes["weights"] // options["servers"])
    tensors = own.optimizer_buffers(workers) + (moments - 1) * own.momentum_buffers(workers)
    stream_bytes = _STREAM_SHARDS * ServerConfig.shard_bytes + flat_bytes["buffers"]
    if scaled:
        stream_bytes += part_bytes // 2 if options["wire"] == "bfloat16" else part_bytes
    return ServerNeeds(
        weights=part_bytes,
        optimizer=tensors * part_bytes,
        snapshot=part_bytes,
        # Each worker's latest, the initial ones, and their mean for the snapshot.
        buffers=(workers + 2) * flat_bytes["buffers"],
        lanes=0 if shared_memory else workers * stream_bytes,
    )


def worker_traffic_bytes(
    strategy: str, options: dict[str, Any], flat_bytes: dict[str, int], over_tcp: bool
) -> tuple[int, int]:
    """Bytes that a worker sends and receives for each of its batches.

    It sends gradients and buffers (BatchNorm's statistics) and receives weights. On the wire the
    gradients may have half the size; in shared memory they never do.
    """
    gradients_bytes = flat_bytes["weights"]
    if over_tcp and options["wire"] == "bfloat16":
        gradients_bytes //= 2
    pushes = strategy_class(strategy).Options(**options).pushes_per_ticket
    return pushes * (gradients_bytes + flat_bytes["buffers"]), pushes * flat_bytes["weights"]
