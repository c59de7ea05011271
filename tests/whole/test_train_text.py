"""Cells that train a transformer on text, by the real launcher."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import invariants
from launching import LaunchedCell, settings
from stratbench.cell import record
from stratbench.extensions.audit.scores import find_losses_below_minimum
from stratbench.workload.data import prepared
from stratbench.workload.data.prepare import prepare_data_set

VOCABULARY, LENGTH = 8, 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "text"
    spec = {
        "source": "markov-text", "train_samples": 512, "test_samples": 24, "vocabulary": VOCABULARY,
        "sequence": LENGTH,
    }  # fmt: skip
    prepare_data_set("text", folder, spec=spec)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("fsdp", 2), ("ps-sync", 2)])
@pytest.mark.timeout(300)
def test_a_transformer_learns_a_text(
    start_cell: Callable[..., LaunchedCell], warm: dict, text: Path, strategy: str, workers: int
) -> None:
    s = settings(
        strategy, model="gpt-compact", dataset="text", gpus=workers, epochs=1, global_batch=16,
        per_worker_batch=16 // workers, lr=0.02, data_spec=prepared.read_unverified_metadata(text)["spec"],
    )  # fmt: skip
    cell = start_cell(s, data_dir=text, env=warm)
    output, _ = cell.process.communicate(timeout=300)
    assert cell.process.returncode == 0, output
    rec = record.read_record(cell.record)
    assert rec["status"] == "ok"
    assert rec["model"]["input_shape"] == [LENGTH]
    assert rec["model"]["classes"] == VOCABULARY
    assert rec["data"]["synthetic"]
    # Better than guessing: it has begun to learn which token follows which.
    assert rec["score"]["per_epoch"][-1]["test_loss"] < math.log(VOCABULARY) - 0.1
    assert rec["task"]["score"] == "loss"
    assert rec["task"]["counts_per_sample"] == LENGTH
    # The score is the loss; the least possible is known, and an honest record is above it.
    last, least = rec["score"]["per_epoch"][-1], rec["task"]["least_loss"]
    assert last["score"] == pytest.approx(last["test_loss"], rel=1e-9) == rec["score"]["final"]
    assert 0 < last["score_error"] < 0.2
    evidence = SimpleNamespace(records=[rec], timelines={})
    assert list(find_losses_below_minimum.check(evidence)) == []
    last["score"] += 0.01
    assert any("its test loss" in sentence for sentence in invariants.broken(rec))
    last["test_loss"] = least - 2 * last["score_error"]  # chance explains it
    assert list(find_losses_below_minimum.check(evidence)) == []
    last["test_loss"] = least - 4 * last["score_error"]
    assert [found.values_text for found in find_losses_below_minimum.check(evidence)]
    # Two for each weight that a token is multiplied with, at least.
    flops = rec["compute"]["forward_flops_per_sample"]
    assert flops > 2 * LENGTH * 4 * 12 * 128**2
