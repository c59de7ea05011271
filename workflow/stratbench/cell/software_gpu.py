"""Detects results of the software GPU (`make test-gpu-path`), which runs no kernels and measures nothing.

The software GPU counts kernels and runs none, so its times, losses and scores have no meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Folder in a Python environment with the libraries of the software GPU, which replace CUDA's.
FOLDER = "software-gpu"
#: The end of the UUIDs of software GPUs: `software` in ASCII.
UUID_MARK = "-736f-667477617265"
WHY = "trained on the software GPU, which runs no kernel: none of its figures is a measurement"


def is_software_gpu_installed() -> bool:
    """Return whether the software GPU replaces CUDA in this Python environment."""
    return Path(sys.prefix, FOLDER).is_dir()


def was_trained_on_software_gpu(record: Mapping[str, Any]) -> bool:
    """Return whether the cell of a record was trained on the software GPU."""
    if (record.get("provenance") or {}).get("software_gpu"):
        return True
    gpus = ((w.get("provenance") or {}).get("gpu") or {} for w in record.get("workers") or ())
    return any(str(gpu.get("uuid", "")).endswith(UUID_MARK) for gpu in gpus)
