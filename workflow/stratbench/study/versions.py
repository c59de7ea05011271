"""Finds packages that are older than this workflow needs, before anything is planned."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

from stratbench.cell.installation import INSTALLED, ROOT
from stratbench.cell.text.help_page import format_help_address


def list_required_packages() -> list[str]:
    """Return the packages that pyproject.toml requires, with their oldest versions.

    Return an empty list in a copy of the workflow without that file.
    """
    if INSTALLED:
        return [r for r in metadata.requires("stratbench") or () if "extra ==" not in r]
    try:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return tomllib.loads(text)["project"]["dependencies"]


def describe_old_packages(requirements: Iterable[str]) -> list[str]:
    """Return a sentence on each installed package that is older than the requirements allow."""
    sentences = []
    for requirement in map(Requirement, requirements):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue  # a command that needs the package reports that it is missing
        if not requirement.specifier.contains(version, prereleases=True):
            sentences.append(
                f"{requirement.name} {version} is too old: stratbench needs {requirement}; "
                f"pip install '{requirement}' {format_help_address('is too old')}"
            )
    return sentences
