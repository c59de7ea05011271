"""Cells that train a transformer on text, by the real launcher."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launching import LaunchedCell, settings
from stratbench.analysis.audit.accuracy import contradictory_accuracy
from stratbench.cell import record
from stratbench.workload.prepare import prepare

VOCABULARY, LENGTH = 8, 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "text"
    spec = {
        "source": "markov-text", "train_samples": 512, "test_samples": 24, "vocabulary": VOCABULARY,
        "sequence": LENGTH,
    }  # fmt: skip
    prepare("text", folder, spec=spec)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("fsdp", 2), ("ps-sync", 2)])
@pytest.mark.timeout(120)
def test_a_transformer_learns_a_text(
    start_cell: Callable[..., LaunchedCell], warm: dict, text: Path, strategy: str, workers: int
) -> None:
    s = settings(
        strategy, model="gpt-compact", dataset="text", gpus=workers, epochs=1, global_batch=16,
        per_worker_batch=16 // workers, lr=0.02,
    )  # fmt: skip
    cell = start_cell(s, data_dir=text, env=warm)
    output, _ = cell.process.communicate(timeout=110)
    assert cell.process.returncode == 0, output
    rec = record.read(cell.record)
    assert rec["status"] == "ok"
    assert rec["model"]["input_shape"] == [LENGTH]
    assert rec["model"]["classes"] == VOCABULARY
    assert rec["data"]["synthetic"]
    # Better than guessing: it has begun to learn which token follows which.
    assert rec["accuracy"]["per_epoch"][-1]["test_loss"] < math.log(VOCABULARY) - 0.1
    assert rec["accuracy"]["per_epoch"][-1]["accuracy"] > 1.5 / VOCABULARY
    # The audit counts tokens as answers: an honest record is sound, one off by half a token is not.
    assert list(contradictory_accuracy.check(SimpleNamespace(records=[rec]))) == []
    rec["accuracy"]["per_epoch"][-1]["accuracy"] += 0.5 / (24 * LENGTH)
    faults = [
        found.figures for found in contradictory_accuracy.check(SimpleNamespace(records=[rec]))
    ]
    assert any(f"of {24 * LENGTH} answers no whole number" in fault for fault in faults)
    # Two for each weight that a token is multiplied with, at least.
    flops = rec["compute"]["forward_flops_per_sample"]
    assert flops > 2 * LENGTH * 4 * 12 * 128**2
