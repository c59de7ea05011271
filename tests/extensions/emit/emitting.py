"""Records of cells, as far as a file of `stratbench emit` depends on them. Nothing was measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.strategies import get_option_defaults

PARAMETERS = 120_000_000
#: The C allocator returns large tensors to the system when they are freed. Its reuse of memory depends on
#: threads.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144"}


def record_of(strategy: str, device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """A record as far as a file depends on it."""
    options = get_option_defaults(strategy) | changes.pop("options", {})
    s = settings(strategy, **{"options": options, **changes})
    return {
        "cell": Cell("study", "first", strategy, s.model, s.dataset, s.gpus, 0).as_dict(),
        "settings": asdict(s), "status": "ok", "reason": None,
        "provenance": {"device": device, "nodes": 1, "workers_per_node": s.gpus},
        "data": {"train_samples": 1920}, "task": {"loss_weighs": False}, "strategy": {"wrap_groups": []},
        "model": {"parameters": PARAMETERS, "trainable_parameters": PARAMETERS, "input_shape": [1, 16, 16],
                  "batchnorm": False},
    }  # fmt: skip
