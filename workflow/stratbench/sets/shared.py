"""Checks whether a bundle may be shared with everybody, in results-shared/, which holds users' bundles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stratbench.cell.files import read_regular
from stratbench.sets.archive import SUFFIX, SetError
from stratbench.sets.reading import ResultSet, read_set

MOST_SHARED_BYTES = 5 << 20
MOST_STATEMENT_BYTES = 10_000
#: Keys of the statement beside a bundle, and the licences that let everybody use the results.
STATED = {
    "contributor": "who shares it: a person or a group",
    "machine": "what it was measured on, in a sentence",
    "licence": "under which licence",
}
LICENCES = ("CC0-1.0", "CC-BY-4.0")


def faults_of_folder(folder: Path) -> Iterator[str]:
    """Sentences on why something in a folder of shared bundles cannot stay; none if all is well."""
    bundles = [path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIX)]
    statements = {statement_of(path) for path in bundles}
    for path in sorted(folder.iterdir()):
        if path not in statements and path not in bundles and path.name != "README.md":
            yield f"{path} is no bundle NAME{SUFFIX}, and the statement NAME.yaml of none"
    for path in bundles:
        yield from faults_of_bundle(path)


def faults_of_bundle(path: Path, found: ResultSet | None = None) -> Iterator[str]:
    """Sentences on why a bundle with the statement beside it cannot be shared.

    `found`: the content of the bundle, if it has been read.
    """
    try:
        # Before anything is unpacked; this also limits the cost of a check.
        size = len(read_regular(path, MOST_SHARED_BYTES))
    except OSError as e:
        yield f"{path} {e.strerror}; a study's experiments can be bundled one by one"
        return
    try:
        found = found or read_set(str(path))
    except SetError as e:
        yield str(e)
    else:
        if found.manifest is None:
            yield f"{path} is no bundle ({size} bytes)"
        elif not found.hosts_replaced:
            yield f"{path} names hosts: make it by `stratbench bundle --replace-hosts`"
        unusable = found.findings[found.findings["severity"] == "unusable"]
        for rule, rows in unusable.groupby("rule"):
            yield f"{path}: the audit calls figures of {len(rows)} comparisons or cells unusable: {rule}"
    yield from faults_of_statement(statement_of(path))


def statement_of(bundle: Path) -> Path:
    """The statement that belongs beside a bundle."""
    return bundle.with_name(bundle.name.removesuffix(SUFFIX) + ".yaml")


def faults_of_statement(path: Path) -> Iterator[str]:
    """Sentences on what a statement lacks or gets wrong."""
    try:
        said: Any = yaml.safe_load(read_regular(path, MOST_STATEMENT_BYTES))
    except FileNotFoundError:
        yield f"{path} is not there; it says {', '.join(STATED)} (docs/sharing-results.md)"
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as e:
        yield f"{path} cannot be read as YAML ({type(e).__name__})"
        return
    if not isinstance(said, dict):
        yield f"{path} must say {', '.join(STATED)}, each as `key: text`"
        return
    for key, what in STATED.items():
        if not isinstance(said.get(key), str) or not said[key].strip():
            yield f"{path}: {key} is missing: {what}"
    for key in sorted(set(map(str, said)) - STATED.keys()):
        yield f"{path}: {key!r} is unknown; it may say {', '.join(STATED)}"
    if isinstance(said.get("licence"), str) and said["licence"] not in LICENCES:
        yield f"{path}: licence {said['licence']!r}: must be {' or '.join(LICENCES)}"
