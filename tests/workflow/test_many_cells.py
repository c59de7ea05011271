"""A study of 2,400 cells: what grows with it fits on no command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tiny_study import Workflow, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EXPERIMENTS = 200
#: Of an experiment.
CELLS = 12


def large_config() -> dict:
    config = tiny_config()
    one = config["studies"]["tiny"]["experiments"]["first"]
    one |= {"strategies": ["ddp", "fsdp"], "gpus": [2, 4], "repeats": 3, "target_score": 0.5}
    config["studies"]["tiny"]["experiments"] = {
        f"rate-{n}": one | {"lr": 0.01 + n / 10_000} for n in range(EXPERIMENTS)
    }
    return config


#: What Linux takes as one argument, and so as a shell command.
MAX_BYTES = 128 << 10


def test_thousands_of_cells_are_decided_on(tmp_path: Path) -> None:
    workflow = Workflow(tmp_path / "w", large_config())
    done = workflow.run("decide")
    assert done.returncode == 0, done.stdout
    with (workflow.folder / "results/tiny/decision/cells.csv").open(newline="") as file:
        assert sum(1 for _ in csv.DictReader(file)) == EXPERIMENTS * CELLS


def test_no_command_is_too_long_with_thousands_of_cells(tmp_path: Path) -> None:
    """And a dry run writes no file."""
    targets = ("partial", "plan", "check", "bundle", "export", "verdict")
    workflow = Workflow(tmp_path / "w", large_config())
    dry = workflow.run("-n", "--printshellcmds", *targets)
    assert dry.returncode == 0, dry.stdout
    for target in targets:
        assert f"--values results/tiny/logs/{target}.log.json" in dry.stdout, target
    assert max(len(line.encode()) for line in dry.stdout.splitlines()) < MAX_BYTES
    assert not (workflow.folder / "results/tiny/logs").exists()
