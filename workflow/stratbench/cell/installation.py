"""Paths of rules, schemas and reference tables, in a clone or in an installed wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
#: The folder of a wheel with the repository's files, at the same paths as in a clone; setup.py fills it.
CARRIED = PACKAGE / "_repository"
INSTALLED = CARRIED.is_dir()
#: The folder that contains Snakefile, envs/, profiles/ and workflow/.
ROOT = CARRIED if INSTALLED else PACKAGE.parents[1]
SNAKEFILE = ROOT / "Snakefile"
SCHEMAS = ROOT / "workflow" / "schemas"
REFERENCE = ROOT / "workflow" / "reference"


def read_build_revision() -> dict[str, Any] | None:
    """Return the git state from which this wheel was built. None in a clone, or if built without git."""
    path = CARRIED / "git.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
