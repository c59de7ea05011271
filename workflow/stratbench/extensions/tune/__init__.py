"""The extension `tune`: finds the fastest combination of a strategy, options and settings."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="the combinations of strategies and settings that are worth measuring",
    required_extensions=("plan", "verdict"),
    keys={"tune": "stratbench.extensions.tune.keys:Tune"},
    rule_files=("tune.smk",),
    commands="stratbench.extensions.tune.subcommand:add_subcommand",
)
