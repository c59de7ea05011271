"""Declarations of what extensions add to the core, and the installed extensions.

A declaration holds names ("module:attribute"), which are resolved when they are used: every job reads all
declarations, and most need none of the code. To delete an extension, delete its folder and its name in
`extensions/__init__.py`, with the extensions that need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Declaration of what one extension adds to the core."""

    #: Its purpose, in a line.
    says: str
    #: The extensions that it imports.
    needs: tuple[str, ...] = ()
    #: Strategies by name: the class, or a function that makes the class of the name.
    strategies: Mapping[str, str] = field(default_factory=dict)
    #: Libraries of models by their packages: `workload.network.libraries.Library`.
    libraries: Mapping[str, str] = field(default_factory=dict)
    #: Sources of generated data sets: `workload.data.kinds.Generator`.
    generators: Mapping[str, str] = field(default_factory=dict)
    #: Data sets in files, by the key that names these: `workload.data.kinds.FileKind`.
    file_kinds: Mapping[str, str] = field(default_factory=dict)
    #: Classes of `cell.settings.Keys` by their place in config.yaml: `experiment`, `top`, or the name of a
    #: block of the top level.
    keys: Mapping[str, str] = field(default_factory=dict)
    #: What its cells ask a scheduler for: as `study.resources.job_request`, but None for other cells.
    request: str | None = None
    #: Who runs its cells: a `train.running.runner.Runner`.
    runner: str | None = None
    #: Activity next to the loop of a worker: a `train.beside.beside.Beside`.
    beside: str | None = None
    #: Files of `workflow/rules`; they add to the lists at the top of common.smk.
    rules: tuple[str, ...] = ()
    #: A function that adds subcommands, given a `command.subcommands.Adder`.
    commands: str | None = None
    #: Further columns of cells.csv: tuples of the arguments of an `analysis.records.columns.Column`.
    columns: str | None = None
    #: What changes rows of cells.csv before they are written, such as one status by another.
    judge: str | None = None
    #: Modules with rules of the audit.
    audited: tuple[str, ...] = ()
    #: Additions to decisions and the report: an `analysis.records.reading.Reading`.
    reading: str | None = None
    #: What it adds to plans: a `plan.schedule.PlanAddition`.
    plans: str | None = None


@cache
def installed() -> dict[str, Extension]:
    """Return the extensions that are there, in their order.

    Raises:
        ModuleNotFoundError: For one that needs an extension that was deleted.
    """
    # By name, because the list is in a layer above this module.
    names = import_module(".extensions", "stratbench").NAMES
    by_name = {name: import_module(f".extensions.{name}", "stratbench").EXTENSION for name in names}
    for name, extension in by_name.items():
        if lacking := set(extension.needs) - by_name.keys():
            raise ModuleNotFoundError(
                f"the extension {name} needs {', '.join(sorted(lacking))}, which was deleted; delete both"
            )
    return by_name


def at(point: str) -> Iterator[tuple[str, Any]]:
    """Yield each extension with a name at a point, and the object of that name."""
    for name, extension in installed().items():
        if declared := getattr(extension, point):
            yield name, resolve(declared)


def resolve_all(point: str) -> dict[str, Any]:
    """Return the objects that extensions name at a point with names of its own."""
    named = (getattr(extension, point).items() for extension in installed().values())
    return {key: resolve(name) for each in named for key, name in each}


def keys_of(block: str) -> Iterator[tuple[str, Any]]:
    """Yield each extension with keys in a block of config.yaml, and their dataclass."""
    for name, extension in installed().items():
        if block in extension.keys:
            yield name, resolve(extension.keys[block])


def places() -> list[str]:
    """Return the blocks of config.yaml in which extensions have keys."""
    return list(dict.fromkeys(p for extension in installed().values() for p in extension.keys))


def resolve(name: str) -> Any:
    """Return the object that "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
