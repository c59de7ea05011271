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

#: Name of a Python object with its module, such as `stratbench.strategies.pairs:Pairs`.
ImportPath = str


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Declaration of the additions of one extension to the core."""

    #: One line on the purpose of the extension.
    summary: str
    #: Names of the other extensions that this extension imports.
    required_extensions: tuple[str, ...] = ()
    #: Import path (`module:attribute`) of each strategy's class, by the strategy's name. A path may also name
    #: a function that returns the class for a strategy's name.
    strategies: Mapping[str, ImportPath] = field(default_factory=dict)
    #: Import paths of `workload.network.libraries.Library` objects, by the package that has the models.
    libraries: Mapping[str, ImportPath] = field(default_factory=dict)
    #: Import paths of `workload.data.kinds.Generator` objects, by the value of a data set's key `source`.
    generators: Mapping[str, ImportPath] = field(default_factory=dict)
    #: Kinds of data files: the import path of each `workload.data.kinds.FileKind` object, by the data set's
    #: key that names such files.
    file_kinds: Mapping[str, ImportPath] = field(default_factory=dict)
    #: Import paths of subclasses of `cell.settings.Keys`, by the block of config.yaml that has the keys. The
    #: block is `experiment`, `top` (the top level), or a block at the top level.
    keys: Mapping[str, ImportPath] = field(default_factory=dict)
    #: Import path of a function that replaces `study.resources.build_job_request` for the extension's cells.
    #: It returns None for other cells.
    build_job_request: ImportPath | None = None
    #: Import path of the class that runs the extension's cells: a `train.running.runner.Runner`.
    runner_class: ImportPath | None = None
    #: Import path of the class of an activity next to a worker's training loop: a
    #: `train.beside.beside.Beside`.
    activity_class: ImportPath | None = None
    #: Names of Snakemake files in `workflow/rules`. The files add to the lists at the top of common.smk.
    rule_files: tuple[str, ...] = ()
    #: Import path of a function that adds subcommands of `stratbench` to a
    #: `command.subcommands.SubcommandAdder`.
    commands: ImportPath | None = None
    #: Import path of further columns of cells.csv: tuples of arguments of `analysis.records.columns.Column`.
    columns: ImportPath | None = None
    #: Import path of a function that modifies rows of cells.csv in place before they are written. It may
    #: change a cell's status, for example.
    modify_cell_rows: ImportPath | None = None
    #: Names of Python modules that define audit rules.
    audit_modules: tuple[str, ...] = ()
    #: Import path of additions to decisions and to the report: an `analysis.records.reading.Reading`.
    report_additions: ImportPath | None = None
    #: Import path of additions to plans: a `plan.schedule.PlanAddition`.
    plan_additions: ImportPath | None = None


@cache
def load_extensions() -> dict[str, Extension]:
    """Return the declarations of the installed extensions by name, in the order of their list.

    Raises:
        ModuleNotFoundError: An extension needs another extension that was deleted.
    """
    # The package `extensions` is in a layer above this module, so an import statement is not allowed here.
    names = import_module(".extensions", "stratbench").NAMES
    by_name = {name: import_module(f".extensions.{name}", "stratbench").EXTENSION for name in names}
    for name, extension in by_name.items():
        if missing := ", ".join(sorted(set(extension.required_extensions) - by_name.keys())):
            raise ModuleNotFoundError(
                f"the extension {name} needs the deleted extension {missing}; restore {missing}, or delete "
                f"{name} as well"
            )
    return by_name


def iter_imported_additions(field_name: str) -> Iterator[tuple[str, Any]]:
    """Yield each extension's name and the object that one field of `Extension` declares.

    The objects are imported. Extensions that leave the field empty are skipped.

    Args:
        field_name: Name of the field of `Extension`.
    """
    for name, extension in load_extensions().items():
        if import_path := getattr(extension, field_name):
            yield name, import_attribute(import_path)


def import_named_additions(field_name: str) -> dict[str, Any]:
    """Import the objects that all extensions declare in one mapping field of `Extension`.

    The objects are returned by their names in the mapping.
    """
    mappings = (getattr(extension, field_name) for extension in load_extensions().values())
    return {name: import_attribute(path) for mapping in mappings for name, path in mapping.items()}


def iter_extension_keys(block_name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and `Keys` class of each extension with keys in a config block."""
    for name, extension in load_extensions().items():
        if block_name in extension.keys:
            yield name, import_attribute(extension.keys[block_name])


def list_config_blocks() -> list[str]:
    """Return the blocks of config.yaml in which extensions have keys."""
    return list(
        dict.fromkeys(p for extension in load_extensions().values() for p in extension.keys)
    )


def import_attribute(import_path: ImportPath) -> Any:
    """Import and return the object that an import path such as "module:attribute" names."""
    module, _, attribute = import_path.partition(":")
    return getattr(import_module(module), attribute)
