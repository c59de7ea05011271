"""The extension `links`: how fast links between workers are, measured."""

from __future__ import annotations

from typing import Any

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="how fast links between workers are, measured",
    needs=("servers",),
    rules=("links.smk",),
    commands="stratbench.extensions.links:add_subcommands",
    reading="stratbench.extensions.links.section:READING",
)


def add_subcommands(add: Any) -> None:
    """Add `links`; `add`: an `Adder`."""
    from stratbench.command.subcommands import add_training

    text = "measure what the exchange between workers costs here, for `project`"
    add_training(add, "links", text)
