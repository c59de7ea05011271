"""The extension `emit`: writes a cell as a config file or script for the user's own trainer."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="a cell as a config or script for your own trainer",
    required_extensions=("deepspeed",),
    commands="stratbench.extensions.emit.subcommand:add_subcommand",
)
