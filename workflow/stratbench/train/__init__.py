"""The wing that trains: launches a cell's processes, times the training, classifies the end."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

#: What is deleted with an extension: runners (`running.runner`), and what happens beside the loop
#: (`beside.beside`). They are named from here, and imported when they are used.
RUNNERS = (
    ".commands.runner:CommandRunner",
    ".elastic.runner:ElasticRunner",
    ".restarts.runner:RestartRunner",
)
BESIDES = (".restarts.keeping:Keeper", ".beside.profile:Profile")


def find_taking(names: tuple[str, ...], asked: Any) -> Iterator[type[Any]]:
    """Yield the classes of these names that take what is asked."""
    for name in names:
        module, _, attribute = name.partition(":")
        found = getattr(import_module(module, __name__), attribute)
        if found.takes(asked):
            yield found
