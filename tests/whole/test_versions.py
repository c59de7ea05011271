"""Versions that are promised: one sentence where they are older, and the same in all places."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import versions as ends
from stratbench.cell.text.help_page import format_help_address
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
        "torch 2.8.0+cpu is too old: stratbench needs torch>=2.12; pip install 'torch>=2.12' "
        + format_help_address("is too old")
    ]


def test_what_is_pinned_is_not_too_old() -> None:
    needed = versions.list_required_packages()
    assert {Requirement(r).name for r in needed} >= {"torch", "snakemake", "pandas"}
    assert versions.describe_old_packages(needed) == []


def test_a_copy_of_the_workflow_alone_is_not_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert versions.list_required_packages() == []


def test_floors_are_the_same_in_all_places() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = {Requirement(r).name: str(Requirement(r).specifier)[2:] for r in needed}
    snakefile = (ROOT / "Snakefile").read_text()
    assert f'min_version("{floors["snakemake"]}")' in snakefile
    stated = (ROOT / "docs/installing.md").read_text()
    [row] = re.findall(r"^\| ([\d. |]+) \|$", stated, re.MULTILINE)
    names = ("torch", "snakemake", "snakemake-executor-plugin-slurm")
    assert row.split(" | ") == ["3.11", *(floors[name] for name in names)]


def test_the_oldest_versions_are_those_of_the_metadata() -> None:
    needed = ends.list_requirements("oldest")
    assert {"torch==2.12.*", "numpy==2.4.5", "pytest"} <= set(needed)
    assert {"torch", "numpy", "pytest"} <= set(ends.list_requirements("newest"))


def test_plans_of_two_versions_are_compared_by_figures_that_none_may_change() -> None:
    def row(peak_mib: float, sent: int) -> dict[str, str]:
        figures = dict.fromkeys(ends.FIGURES, "1")
        return figures | {"peak_mib": str(peak_mib), "wire_bytes_per_step": str(sent)}

    cells = [("s", "e", strategy, "m", "2") for strategy in ("ddp", "fsdp")]
    pinned = dict(zip(cells, (row(10, 8), row(10, 8)), strict=True))
    assert ends.compare_plans(pinned, pinned) == "0 of 2 cells"
    other = pinned | {cells[1]: row(9, 8)}
    assert ends.compare_plans(other, pinned) == "1 of 2 cells, at most -10.0% (fsdp, m, 2 workers)"
    assert ends.compare_plans({}, pinned) == "0 cells, pinned 2"


def test_a_row_of_the_table_leaves_the_other_as_it_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ends, "TABLE", tmp_path / "versions.md")
    ends.write_row("newest", ["new"])
    ends.write_row("oldest", ["old"])
    ends.write_row("newest", ["newer"])
    text = ends.TABLE.read_text()
    assert text == ends.HEAD + "| oldest | old |\n| newest | newer |\n"


def test_the_files_whose_slow_tests_are_run_have_some() -> None:
    for path in ends.find_slow_files():
        assert "pytest.mark.slow" in path.read_text(encoding="utf-8"), path
