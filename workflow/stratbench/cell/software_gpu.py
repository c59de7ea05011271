"""Which records and blocks are of the software GPU of `make test-gpu-path`, so that they hold no figures.

It counts kernels and runs none: times, losses and scores of it mean nothing, and nothing may rest on them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The folder of its libraries, below the Python environment whose CUDA libraries they replace.
FOLDER = "software-gpu"
#: The end of its GPUs' UUIDs: `software` in ASCII.
UUID_MARK = "-736f-667477617265"
WHY = "trained on the software GPU, which runs no kernel: none of its figures is a measurement"


def is_here() -> bool:
    """Return whether CUDA is the software GPU's in this Python environment."""
    return Path(sys.prefix, FOLDER).is_dir()


def has_trained(record: Mapping[str, Any]) -> bool:
    """Return whether a record's cell was trained on the software GPU.

    Its launcher states so, or a GPU's UUID.
    """
    if (record.get("provenance") or {}).get("software_gpu"):
        return True
    gpus = ((w.get("provenance") or {}).get("gpu") or {} for w in record.get("workers") or ())
    return any(str(gpu.get("uuid", "")).endswith(UUID_MARK) for gpu in gpus)
