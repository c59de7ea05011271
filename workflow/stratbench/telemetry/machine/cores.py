"""Lists the CPU cores of this machine that this process may use."""

from __future__ import annotations

import os


def list_usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may use.

    All cores are returned if this is unknown.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
