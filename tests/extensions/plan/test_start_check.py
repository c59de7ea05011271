"""The check of networks before a run's first cell, and the summary of what failed in it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from stratbench.cell.coordinates import Cell
from stratbench.cell.installation import PACKAGE
from stratbench.cell.record import FAILURE_FILE
from stratbench.extensions.plan import start_check
from stratbench.study.config.config import load_config
from stratbench.study.reasons import MAX_LINES, iter_failure_summary

NETS = """
import torch
from torch import nn
class Fine(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
class Narrow(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(63, classes)
    def forward(self, x):
        return self.head(x.flatten(1))
class OnGpu(Fine):
    def forward(self, x):
        raise RuntimeError("No CUDA GPUs are available")
"""
NARROW = "model 'narrow' (nets.Narrow): its forward of a batch [2, 1, 8, 8] raised RuntimeError: "


def faults_of(folder: Path, models: list[str], elsewhere: bool = False, **changes) -> list[str]:
    """The faults of a study with some of the networks above, on a machine of their own or not."""
    block = {
        "dataset": "digits", "strategies": ["single", "ddp"], "models": models, "gpus": [1, 2],
        "epochs": 1, "global_batch": 8, "lr": 0.1, "device": "cpu",
    }  # fmt: skip
    own = {"fine": "Fine", "narrow": "Narrow", "on-gpu": "OnGpu"}
    raw = {
        "study": "s",
        "results": str(folder / "results"),
        "code": [str(folder)],
        "models": {name: {"call": f"nets.{own[name]}"} for name in models if name in own},
        "studies": {"s": {"experiments": {"e": block | changes}}},
    }
    config, study = load_config(raw)
    return start_check.find_network_faults(config, study, study.cells, elsewhere)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.setenv("STRATBENCH_CODE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    return tmp_path


def test_a_network_that_nothing_can_train_stops_a_run_before_its_first_cell(folder, capfd):
    fault, on_gpu = faults_of(folder, ["fine", "narrow", "vgg-compact", "on-gpu"])
    assert fault.startswith(NARROW)
    assert fault.endswith(" (nets.py, line 12)")
    assert on_gpu.startswith("model 'on-gpu'")
    assert "models to check: 3" in capfd.readouterr().err
    # It is kept that the other is sound; a fault may be mended in what is no file of the user's.
    assert faults_of(folder, ["fine"]) == []
    assert "to check" not in capfd.readouterr().err


@pytest.mark.slow
def test_what_another_machine_may_be_able_to_is_told_and_started(folder, capfd):
    """A login node has no GPU, and a kernel for GPUs alone fails on it."""
    for elsewhere, device in ((True, "cpu"), (False, "cuda")):
        (fault,) = faults_of(folder, ["on-gpu", "narrow"], elsewhere, device=device)
        assert fault.startswith(NARROW)
        assert "since other machines may differ: model 'on-gpu'" in capfd.readouterr().err


def test_a_study_without_networks_of_ones_own_starts_at_once(folder, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert faults_of(folder, ["vgg-compact"]) == []


def fail(cell: Cell, results: Path, reason: str) -> tuple[Cell, Path]:
    """Leave the evidence of a failed cell; returns what the summary is given of it."""
    folder = cell.log_dir(results)
    folder.mkdir(parents=True)
    (folder / FAILURE_FILE).write_text(json.dumps({"reason": reason}))
    return cell, folder.with_suffix(".log")


def test_failed_cells_are_told_last_by_their_reasons(tmp_path):
    cells = [Cell("s", "e", s, "net", "digits", n, 0) for s in ("ddp", "fsdp") for n in (1, 2)]
    failed = [fail(cell, tmp_path, "ModelError: boom") for cell in cells]
    silent = Cell("s", "e", "zero1", "net", "digits", 2, 0)
    failed.append((silent, tmp_path / "rep0.log"))
    stale = fail(Cell("s", "e", "single", "net", "digits", 1, 0), tmp_path, "of yesterday")
    os.utime(stale[0].log_dir(tmp_path) / FAILURE_FILE, (0, 0))
    lines = list(iter_failure_summary([*failed, stale], str(tmp_path), time.time() - 60))
    assert lines == [
        "Failed: 6 cells",
        "  net with ddp, fsdp on 1, 2 workers (4 cells of e): boom",
        "  net with single, zero1 on 1, 2 workers (2 cells of e): ended before it could report a "
        "reason; its log may have one",
        f"Logs: {tmp_path / 'rep0.log'} and its likes",
    ]
    assert list(iter_failure_summary([], str(tmp_path), 0)) == []


def test_a_summary_of_many_reasons_is_short(tmp_path):
    failed = [
        fail(Cell("s", "e", "ddp", "net", "digits", 1, n), tmp_path, f"reason {n}")
        for n in range(20)
    ]
    lines = list(iter_failure_summary(failed, str(tmp_path), 0))
    assert len(lines) == MAX_LINES + 3
    assert lines[-2] == "  and 8 other reasons"
