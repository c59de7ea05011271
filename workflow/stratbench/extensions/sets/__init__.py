"""The extension `sets`: bundles, compares and exports the results of studies (result sets)."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="result sets: one file per study, compared and exported",
    required_extensions=("audit", "explore", "paper", "plan"),
    keys={
        "top": "stratbench.extensions.sets.keys:Sets",
        "compare": "stratbench.extensions.sets.keys:Compare",
        "bundle": "stratbench.extensions.sets.keys:Bundle",
    },
    rule_files=("sets.smk",),
    commands="stratbench.extensions.sets.subcommands:add_subcommands",
)
