"""Processes that make predictions side by side, forked from one that has imported PyTorch."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

#: Modules that all of them need.
IMPORTED = ["stratbench.workload.with_torch", "stratbench.extensions.plan.footprint.fake"]


def pool_of(n_processes: int, imported: Sequence[str] = ()) -> ProcessPoolExecutor:
    """Return a pool of processes. All pools of this process share one import of PyTorch.

    `imported`: modules that are imported once, too, if this is the first pool.

    They see no GPU: on fake tensors some of PyTorch's code would take the way of real ones. Nor do they see
    TORCH_DISTRIBUTED_DEBUG, by which PyTorch wraps process groups that fake ones are not. OSError with the
    folder's name where their semaphores cannot be made.
    """
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *imported])
    try:
        return ProcessPoolExecutor(n_processes, mp_context=context, initializer=prepare)
    except OSError as e:
        if e.filename or not e.errno:
            raise
        raise OSError(e.errno, os.strerror(e.errno), "/dev/shm") from e


def prepare() -> None:
    """Hide the GPUs from this process, and exclude imported objects from garbage collection."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.freeze()
    gc.set_threshold(100_000)
