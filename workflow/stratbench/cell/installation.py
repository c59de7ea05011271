"""Where rules, schemas and reference tables lie: in a clone, or in an installed wheel."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
#: A wheel carries the repository's files here, at the same paths as in a clone; setup.py puts them here.
CARRIED = PACKAGE / "_repository"
INSTALLED = CARRIED.is_dir()
#: The folder of Snakefile, envs/, profiles/ and workflow/.
ROOT = CARRIED if INSTALLED else PACKAGE.parents[1]
SNAKEFILE = ROOT / "Snakefile"
SCHEMAS = ROOT / "workflow" / "schemas"
REFERENCE = ROOT / "workflow" / "reference"


def built_from() -> dict[str, Any] | None:
    """The git state that this wheel was built from; None in a clone, or where it was built without git."""
    path = CARRIED / "git.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def package_folder(work: Path) -> Path:
    """A folder that holds this package and nothing else, to be put on PYTHONPATH.

    Of a wheel it is a copy in `work`, made once: beside an installed package lie all others, which
    another Python (of a conda environment, of a container) must not find.
    """
    if not INSTALLED:
        return PACKAGE.parent
    folder = (work / installation()).resolve()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            copy = Path(unfinished, "copy")
            shutil.copytree(
                PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
            )
            try:
                copy.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another job was faster
                    raise
    return folder


def installation() -> str:
    """A name for what is installed: the version, and a hash of its files' hashes."""
    listed = next(PACKAGE.parent.glob("stratbench-*.dist-info/RECORD"), None)
    if listed is None:  # a copy of an installed package
        return PACKAGE.parent.name
    lines = listed.read_text(encoding="utf-8").splitlines()
    ours = sorted(line for line in lines if line.startswith("stratbench/") and "sha256=" in line)
    digest = hashlib.sha256("\n".join(ours).encode()).hexdigest()
    return f"{listed.parent.stem}-{digest[:12]}"
