"""No code that a result set names is imported, run or handed to a shell."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import fixture_records as fixture
import pytest

from stratbench.command.__main__ import main
from stratbench.extensions.sets.bundle import write_bundle

RULES = Path(__file__).parents[3] / "workflow/rules"
EXPERIMENT = {
    "dataset": "cifar10", "strategies": ["ddp"], "models": ["vgg16"], "gpus": [2], "epochs": 6,
    "global_batch": 128, "lr": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "experiment", "named"),
    [
        ({"models": {"mine": {"call": "evil_code.net"}}}, {"models": ["mine"]}, "models.mine"),
        ({"datasets": {"d": {"call": "evil_code.data"}}}, {"dataset": "d"}, "datasets.d"),
        ({"datasets": {"d": {"text": "letters.txt"}}}, {"dataset": "d"}, "datasets.d"),
        ({}, {"task": "evil_code:Task"}, "the task evil_code:Task"),
        ({"code": ["."], "models": {"m": {"call": "evil_code.net"}}}, {}, "models.m"),
    ],
)
def test_code_that_a_bundle_names_is_never_imported(
    tmp_path, monkeypatch, capsys, changes, experiment, named
):
    """It lies beside the bundle, where Python would find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("evil_code.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    studies = {"constructed": {"experiments": {"main": EXPERIMENT | experiment}}}
    config = {"study": "constructed", "studies": studies} | changes
    folder = fixture.write_study(tmp_path, fixture.expand(("ddp",), ("vgg16",), (2,)))
    write_bundle(folder, config, out=Path("x.stratbench.zip"))
    assert main(["plan", "x.stratbench.zip"]) == 2
    told = capsys.readouterr().err
    assert f"uses code or data of its author ({named})" in told
    assert told.count("\n") == 1
    assert main(["decide", "x.stratbench.zip"]) == 0
    assert main(["check", "x.stratbench.zip"]) in (0, 1)
    assert not Path("ran").exists()
    assert "evil_code" not in sys.modules
    assert not Path("constructed.plan").exists()


def test_every_text_that_a_rule_gives_to_a_shell_is_quoted():
    """Descriptions, names and paths are a user's; numbers of `resources` need no quotes."""
    seen = 0
    for path in sorted(RULES.glob("*.smk")):
        # A message is printed, and no shell sees it.
        text = re.sub(r"^    message:\n(?: {8}.*\n)+", "", path.read_text(), flags=re.M)
        for place in re.findall(r"\{\{?((?:params|input|output|log|wildcards)[^{}]*)\}", text):
            if place.startswith("wildcards") or place == "log":  # see below
                continue
            assert place.endswith(":q"), f"{path.name}: {{{place}}}"
            seen += 1
        for line in path.read_text().splitlines():
            if re.search(r"\{(log|wildcards[^}:]*)\}", line):
                assert not re.search(r"[>|]|--", line), f"{path.name}: {line.strip()}"
    assert seen > 60


@pytest.mark.parametrize("there", ["file", "hidden", "dangling"])
def test_init_refuses_what_is_not_empty(tmp_path, capsys, there):
    place = tmp_path / "study"
    match there:
        case "file":
            place.write_text("mine")
        case "hidden":
            place.mkdir()
            (place / ".mine").touch()
        case "dangling":
            place.symlink_to(tmp_path / "none")
    before = json.dumps(sorted(str(p) for p in tmp_path.rglob("*")))
    assert main(["init", str(place)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stratbench init: ")
    assert error.count("\n") == 1
    assert json.dumps(sorted(str(p) for p in tmp_path.rglob("*"))) == before
