"""Measures the time of collectives, and of concurrent computation, in every rank of a process group."""

from __future__ import annotations

import math
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stratbench.extensions.links.collective_cost import CollectiveTime

SMALLEST_BYTES = 1 << 10
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")
#: Maximum number of calls of a collective that are timed together, since one small call is too short for the
#: clock's resolution.
MAX_CALLS = 20
#: Bytes of all calls that are timed together, if there are several.
CALLS_BYTES = 8 << 20
#: Number of rows and of columns of the matrices whose products run during a collective.
MATRIX = 256
#: Times of all collectives, and the factor by which a collective slows computation.
MeasuredLinks = tuple[list[CollectiveTime], float]


@dataclass(frozen=True)
class Sweep:
    """Measurements to make: worker counts, maximum tensor size, rounds, and kinds of collectives."""

    workers: tuple[int, ...]
    largest_bytes: int
    repeats: int
    collective_kinds: tuple[str, ...] = KINDS

    def list_tensor_sizes_bytes(self) -> list[int]:
        """Return the sizes of the tensors to exchange, in bytes.

        The sizes go from 1 KiB in factors of four up to the largest.
        """
        steps = range(math.ceil(math.log(self.largest_bytes / SMALLEST_BYTES, 4)))
        return [*(SMALLEST_BYTES << 2 * i for i in steps), self.largest_bytes]


def measure_collectives(sweep: Sweep, device: torch.device) -> MeasuredLinks:
    """Return the times of all collectives on the slowest rank, and computation's slowdown.

    Every rank of the process group calls this function.
    """
    rank, library = dist.get_rank(), dist.get_backend()
    nodes: list[str] = [""] * dist.get_world_size()
    # SLURM may run several of its nodes on one host. The name of the SLURM node therefore comes before the
    # host's.
    dist.all_gather_object(nodes, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    groups = {ranks: dist.new_group(list(ranks)) for ranks in _list_timed_rank_groups(sweep, nodes)}
    cells = [
        (k, ranks, size)
        for k in sweep.collective_kinds
        for ranks in groups
        for size in sweep.list_tensor_sizes_bytes()
    ]
    times: list[CollectiveTime] = []
    for number in range(-1, sweep.repeats):  # round -1 connects and warms up; its times are dropped
        if rank == 0 and number >= 0:
            print(f"collectives: round {number + 1} of {sweep.repeats}", flush=True)
        order = random.Random(number).sample(cells, len(cells))
        for kind, ranks, size in order:
            if rank not in ranks:
                continue
            took_s = _measure_collective_s(kind, ranks, size, groups[ranks], device)
            slowest = torch.tensor([took_s], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=groups[ranks])
            if number >= 0:
                passed = (ranks[0], ranks[-1]) if kind == "send" else ranks
                n_nodes = len({nodes[r] for r in passed})
                times.append(
                    CollectiveTime(library, kind, len(ranks), n_nodes, size, number, slowest.item())
                )
    return times, measure_compute_slowdown_factor(
        sweep, groups[tuple(range(max(sweep.workers)))], device
    )


def _list_timed_rank_groups(sweep: Sweep, node_names: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the groups of ranks in which collectives are timed.

    Args:
        sweep: The measurements to make.
        node_names: Name of the node of each rank.
    """
    groups = [tuple(range(n)) for n in sweep.workers]
    firsts = tuple(node_names.index(node) for node in dict.fromkeys(node_names))
    return list(dict.fromkeys([*groups, *([firsts] if len(firsts) > 1 else [])]))


def _measure_collective_s(
    kind: str, ranks: Sequence[int], n_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Return the seconds of one call of a collective, on this rank.

    `n_bytes` is the size of the full tensor, as in CollectiveCall.
    """
    call = _make_collective_call(kind, ranks, n_bytes, group, device)
    calls = max(1, min(MAX_CALLS, CALLS_BYTES // n_bytes))
    dist.barrier(group=group)
    _synchronise_device(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronise_device(device)
    took_s = (time.perf_counter() - began) / calls
    return took_s / 2 if kind == "send" else took_s


def _make_collective_call(
    kind: str, ranks: Sequence[int], n_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    n = len(ranks)
    # As in sharding, the tensor's length is rounded up to a multiple of the number of ranks.
    numbers = -(-n_bytes // 4 // n) * n
    whole = torch.zeros(numbers, device=device)
    part = torch.zeros(numbers // n, device=device)
    # PyTorch 2.13 renamed both collectives.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: gather(whole, part, group=group)
        case "reduce_scatter":
            return lambda: scatter(part, whole, group=group)
        case "broadcast":
            return lambda: dist.broadcast(whole, 0, group=group)
        case "send":
            return lambda: _send_to_last_rank_and_back(whole, ranks[-1], group)
    raise ValueError(f"unknown kind of collective {kind!r}, expected one of {', '.join(KINDS)}")


def _send_to_last_rank_and_back(tensor: Tensor, last_rank: int, group: dist.ProcessGroup) -> None:
    """Send a tensor from rank 0 to the last rank and back.

    No other rank takes part.
    """
    rank = dist.get_rank()
    if rank == 0:
        dist.send(tensor, last_rank, group=group)
        dist.recv(tensor, last_rank, group=group)
    elif rank == last_rank:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)


def _synchronise_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_compute_slowdown_factor(
    sweep: Sweep, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Return the slowdown factor of matrix products during an all-reduce of the largest tensor.

    The factor is the median over rounds. On a GPU the products are queued after the start of the collective,
    on separate streams.

    Args:
        sweep: The measurements to make.
        group: The process group.
        device: Device of the products.
    """
    if dist.get_rank() >= max(sweep.workers):
        return math.nan
    matrix = torch.ones(MATRIX, MATRIX, device=device)
    tensor = torch.ones(sweep.largest_bytes // 4, device=device)

    def multiply_matrices(num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(matrix, matrix)

    ratios = []
    for _ in range(sweep.repeats + 1):
        dist.barrier(group=group)
        _synchronise_device(device)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _synchronise_device(device)
        collective_s = time.perf_counter() - began
        count = 1
        while (
            alone_s := _measure_matrix_product_s(multiply_matrices, count, device)
        ) < collective_s / 4:
            count *= 2
        counts = torch.tensor([count], device=device)
        # All ranks compute the smallest number of products, so that none computes longer than the collective
        # runs.
        dist.all_reduce(counts, dist.ReduceOp.MIN, group=group)
        count = int(counts.item())
        alone_s = _measure_matrix_product_s(multiply_matrices, count, device)
        dist.barrier(group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        ratios.append(
            _measure_matrix_product_s(multiply_matrices, count, device, work.is_completed) / alone_s
        )
        work.wait()
        _synchronise_device(device)
    ratios = [r for r in ratios[1:] if math.isfinite(r)]
    return max(1.0, statistics.median_high(ratios)) if ratios else math.nan


def _measure_matrix_product_s(
    multiply: Callable[[int], None],
    num_products: int,
    device: torch.device,
    has_collective_ended: Callable[[], bool] = lambda: False,
) -> float:
    """Return the seconds of matrix products, or NaN if a concurrent collective ended earlier.

    Args:
        multiply: Computes a number of matrix products.
        num_products: Number of products.
        device: Device of the products.
        has_collective_ended: Returns whether the concurrent collective has ended.
    """
    began = time.perf_counter()
    multiply(num_products)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    took_s = time.perf_counter() - began
    return math.nan if has_collective_ended() else took_s
