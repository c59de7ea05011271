"""Bundles that users share: each in results-shared/ can stay, and bad ones are found."""

from __future__ import annotations

from pathlib import Path

import fixture_records as fixture
import pytest

from stratbench.command.__main__ import main
from stratbench.sets.bundle import write_bundle
from stratbench.sets.shared import MOST_SHARED_BYTES, faults_of_folder

SHARED = Path(__file__).parents[2] / "results-shared"
STATEMENT = "contributor: A Lab\nmachine: four GPUs\nlicence: CC-BY-4.0\n"


def test_what_is_shared_in_this_repository_can_stay():
    assert list(faults_of_folder(SHARED)) == []


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    cells = fixture.expand(("ddp", "fsdp"), ("vgg16",), (1, 2), repeats=2)
    return fixture.write_study(tmp_path_factory.mktemp("study"), cells, {})


@pytest.fixture
def folder(study, tmp_path):
    """A folder as results-shared/, with one good bundle in it."""
    found = tmp_path / "shared"
    found.mkdir()
    write_bundle(study, {}, "replaced", found / "lab.stratbench.zip")
    (found / "lab.yaml").write_text(STATEMENT)
    (found / "README.md").write_text("Shared\n")
    return found


def test_a_good_bundle_can_stay(folder, capsys, monkeypatch):
    assert list(faults_of_folder(folder)) == []
    monkeypatch.setattr("stratbench.sets.shared.read_set", lambda _: pytest.fail("read twice"))
    assert main(["check", str(folder / "lab.stratbench.zip"), "--to-share"]) == 0
    assert "nothing is missing" in capsys.readouterr().out


def damage(folder: Path) -> None:
    path = folder / "lab.stratbench.zip"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "lab.yaml").unlink(), "lab.yaml is not there"),
        (
            lambda f: (f / "lab.yaml").write_text(STATEMENT.partition("licence")[0]),
            "licence is missing",
        ),
        (lambda f: (f / "lab.yaml").write_text(STATEMENT + "more: 1\n"), "'more' is unknown"),
        (lambda f: (f / "lab.yaml").write_text("[" * 1000), "cannot be read as YAML"),
        (
            lambda f: (f / "lab.yaml").write_text(STATEMENT.replace("CC-BY-4.0", "mine")),
            "licence 'mine': must be",
        ),
        (lambda f: (f / "lab.py").write_text("import os\n"), "lab.py is no bundle"),
        (damage, "lab.stratbench.zip"),
        (
            lambda f: (f / "lab.stratbench.zip").write_bytes(bytes(MOST_SHARED_BYTES + 1)),
            "is larger than",
        ),
    ],
)
def test_what_cannot_stay_is_found(folder, spoil, said):
    spoil(folder)
    [fault] = faults_of_folder(folder)
    assert said in fault
    assert "\n" not in fault


def test_a_bundle_that_names_hosts_cannot_stay(study, folder, capsys):
    write_bundle(study, {}, "named", folder / "lab.stratbench.zip")
    [fault] = faults_of_folder(folder)
    assert "names hosts" in fault
    assert main(["check", str(folder / "lab.stratbench.zip"), "--to-share"]) == 1
    assert "names hosts" in capsys.readouterr().out


def test_figures_that_the_audit_calls_unusable_cannot_stay(folder, tmp_path):
    def impossible(cell, record):
        record["time"]["train_time_s"] /= 1e6
        return record

    cells = fixture.expand(("ddp",), ("vgg16",), (1, 2), repeats=1)
    faulty = fixture.write_study(tmp_path / "faulty", cells, {}, change=impossible)
    write_bundle(faulty, {}, "replaced", folder / "lab.stratbench.zip")
    faults = list(faults_of_folder(folder))
    assert faults
    assert all("unusable" in fault for fault in faults)
