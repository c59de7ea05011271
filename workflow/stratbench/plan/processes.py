"""Processes that make predictions side by side, forked from one that has imported PyTorch."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

#: What all of them need, and what every optimizer's constructor would import, for 1.5 s of each.
IMPORTED = ["stratbench.plan.fake", "torch._dynamo"]


def pool_of(n_processes: int) -> ProcessPoolExecutor:
    """A pool of processes. All pools of this process share one import of PyTorch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return ProcessPoolExecutor(n_processes, mp_context=context)
