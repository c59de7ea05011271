"""The extension `checkpoints`: cells that resume their training after they were killed."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="cells that resume after a kill",
    keys={"experiment": "stratbench.extensions.checkpoints.keys:Checkpoints"},
    runner_class="stratbench.extensions.checkpoints.runner:RestartRunner",
    activity_class="stratbench.extensions.checkpoints.keeping:CheckpointWriter",
    columns="stratbench.extensions.checkpoints.columns:COLUMNS",
)
