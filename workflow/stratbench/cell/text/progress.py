"""Shows a progress bar for long operations."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any


def create_progress_bar(total: int, unit: str, description: str) -> Any:
    """Return a tqdm bar on stderr that appears after two seconds.

    If stderr is a log file, the bar is updated every 10 s. Without tqdm nothing is shown.

    Args:
        total: Number of units.
        unit: Name of a unit.
        description: Text before the bar.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(SimpleNamespace(update=lambda n: None))

    return tqdm(
        total=total,
        unit=unit,
        unit_scale=True,
        desc=description,
        delay=2,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )
