"""Terminates a process when an ancestor ends, so that a killed Snakemake leaves no process behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise

#: Period in seconds at which a process checks whether its ancestors exist.
POLL_S = 0.5


def terminate_when_ancestor_ends(ancestor_pid: int) -> None:
    """Start a thread that sends this process SIGTERM once the given ancestor has ended."""
    line = list_ancestor_pids(ancestor_pid)

    def watch_ancestors() -> None:
        while (
            line
            and os.getppid() == line[0]
            and all(find_parent_pid(p) == q for p, q in pairwise(line))
        ):
            time.sleep(POLL_S)
        try:
            print(f"process {ancestor_pid}, which had started this one, has ended", flush=True)
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    threading.Thread(target=watch_ancestors, daemon=True).start()


def list_ancestor_pids(ancestor_pid: int) -> list[int]:
    """Return the ids of this process's ancestors up to `ancestor_pid`. Empty if it has ended.

    A process whose parent has ended immediately gets another parent.
    """
    line = [os.getppid()]
    while line[-1] != ancestor_pid:
        if not line[-1] or (above := find_parent_pid(line[-1])) is None:
            return []
        line.append(above)
    return line


def find_parent_pid(pid: int) -> int | None:
    """Return the id of a process's parent, or None if there is no such process."""
    import psutil  # imported here, because psutil is slow to import and few processes need it

    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None
