"""Writes a result set in the formats of other tools, each in its own folder, without any server."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratbench.cell.files import claim_folder
from stratbench.extensions.sets.archive import SetError
from stratbench.extensions.sets.reading import ResultSet

#: The formats, each with the packages that write it, as pip takes them.
EXPORTS = {
    "parquet": "pyarrow",
    "mlflow": "mlflow-skinny alembic",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
#: The file that pins the packages of all formats; relative to the root of a clone.
REQUIREMENTS = "envs/requirements-export.txt"


def export_set(result_set: ResultSet, formats: Sequence[str], out: Path) -> list[Path]:
    """Write a set in each format below `out`; return the folders.

    A folder is replaced in one step, once it is complete.

    Args:
        result_set: The set.
        formats: Names of EXPORTS.
        out: Folder to write below.

    Raises:
        SetError: If a format's package is not installed, or if the set has nothing for the format.
        FileExistsError: If `out` is not ours, so that no other folder `wandb` is replaced; then nothing
            is written.
    """
    modules = {name: _module_of(name) for name in formats}
    if not result_set.records and (runs := [name for name in formats if modules[name].OF_RECORDS]):
        raise SetError(f"{result_set.source} has no records, and {runs[0]} holds runs; use parquet")
    claim_folder(out)
    folders = []
    for name, module in modules.items():
        folder = out / name
        with _replacing(folder) as unfinished:
            module.write(result_set, unfinished)
        folders.append(folder)
    return folders


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end.

    Not if something is raised (Ctrl-C).
    """
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
        folder.rename(old)  # in one step: a folder that is half removed would look complete
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _module_of(name: str) -> Any:
    """Return the module that writes a format."""
    try:
        return importlib.import_module(f"stratbench.extensions.sets.export.to_{name}")
    except ModuleNotFoundError as e:
        raise SetError(
            f"export to {name} needs {e.name}, which is not installed: pip install -r {REQUIREMENTS}, "
            f"or without a clone pip install {EXPORTS[name]}"
        ) from None
