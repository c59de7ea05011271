"""The end of a command's process: at once, without taking apart all that was imported."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Writes what was printed, and ends the process with an exit code. To take pandas apart takes 0.1 s."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
