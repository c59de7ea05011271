"""The extension `plan`: predicts the memory, traffic, time and cost of each cell."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="predicted memory, traffic, time and cost of each cell",
    required_extensions=("servers",),
    keys={"cluster": "stratbench.extensions.plan.keys:PlanCluster"},
    rule_files=("plan.smk",),
    commands="stratbench.extensions.plan.subcommands:add_subcommands",
    report_additions="stratbench.extensions.plan.pages.prediction_section:READING",
)
