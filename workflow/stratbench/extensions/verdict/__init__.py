"""The extension `verdict`: finds the fastest strategy from paired blocks of short trainings."""

from __future__ import annotations

from typing import Any

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="which strategy is fastest, by paired blocks",
    required_extensions=("audit", "plan"),
    keys={"verdict": "stratbench.extensions.verdict.keys:Verdict"},
    rule_files=("verdict_common.smk", "verdict.smk"),
    commands="stratbench.extensions.verdict:add_subcommands",
    audit_modules=("stratbench.extensions.verdict.full_runs",),
    report_additions="stratbench.extensions.verdict.reading:READING",
    plan_additions="stratbench.extensions.verdict.planning:ADDITION",
)


def add_subcommands(add: Any) -> None:
    """Add the command `stratbench verdict` to the command line.

    Args:
        add: A `SubcommandAdder`, which adds a subcommand.
    """
    from stratbench.command.subcommands import add_training_subcommand

    text = "find the fastest strategy by short blocks instead of whole trainings"
    add_training_subcommand(add, "verdict", text)
