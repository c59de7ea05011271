"""The extension `checkpoints`: cells that resume after a kill."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="cells that resume after a kill",
    keys={"experiment": "stratbench.train.restarts.keys:Checkpoints"},
    runner="stratbench.train.restarts.runner:RestartRunner",
    beside="stratbench.train.restarts.keeping:CheckpointWriter",
)
