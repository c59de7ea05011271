"""Rendezvous of workers on several nodes: through a store of rank 0 with its address in their folder."""

from __future__ import annotations

import os

import torch.distributed as dist

from stratbench.cell.run_folder import RunFolder

#: Maximum seconds until rank 0 listens.
LIMIT_S = 120.0


def connect_tcp_store(folder: RunFolder, rank: int, world_size: int) -> dist.TCPStore:
    """Return a store on a free port of rank 0's node.

    The others find its address in the folder.

    Args:
        folder: Run folder of the cell.
        rank: Rank of this worker.
        world_size: Number of workers.
    """
    if rank == 0:
        host = os.uname().nodename
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        folder.write_endpoint(host, store.port)
        return store
    return dist.TCPStore(*folder.wait_for_endpoint(LIMIT_S), world_size, wait_for_workers=False)
