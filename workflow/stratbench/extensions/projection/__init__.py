"""The extension `projection`: projects step times to numbers of workers that were not measured."""

from __future__ import annotations

from typing import Any

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="step times on numbers of workers that were not measured",
    required_extensions=("plan", "links"),
    rule_files=("projection.smk",),
    commands="stratbench.extensions.projection:add_subcommands",
    report_additions="stratbench.extensions.projection.shown.section:READING",
    plan_additions="stratbench.extensions.projection.planning:ADDITION",
)


def add_subcommands(add: Any) -> None:
    """Add the subcommand `project` to the command line.

    Args:
        add: Adds a subcommand (`SubcommandAdder`).
    """
    from stratbench.command.subcommands import print_rule_answer_with_torch

    add(
        "project",
        print_rule_answer_with_torch,
        "project step times to more workers than were measured",
    )
