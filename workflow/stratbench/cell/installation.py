"""Where rules, schemas and reference tables lie: in a clone, or in an installed wheel."""

from __future__ import annotations

import json
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
    """Return the git state that this wheel was built from.

    Return None in a clone, or if the wheel was built without git.
    """
    path = CARRIED / "git.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
