"""The extension `emit`: a cell as a file for a trainer of the user's own."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="a cell as a file for a trainer of the user's own",
    needs=("deepspeed",),
    commands="stratbench.extensions.emit.subcommand:add_subcommand",
)
