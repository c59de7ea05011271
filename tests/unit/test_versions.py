"""Versions that are promised: one sentence where they are older, and the same in all places."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stratbench.study import versions

ROOT = Path(__file__).parents[2]


def test_an_older_package_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.8.0+cpu", "snakemake": "9.27.1", "numpy": "2.5.0rc1"}

    def version(name: str) -> str:
        if name not in there:
            raise versions.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    needed = ["torch>=2.12", "snakemake>=9.18", "numpy>=2.4.5", "tqdm>=4.67"]
    assert versions.describe_old_packages(needed) == [
        "torch 2.8.0+cpu is too old: stratbench needs torch>=2.12; pip install 'torch>=2.12'"
    ]


def test_what_is_pinned_is_not_too_old() -> None:
    needed = versions.requirements()
    assert {Requirement(r).name for r in needed} >= {"torch", "snakemake", "pandas"}
    assert versions.describe_old_packages(needed) == []


def test_a_copy_of_the_workflow_alone_is_not_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert versions.requirements() == []


def test_floors_are_the_same_in_all_places() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = {Requirement(r).name: str(Requirement(r).specifier)[2:] for r in needed}
    snakefile = (ROOT / "Snakefile").read_text()
    assert f'min_version("{floors["snakemake"]}")' in snakefile
    stated = (ROOT / "docs/installing.md").read_text()
    [sentence] = re.findall(r"Oldest versions: (.*?)\.\s", stated.replace("\n", " "))
    plugin = floors["snakemake-executor-plugin-slurm"]
    for promised in (
        f"PyTorch {floors['torch']}",
        f"Snakemake {floors['snakemake']}",
        f"its SLURM plugin {plugin}",
        "Python 3.11",
    ):
        assert promised in sentence
