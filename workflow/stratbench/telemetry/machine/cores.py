"""The CPU cores of this machine that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """Return the numbers of usable cores; all if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
