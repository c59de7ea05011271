"""docs/engines.md, from train.py to a row of the table: its own lines, in a run of the real workflow."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from tiny_study import Workflow, tiny_config

from launching import OF_THE_MACHINE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
TABLES = "results/tiny/tables"
TARGETS = ("results/tiny/audit.csv", TABLES)
#: A network for both: as our strategies call it, and as nanoGPT's loop does.
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class GPT(nn.Module):
    def __init__(self, vocab_size, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, idx):
        return self.head(self.embed(idx))


class Nano(GPT):
    def get_num_params(self):
        return sum(p.numel() for p in self.parameters())

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
#: What stands before the loop in nanoGPT's train.py, cut down.
BEFORE_THE_LOOP = """
import os, sys
import numpy as np, torch
from torch.distributed import init_process_group, destroy_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from model import Nano

given = dict(a.removeprefix("--").split("=") for a in sys.argv[1:])
max_iters, eval_interval, batch_size, seed = (
    int(given[key]) for key in ("max_iters", "eval_interval", "batch_size", "seed")
)
ddp, iter_num = True, 0
init_process_group("gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
gradient_accumulation_steps = int(given["gradient_accumulation_steps"]) // ddp_world_size
torch.manual_seed(seed)
arrays = {
    split: [
        torch.from_numpy(np.load(f"{given['data']}/{split}_{x}.npy").astype("int64"))
        for x in ("inputs", "targets")
    ]
    for split in ("train", "test")
}
raw_model = Nano(1 + max(int(a.max()) for pair in arrays.values() for a in pair))
model = DDP(raw_model)
optimizer = torch.optim.SGD(model.parameters(), float(given["learning_rate"]), 0.9)


def get_batch(split):
    inputs, targets = arrays[split]
    ix = torch.randint(len(inputs), (batch_size,))
    return inputs[ix], targets[ix]


@torch.no_grad()
def estimate_loss():
    return {"val": float(raw_model(*arrays["test"])[1])}


X, Y = get_batch("train")
"""
#: A trainer of a model that it alone knows.
PLAIN = """
import sys
from stratbench.report import Report

steps, samples = map(int, sys.argv[1:])
report = Report(parameters=3)
for _ in range(steps):
    report.step(samples)
report.pause()
report.score(1.0, test_loss=1.0)
"""


def block(kind: str, after: str = "# Benchmark a trainer of your own") -> str:
    """The first block of this kind after a heading of the page."""
    return re.search(rf"```{kind}\n(.*?)```", PAGE.split(after)[1], re.DOTALL)[1]


def trainer() -> str:
    """train.py with the page's lines."""
    loop = "\n".join(line[1:] for line in block("diff").splitlines())
    return f"{BEFORE_THE_LOOP}{loop}\ndestroy_process_group()\n"


def test_ten_lines_take_a_trainer_to_a_row_of_the_table(tmp_path, warm):
    added = [line for line in block("diff").splitlines() if line.startswith("+")]
    variants = yaml.safe_load(block("yaml"))
    assert len(added) == 6
    config = tiny_config()
    config["datasets"] = {
        "tiny-text": {"source": "markov-text", "train_samples": 128, "test_samples": 64,
                      "vocabulary": 17, "sequence": 8},
    }  # fmt: skip
    config["models"] = {"nano": {"call": "model.GPT"}, "my-gpt": {}}
    first = config["studies"]["tiny"]["experiments"]["first"]
    first |= {
        "dataset": "tiny-text",
        "models": ["nano"],
        "strategies": ["ddp", "mine"],
        "gpus": [2],
    }
    for name in ("plain", "again"):
        command = [sys.executable, "plain.py", "{total_steps}", "{global_batch}"]
        variants["variants"][name] = {"strategy": "command", "command": command}
    alone = first | {"models": ["my-gpt"], "strategies": ["plain", "again"], "gpus": [1]}
    config["studies"]["tiny"] |= variants | {"experiments": {"first": first, "alone": alone}}
    workflow = Workflow(tmp_path, config)
    workflow.share_import(warm)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(trainer())
    (tmp_path / "plain.py").write_text(PLAIN)
    # What its trainer alone builds is not checked.
    checked = workflow.run("check")
    assert checked.returncode == 0, checked.stdout
    assert "not checked: config.yaml only names it" in " ".join(checked.stdout.split())
    done = workflow.run(*TARGETS)
    assert done.returncode == 0, done.stdout
    found = json.loads(workflow.record("first", "mine", "nano", "2gpu").read_text())
    assert found["status"] == "ok"
    assert found["program"]["files"] == ["model.py", "train.py"]
    study = tmp_path / "results" / "tiny"
    with (study / "cells.csv").open(newline="") as file:
        every = list(csv.DictReader(file))
    rows = {row["strategy"]: row for row in every if row["experiment"] == "first"}
    assert rows["mine"]["same_work"] == "yes"
    assert [r["status"] for r in every if r["model"] == "my-gpt"] == ["ok", "ok"]
    assert rows["ddp"]["same_work"] == ""
    with (study / "audit.csv").open(newline="") as file:
        found = {f["rule"] for f in csv.DictReader(file) if f["strategy"] == "mine"}
    assert found <= OF_THE_MACHINE
    for experiment, named in (("first", "mine"), ("alone", "my-gpt")):
        assert named in (tmp_path / TABLES / experiment / "training_time.csv").read_text()
    # A changed script, or one beside it, trains its cells again, and no others.
    (tmp_path / "model.py").write_text(MODEL + "\n# changed\n")
    assert workflow.jobs(*TARGETS)["train_cell"] == 2  # ddp has the network's file
    (tmp_path / "model.py").write_text(MODEL)
    assert workflow.jobs(*TARGETS) == {}
    (tmp_path / "train.py").write_text(trainer() + "# changed\n")
    assert workflow.jobs(*TARGETS)["train_cell"] == 1
    # What its trainer alone builds is not planned either.
    planned = workflow.run("plan")
    assert planned.returncode == 0, planned.stdout
    # What is not there is told before any job.
    (tmp_path / "train.py").unlink()
    told = workflow.run()
    assert told.returncode != 0
    assert "mine: its script 'train.py' is not here" in told.stdout
