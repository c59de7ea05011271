"""Exports a result set in the formats of other tools, each to its own folder, without a server."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratbench.extensions.sets.archive import SetError
from stratbench.extensions.sets.folders import claim_folder
from stratbench.extensions.sets.reading import ResultSet

#: Formats, each with the packages to install for it.
EXPORTS = {
    "parquet": "pyarrow",
    "mlflow": "mlflow-skinny alembic",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
#: File that pins the packages of all formats, relative to the root of a clone.
REQUIREMENTS = "envs/requirements-export.txt"


def export_set(result_set: ResultSet, formats: Sequence[str], out: Path) -> list[Path]:
    """Write a set in each format below `out`, and return the folders.

    Each folder replaces an older one in one step, when it is complete.

    Args:
        result_set: The set.
        formats: Names of EXPORTS.
        out: Folder to write below.

    Raises:
        SetError: If a format's package is not installed, or if the format needs records and the set has none.
        FileExistsError: If `out` has files of somebody else, which are never replaced.
    """
    modules = {name: _import_writer(name) for name in formats}
    if not result_set.records and (
        runs := [name for name in formats if modules[name].NEEDS_RECORDS]
    ):
        raise SetError(
            f"{result_set.source} has no records, which {runs[0]} needs; export to parquet instead"
        )
    claim_folder(out)
    folders = []
    for name, module in modules.items():
        folder = out / name
        with _replace_folder(folder) as unfinished:
            module.write(result_set, unfinished)
        folders.append(folder)
    return folders


@contextmanager
def _replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end, unless an exception is raised."""
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
        folder.rename(old)  # in one step, because a partly removed folder would look complete
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _import_writer(name: str) -> Any:
    """Import the module that writes a format. Raises SetError if its package is missing."""
    try:
        return importlib.import_module(f"stratbench.extensions.sets.export.to_{name}")
    except ModuleNotFoundError as e:
        raise SetError(
            f"export to {name} needs {e.name}, which is not installed: pip install -r {REQUIREMENTS}, "
            f"or without a clone pip install {EXPORTS[name]}"
        ) from None
