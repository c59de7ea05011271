"""Makes processes for concurrent predictions, forked from one that has imported PyTorch."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

#: Modules that are imported once for all processes of the pools.
IMPORTED = ["stratbench.workload.with_torch", "stratbench.extensions.plan.footprint.fake"]


def make_process_pool(n_processes: int, further_modules: Sequence[str] = ()) -> ProcessPoolExecutor:
    """Return a pool of processes that are forked from one that has imported PyTorch.

    All pools of this process share that import. The processes see no GPU, since some of PyTorch's code treats
    fake tensors as real ones if a GPU is visible. They do not see TORCH_DISTRIBUTED_DEBUG either, with which
    PyTorch wraps process groups in a way that fake ones do not support.

    Args:
        n_processes: Number of processes.
        further_modules: Further modules to import once, if this is the first pool.

    Raises:
        OSError: If their semaphores cannot be made; it has the folder's name.
    """
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *further_modules])
    try:
        return ProcessPoolExecutor(
            n_processes, mp_context=context, initializer=prepare_pool_process
        )
    except OSError as e:
        if e.filename or not e.errno:
            raise
        raise OSError(e.errno, os.strerror(e.errno), "/dev/shm") from e


def prepare_pool_process() -> None:
    """Hide the GPUs from this process, and keep imported objects out of garbage collection."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.freeze()
    gc.set_threshold(100_000)
