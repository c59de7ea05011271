"""The example of docs/your-data.md, followed to the letter: trained, planned, and held to plain loops."""

from __future__ import annotations

import importlib
import json
import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tiny_study import ROOT, Workflow
from torch import Tensor
from torch.nn import functional as F

from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.generators import seed_random_generators
from stratbench.workload.tasks import IGNORED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (
    (ROOT / "docs/your-data.md")
    .read_text(encoding="utf-8")
    .partition("## An example with all three")[2]
)
AUDIT = "results/three/audit.csv"
#: Experiment -> its data set, the class of its network.
NETWORKS = {
    "sound": ("commands", "Listener"),
    "labels": ("reviews", "Reader"),
    "hidden": ("letters", "Finder"),
}


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def config() -> dict:
    """The page's, on CPU workers in float64."""
    found = yaml.safe_load(block("yaml"))
    for experiment in found["studies"]["three"]["experiments"].values():
        experiment |= {"device": "cpu", "threads": 1, "precision": "fp64"}
    return found


def write_files(folder: Path) -> None:
    """Two classes of twenty tones each, as many reviews, and a text."""
    rng = np.random.default_rng(0)
    for i in range(40):
        path = folder / "commands" / ("go", "stop")[i % 2] / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        tone = 9000 * np.sin(np.arange(700 + 5 * i) * (0.1, 0.3)[i % 2])
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes((tone + rng.normal(0, 900, len(tone))).astype("<i2").tobytes())
    rows = [f'"{("bad", "a very good")[i % 2]}, number {i}",{i % 2 + 4}' for i in range(40)]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *rows]))
    (folder / "letters.txt").write_text("to be, or not to be: that is the question. " * 40)
    (folder / "my_networks.py").write_text(block("python"))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def trained_plainly(network: torch.nn.Module, data: DeviceData, settings: dict) -> list[float]:
    """The training losses of each epoch, in one process."""
    seed_random_generators(settings["seed"])
    optimizer = torch.optim.SGD(
        network.parameters(), lr=settings["lr"], momentum=settings["momentum"]
    )
    losses = []
    for epoch in range(settings["epochs"]):
        batches = data.draw_order_and_augmentation(settings["seed"], epoch, False).order.split(8)
        each = []
        for indices in batches[: data.train_samples // 8]:
            x, y = data.make_training_batch(indices)
            loss = loss_of(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            each.append(loss.item())
        losses.append(sum(each) / len(each))
    return losses


def network_of(name: str, meta: dict, seed: int) -> torch.nn.Module:
    """What a user writes: seeds, and the class with the numbers that the data have."""
    made = getattr(importlib.import_module("my_networks"), name)
    seed_random_generators(seed)
    sizes = {
        "Listener": {"num_classes": meta["classes"]},
        "Reader": {"vocab_size": 256, "num_classes": meta["classes"]},
        "Finder": {"vocab_size": meta["classes"]},
    }[name]
    return made(**sizes).double()


def test_the_three_data_sets_train_as_plain_loops_do(tmp_path, warm, monkeypatch):
    work = Workflow(tmp_path, config())
    work.share_import(warm)
    write_files(tmp_path)
    for target in ("plan", AUDIT):
        done = work.run(target)
        assert done.returncode == 0, done.stdout
    monkeypatch.syspath_prepend(tmp_path)
    results = tmp_path / "results"
    for experiment, (name, network) in NETWORKS.items():
        data = DeviceData.load_prepared_data_set(results / "data" / name, dtype=torch.float64)
        for cell in (results / "three/cells" / experiment).glob("*/*/*/rep0/record.json"):
            record = json.loads(cell.read_text())
            assert record["status"] == "ok", record["reason"]
            assert record["data"]["own"]["kind"] in ("waveforms", "labelled_texts", "masked_text")
            settings = record["settings"]
            made = network_of(network, data.meta, settings["seed"])
            found = [epoch["train_loss"] for epoch in record["score"]["per_epoch"]]
            assert found == pytest.approx(trained_plainly(made, data, settings), rel=1e-12), cell
    cells = list((results / "three/cells").glob("*/*/*/*/rep0/record.json"))
    assert len(cells) == 9
    assert "unusable" not in (tmp_path / AUDIT).read_text()
    # What was read is not read again; a file that changed is.
    assert work.jobs(AUDIT) == {}
    table = tmp_path / "reviews.csv"
    table.write_text(table.read_text().replace("number 7", "number 70"))
    again = work.jobs(AUDIT)
    assert (again["prepare_data"], again["train_cell"]) == (1, 3), again
