"""Makes processes for concurrent predictions, forked from one that has imported PyTorch."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

#: Modules that all these processes need.
IMPORTED = ["stratbench.workload.with_torch", "stratbench.extensions.plan.footprint.fake"]


def make_pool(n_processes: int, imported: Sequence[str] = ()) -> ProcessPoolExecutor:
    """Return a pool of processes; all pools of this process share one import of PyTorch.

    The processes see no GPU, since some of PyTorch's code treats fake tensors as real ones if a GPU is
    visible. They do not see TORCH_DISTRIBUTED_DEBUG either, with which PyTorch wraps process groups in a
    way that fake ones do not support.

    Args:
        n_processes: Number of processes.
        imported: Further modules to import once, if this is the first pool.

    Raises:
        OSError: If their semaphores cannot be made; it has the folder's name.
    """
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *imported])
    try:
        return ProcessPoolExecutor(n_processes, mp_context=context, initializer=prepare_process)
    except OSError as e:
        if e.filename or not e.errno:
            raise
        raise OSError(e.errno, os.strerror(e.errno), "/dev/shm") from e


def prepare_process() -> None:
    """Hide the GPUs from this process, and exclude imported objects from garbage collection."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.freeze()
    gc.set_threshold(100_000)
