"""Predicts the memory of a parameter server, and the bytes between server and workers."""

from __future__ import annotations

from collections.abc import Mapping

from stratbench.cell.settings import Settings
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.strategy import find_node_of_server
from stratbench.strategies import get_strategy_class

#: Number of buffers per worker's TCP connection, each of a shard's size: one for a gradient, one for its
#: reply, and one in the format that is sent.
_STREAM_SHARDS = 3


def predict_server_bytes_by_purpose(
    s: Settings, flat_bytes: Mapping[str, int], n_nodes: int
) -> dict[str, int]:
    """Return the host memory of the first parameter server in bytes, by purpose.

    Server 0 is the largest, since it alone has BatchNorm's statistics. The policy has a number of
    weight-sized tensors, some of which only momentum needs. Each of these exists once per moment of the
    optimizer: none for SGD without momentum, one with it, two for AdamW. The end of an epoch is copied to
    be written. A push in fp16 may overflow, so that data over TCP are stored until the worker confirms.
    Memory that workers share with the server counts as the workers'.

    Args:
        s: Settings of the cell.
        flat_bytes: Flat weights and buffers of a worker.
        n_nodes: Number of nodes.
    """
    own, workers = get_strategy_class(s.strategy).Options(**s.options), s.gpus
    moments = 2 if s.optimizer == "adamw" else int(s.momentum > 0)
    part_bytes = -(-flat_bytes["weights"] // s.options["servers"])
    tensors = own.optimizer_buffers(workers) + (moments - 1) * own.momentum_buffers(workers)
    stream_bytes = _STREAM_SHARDS * ServerConfig.shard_bytes + flat_bytes["buffers"]
    if s.precision == "fp16":
        stream_bytes += part_bytes // 2 if s.options["wire"] == "bfloat16" else part_bytes
    shares_memory = s.options["transport"] != "tcp" and n_nodes == 1 and not s.workers_are_jobs
    return {
        "weights": part_bytes,
        "optimizer": tensors * part_bytes,
        "snapshot": part_bytes,
        # BatchNorm's statistics: those of each worker's last push, the initial ones, and their mean in a
        # snapshot.
        "buffers": (workers + 2) * flat_bytes["buffers"],
        "lanes": 0 if shares_memory else workers * stream_bytes,
    }


def compute_worker_sent_and_received_bytes(
    s: Settings, flat_bytes: Mapping[str, int], between_nodes: bool = False
) -> tuple[int, int]:
    """Return the bytes that a worker sends and receives per batch.

    A worker sends gradients and buffers (BatchNorm's statistics), and receives weights. On the wire the
    gradients may have half the size, in shared memory they never do.

    Args:
        s: Settings of the cell.
        flat_bytes: Flat weights and buffers of a worker.
        between_nodes: Whether all traffic is on the wire.
    """
    gradients_bytes = flat_bytes["weights"]
    over_tcp = between_nodes or s.options["transport"] == "tcp"
    if over_tcp and s.options["wire"] == "bfloat16":
        gradients_bytes //= 2
    pushes = get_strategy_class(s.strategy).Options(**s.options).pushes_per_ticket
    return pushes * (gradients_bytes + flat_bytes["buffers"]), pushes * flat_bytes["weights"]


def compute_busiest_link_bytes(s: Settings, flat_bytes: Mapping[str, int], n_nodes: int) -> float:
    """Return the one-way bytes per global batch over the busiest node's link.

    A node with w of all W workers may serve a fraction p of the weights P (bytes). Its link then carries w
    (1 - p) P for its workers and (W - w) p P for its servers, each way. Buffers go to server 0 only. With
    one machine per worker it is (W - 1) P at a single server. With a server on each worker's node it is 2
    (W - 1) / W P at every node (Jiang et al., BytePS, OSDI 2020).

    Args:
        s: Settings of the cell.
        flat_bytes: Flat weights and buffers of a worker.
        n_nodes: Number of nodes.
    """
    workers, servers = s.gpus, s.options["servers"]
    a_node = -(-workers // n_nodes)
    sent, received = compute_worker_sent_and_received_bytes(s, flat_bytes, between_nodes=True)
    pushes = get_strategy_class(s.strategy).Options(**s.options).pushes_per_ticket
    buffers = pushes * flat_bytes["buffers"]
    busiest = 0.0
    for node in range(n_nodes):
        here = min(a_node, workers - node * a_node)
        served = sum(find_node_of_server(s, k, n_nodes) == node for k in range(servers)) / servers
        first = find_node_of_server(s, 0, n_nodes) == node
        pushed, pulled = sent - buffers, received
        out = here * ((1 - served) * pushed + (not first) * buffers)
        out += (workers - here) * served * pulled
        back = here * (1 - served) * pulled
        back += (workers - here) * (served * pushed + first * buffers)
        busiest = max(busiest, out, back)
    return busiest
