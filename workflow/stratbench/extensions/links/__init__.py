"""The extension `links`: measures latency and bandwidth of links between workers."""

from __future__ import annotations

from typing import Any

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="measured latency and bandwidth of links between workers",
    required_extensions=("servers",),
    rule_files=("links.smk",),
    commands="stratbench.extensions.links:add_subcommands",
    report_additions="stratbench.extensions.links.section:READING",
)


def add_subcommands(add_subcommand: Any) -> None:
    """Add the subcommand `links` to the command line.

    Args:
        add_subcommand: Function that adds a subcommand (`SubcommandAdder`).
    """
    from stratbench.command.subcommands import add_training_subcommand

    text = "measure latency and bandwidth between workers here, for `project`"
    add_training_subcommand(add_subcommand, "links", text)
