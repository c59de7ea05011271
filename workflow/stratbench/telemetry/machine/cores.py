"""Which CPU cores of this machine this process may use."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """Return numbers of the cores that this process may run on.

    All cores if the system does not say.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
