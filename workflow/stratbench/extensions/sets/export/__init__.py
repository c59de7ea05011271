"""Exports a result set in the formats of other tools, without a server."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratbench.extensions.sets.archive import SetError
from stratbench.extensions.sets.folders import mark_folder_and_return_old_text
from stratbench.extensions.sets.reading import ResultSet

#: Names of the formats, each with the packages that it needs.
EXPORTS = {
    "parquet": "pyarrow",
    "mlflow": "mlflow-skinny alembic",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
#: Path of the file with the versions of these packages, relative to the root of a clone of stratbench.
REQUIREMENTS = "envs/requirements-export.txt"


def export_set(result_set: ResultSet, formats: Sequence[str], out: Path) -> list[Path]:
    """Write a result set to a folder per format, and return these folders.

    A folder appears, or replaces an older one, when it is complete.

    Args:
        result_set: The set.
        formats: Names of the formats.
        out: Folder in which to write the folders.

    Raises:
        SetError: A package of a format is not installed, or the set has no records and a format needs them.
        FileExistsError: `out` has files that stratbench did not write.
    """
    modules = {name: _import_format_module(name) for name in formats}
    if not result_set.records and (
        runs := [name for name in formats if modules[name].NEEDS_RECORDS]
    ):
        raise SetError(
            f"{result_set.source} has no records, but the format {runs[0]} needs them; export to parquet"
        )
    mark_folder_and_return_old_text(out)
    folders = []
    for name, module in modules.items():
        folder = out / name
        with _replace_folder_when_complete(folder) as unfinished:
            module.write_export(result_set, unfinished)
        folders.append(folder)
    return folders


@contextmanager
def _replace_folder_when_complete(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` at the end if no exception is raised."""
    unfinished, old = (folder.with_name(f".{folder.name}.{what}") for what in ("unfinished", "old"))
    for left in (unfinished, old):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if folder.exists():
        # The old folder is renamed in one step, because a partly deleted folder would look complete.
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _import_format_module(format_name: str) -> Any:
    """Return the module that writes a format.

    Raises:
        SetError: A package that the format needs is not installed.
    """
    try:
        return importlib.import_module(f"stratbench.extensions.sets.export.to_{format_name}")
    except ModuleNotFoundError as e:
        raise SetError(
            f"the format {format_name} needs the package {e.name}, which is not installed; run pip install "
            f"-r {REQUIREMENTS}, or without a clone pip install {EXPORTS[format_name]}"
        ) from None
