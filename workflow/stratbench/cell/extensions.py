"""Declarations of extensions' additions to the core, and access to the installed extensions.

A declaration has names ("module:attribute"), which are imported when they are used, because most jobs need
none of the code. To delete an extension, delete its folder, its name in `extensions/__init__.py` and the
extensions that need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Declaration of the additions of one extension to the core."""

    #: The purpose of the extension, in a line.
    summary: str
    #: The other extensions that this extension imports.
    required_extensions: tuple[str, ...] = ()
    #: Strategies by name: a class, or a function that returns the class for a strategy's name.
    strategies: Mapping[str, str] = field(default_factory=dict)
    #: Paths of the `Library` objects for libraries of models, by package (`workload.network.libraries`).
    libraries: Mapping[str, str] = field(default_factory=dict)
    #: Paths of the `Generator` objects for generated data sets, by source (`workload.data.kinds`).
    generators: Mapping[str, str] = field(default_factory=dict)
    #: Paths of the `FileKind` objects for data sets in files, by the key that names the files
    #: (`workload.data.kinds`).
    file_kinds: Mapping[str, str] = field(default_factory=dict)
    #: Subclasses of `cell.settings.Keys` by block of config.yaml: `experiment`, `top` (the top level), or the
    #: name of a block at the top level.
    keys: Mapping[str, str] = field(default_factory=dict)
    #: A function that returns a cell's request to the scheduler, as `study.resources.build_job_request` does,
    #: or None for cells of others.
    build_job_request: str | None = None
    #: The class that runs the extension's cells: a `train.running.runner.Runner`.
    runner_class: str | None = None
    #: The class of an activity next to a worker's training loop: a `train.beside.beside.Beside`.
    activity_class: str | None = None
    #: Files in `workflow/rules`, which add to the lists at the top of common.smk.
    rule_files: tuple[str, ...] = ()
    #: A function that adds subcommands to a `command.subcommands.SubcommandAdder`.
    commands: str | None = None
    #: Further columns of cells.csv, as tuples of arguments of `analysis.records.columns.Column`.
    columns: str | None = None
    #: A function that modifies the rows of cells.csv in place before they are written, such as their status.
    modify_cell_rows: str | None = None
    #: Modules with audit rules.
    audit_modules: tuple[str, ...] = ()
    #: Additions to decisions and the report: an `analysis.records.reading.Reading`.
    report_additions: str | None = None
    #: Additions to plans: a `plan.schedule.PlanAddition`.
    plan_additions: str | None = None


@cache
def load_extensions() -> dict[str, Extension]:
    """Return the declarations of the installed extensions by name, in the order of their list.

    Raises:
        ModuleNotFoundError: An extension needs another extension that was deleted.
    """
    # The list is imported by name, because it is in a layer above this module.
    names = import_module(".extensions", "stratbench").NAMES
    by_name = {name: import_module(f".extensions.{name}", "stratbench").EXTENSION for name in names}
    for name, extension in by_name.items():
        if lacking := set(extension.required_extensions) - by_name.keys():
            raise ModuleNotFoundError(
                f"the extension {name} needs the deleted extension {', '.join(sorted(lacking))}; restore "
                f"that extension, or delete {name} as well"
            )
    return by_name


def iter_imported_additions(point: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the imported addition of each extension that declares one for `point`.

    Args:
        point: Name of a field of `Extension`.
    """
    for name, extension in load_extensions().items():
        if declared := getattr(extension, point):
            yield name, import_attribute(declared)


def import_named_additions(point: str) -> dict[str, Any]:
    """Return imported objects by name, for a field of `Extension` that is a mapping."""
    named = (getattr(extension, point).items() for extension in load_extensions().values())
    return {key: import_attribute(name) for each in named for key, name in each}


def iter_extension_keys(block: str) -> Iterator[tuple[str, Any]]:
    """Yield each extension with keys in a block of config.yaml, and the keys' dataclass."""
    for name, extension in load_extensions().items():
        if block in extension.keys:
            yield name, import_attribute(extension.keys[block])


def list_config_blocks() -> list[str]:
    """Return the blocks of config.yaml in which extensions have keys."""
    return list(
        dict.fromkeys(p for extension in load_extensions().values() for p in extension.keys)
    )


def import_attribute(name: str) -> Any:
    """Import and return the object that "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
