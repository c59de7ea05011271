"""Runs processes that measure together on this machine. If one fails, the others are ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from typing import Any

TIMEOUT_S = 1800.0


def run_calls_in_processes(calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Run each function with its arguments in a process of its own.

    The caller waits until all processes have ended.

    Raises:
        RuntimeError: If a process fails, after the others were ended.
    """
    context = make_forkserver_context()
    processes = [context.Process(target=function, args=args) for function, args in calls]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            process.start()
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):
                break
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], 1.0)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if codes := [p.exitcode for p in processes if p.exitcode]:
        raise RuntimeError(
            f"a measuring process ended with exit code {codes[0]}; its output above says why"
        )


def make_forkserver_context() -> ForkServerContext:
    """Return a `multiprocessing` context whose processes have imported the modules they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["stratbench.extensions.links.timing", "stratbench.extensions.servers.ps.server"]
    )
    return context
