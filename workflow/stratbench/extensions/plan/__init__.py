"""The extension `plan`: what a cell will hold, send, take and cost."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="what a cell will hold, send, take and cost",
    needs=("servers",),
    keys={"cluster": "stratbench.extensions.plan.keys:PlanCluster"},
    rules=("plan.smk",),
    commands="stratbench.extensions.plan.subcommands:add_subcommands",
    reading="stratbench.extensions.plan.pages.prediction_section:READING",
)
