"""How the workers of several nodes find each other: a store of rank 0's, named in their folder."""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from stratbench.cell.run_folder import RunFolder

LIMIT_S = 120


def tcp_store(folder: RunFolder, rank: int, world_size: int) -> dist.TCPStore:
    """A store on a free port of rank 0's node; the others find its address in the folder."""
    if rank == 0:
        host = os.uname().nodename
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        folder.write_endpoint(host, store.port)
        return store
    deadline = time.monotonic() + LIMIT_S
    while (endpoint := folder.read_endpoint()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 told no endpoint in {folder.path} within {LIMIT_S} s")
        time.sleep(0.05)
    return dist.TCPStore(*endpoint, world_size, wait_for_workers=False)
