"""The extension `plan`: predicts the memory, traffic, time and cost of each cell."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="predicted memory, traffic, time and cost of each cell",
    needs=("servers",),
    keys={"cluster": "stratbench.extensions.plan.keys:PlanCluster"},
    rules=("plan.smk",),
    commands="stratbench.extensions.plan.subcommands:add_subcommands",
    reading="stratbench.extensions.plan.pages.prediction_section:READING",
)
