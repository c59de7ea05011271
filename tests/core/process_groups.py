"""Processes that tests fork, among them process groups on gloo of 1, 2 and 4, which run a file's function."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launching import LIMIT_S

WORLDS = (1, 2, 4)


def forking() -> ForkServerContext:
    """Of `multiprocessing`, a context whose processes have imported PyTorch and all strategies."""
    return multiprocessing.get_context("forkserver")


def found_by_groups(
    work: Callable[[int, int], dict[str, Any]], folder: Path
) -> dict[int, dict[str, Any]]:
    """What `work(world, rank)` returned to rank 0 of each group, by the group's size.

    `work` is a function of a module. The largest group comes first, and the others are of its
    processes. Where all takes longer than `LIMIT_S`, they are killed and the test fails.
    """
    context = forking()
    group = [
        context.Process(target=_member, args=(work, rank, str(folder)), daemon=True)
        for rank in range(max(WORLDS))
    ]
    for process in group:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in group:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in group]
    for process in group:
        process.kill()
    assert codes == [0] * len(group), codes
    return {w: torch.load(folder / f"found{w}.pt", weights_only=True) for w in WORLDS}


def _member(work: Callable[[int, int], dict[str, Any]], rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world in sorted(WORLDS, reverse=True):
        if rank >= world:
            break
        store = dist.FileStore(f"{folder}/store{world}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        found = work(world, rank)
        if rank == 0:
            torch.save(found, f"{folder}/found{world}.pt")
        dist.barrier()
        dist.destroy_process_group()
