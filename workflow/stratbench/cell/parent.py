"""Ends a process together with one above it, so that a killed Snakemake leaves nothing behind that works."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise

#: Period in seconds at which a process checks whether those above it live.
POLL_S = 0.5


def end_with(ancestor: int) -> None:
    """Send this process SIGTERM as soon as process `ancestor`, which it descends from, has ended."""
    line = list_ancestors(ancestor)

    def watch() -> None:
        while (
            line and os.getppid() == line[0] and all(find_parent(p) == q for p, q in pairwise(line))
        ):
            time.sleep(POLL_S)
        try:
            print(f"process {ancestor}, which had started this one, has ended", flush=True)
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def list_ancestors(ancestor: int) -> list[int | None]:
    """Return the processes from the parent of this one up to `ancestor`.

    None where that has ended.

    A process whose parent has ended has another one at once.
    """
    line = [os.getppid()]
    while line[-1] != ancestor:
        if not line[-1] or (above := find_parent(line[-1])) is None:
            return []
        line.append(above)
    return line


def find_parent(pid: int) -> int | None:
    """Return the parent of a process, or None where there is no such process."""
    import psutil  # takes as long as all of Python's start, and few need it

    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None
