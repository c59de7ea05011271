"""The server that forks processes for `multiprocessing` in a test process: it imports what all of them need.

It is one for a test process, and imports what the first list names. The product has lists of its own: a test
that makes a plan would start a server for plans, whose processes for other tests import PyTorch anew.
"""

from __future__ import annotations

import os
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


def _start(start: partial[None]) -> None:
    """Start the server, unless it runs, and only then."""
    with pytest.MonkeyPatch.context() as patch:
        # What it cannot find it leaves out without a word, and before Python 3.13 it has no other path.
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (WORKFLOW, *FOLDERS))))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        forkserver.set_forkserver_preload(list(IMPORTED))
        start()
