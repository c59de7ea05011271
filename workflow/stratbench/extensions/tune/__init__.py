"""Extension `tune`: searches combinations of strategies and settings for the fastest one."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="the combinations of strategies and settings that are worth measuring",
    needs=("plan", "verdict"),
    keys={"tune": "stratbench.extensions.tune.keys:Tune"},
    rules=("tune.smk",),
    commands="stratbench.extensions.tune.subcommand:add_subcommand",
)
