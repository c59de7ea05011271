"""Extension `tune`: searches combinations of strategies and settings for the fastest one."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="the combinations of strategies and settings that are worth measuring",
    required_extensions=("plan", "verdict"),
    keys={"tune": "stratbench.extensions.tune.keys:Tune"},
    rule_files=("tune.smk",),
    commands="stratbench.extensions.tune.subcommand:add_subcommand",
)
