"""Connects workers on several nodes by a TCP store on rank 0's node."""

from __future__ import annotations

import os

import torch.distributed as dist

from stratbench.cell.run_folder import RunFolder

#: Longest time in seconds that the other workers wait for rank 0's address.
LIMIT_S = 120.0


def connect_tcp_store(folder: RunFolder, rank: int, world_size: int) -> dist.TCPStore:
    """Return this worker's connection to the TCP store that rank 0 runs.

    Rank 0 writes the store's address to the run folder, where the other ranks read it.

    Args:
        folder: Run folder of the cell.
        rank: Rank of this worker.
        world_size: Number of workers.
    """
    if rank == 0:
        host = os.uname().nodename
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        folder.write_node0_endpoint(host, store.port)
        return store
    return dist.TCPStore(
        *folder.wait_for_node0_endpoint(LIMIT_S), world_size, wait_for_workers=False
    )
