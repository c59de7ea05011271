"""Processes that make predictions side by side, forked from one that has imported PyTorch."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

#: What all of them need.
IMPORTED = ["stratbench.workload.with_torch", "stratbench.plan.footprint.fake"]


def pool_of(n_processes: int) -> ProcessPoolExecutor:
    """A pool of processes. All pools of this process share one import of PyTorch.

    They see no GPU: on fake tensors some of PyTorch's code would take the way of real ones.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return ProcessPoolExecutor(n_processes, mp_context=context, initializer=hide_gpus)


def hide_gpus() -> None:
    """Make CUDA find none in this process, which has not asked yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
