"""The server that forks processes for `multiprocessing` in a test process: it imports what all of them need.

A test process has one, and the first list of modules decides. The product has lists of its own, and a test
process has no PYTHONPATH to find them: a test that makes a plan would start a server that imports nothing.
Then each process of later tests would import PyTorch, in two seconds of CPU time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing import forkserver

import pytest

from launching import FOLDERS, WORKFLOW

#: What processes of tests run: an extension that is not there is left out.
IMPORTED = (
    *("stratbench.workload.with_torch", "pytest", "stratbench.train.worker", "ps_harness"),
    *("stratbench.extensions.plan.footprint.fake", "stratbench.extensions.links.timing"),
)


def start_with_imports() -> None:
    """Have whatever starts this process's server start one that imports `IMPORTED`."""
    server = forkserver._forkserver
    server.ensure_running = partial(_start, server.ensure_running)


def _start(start: Callable[[], None]) -> None:
    """Start the server, unless it runs."""
    with ExitStack() as stack:
        if forkserver._forkserver._forkserver_pid is None:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            # What it cannot find it leaves out without a word; before Python 3.13 it has no other path.
            patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (WORKFLOW, *FOLDERS))))
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
            forkserver.set_forkserver_preload(list(IMPORTED))
        start()
