"""Connects workers on several nodes by a TCP store on rank 0's node, whose address is in a shared file."""

from __future__ import annotations

import os

import torch.distributed as dist

from stratbench.cell.run_folder import RunFolder

#: Maximum seconds until rank 0 listens.
LIMIT_S = 120.0


def connect_tcp_store(folder: RunFolder, rank: int, world_size: int) -> dist.TCPStore:
    """Return a TCP store of rank 0, whose address is in the run folder.

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
