"""A stranger's network in a file: it is checked, planned, trained, reported and decided on."""

from __future__ import annotations

import csv
import json

import pytest
from own_network import LAYERS, NETWORK
from tiny_study import Workflow, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SENTENCE = (
    "model 'two' (my_net:TwoAnswers): returned a tuple for a batch; return one tensor of scores "
    "[2, 10]"
)
REFUSAL = (
    "spare.weight, spare.bias got no gradient in a step, and DDP waits for one from every parameter; use "
    "what it belongs to in each forward, remove it, or freeze it with requires_grad_(False)"
)
DDP = f"ddp cannot train it: {REFUSAL}"


def config_with(models: dict[str, dict]) -> dict:
    config = tiny_config()
    config["models"] = models
    experiments = config["studies"]["tiny"]["experiments"]
    experiments["first"] |= {
        "models": list(models), "strategies": ["ddp", "fsdp", "ps-sync"], "gpus": [2],
    }  # fmt: skip
    experiments["second"]["gpus"] = [1]  # with a built-in model, which nothing here may retrain
    return config


def test_a_network_in_a_file_is_checked_planned_trained_reported_and_decided_on(tmp_path):
    mine = {"mine": {"call": "my_net.MyNet", "shard": ["Block"]}}
    work = Workflow(tmp_path, config_with(mine))
    (tmp_path / "my_net.py").write_text(NETWORK)
    (tmp_path / "my_layers.py").write_text(LAYERS)

    # The check comes first. It refuses one network for one strategy, and says what to do.
    spared = {"call": "my_net:Spared", "shard": ["Block"]}
    work.write_config(config_with(mine | {"spared": spared}))
    check = work.run("check")
    assert check.returncode != 0, check.stdout
    for line in (
        "mine on tiny-images\n   2,090 parameters; takes images [batch, 1, 16, 16], gives scores for 10",
        "   shard groups, instances of Block: blocks.1 544, blocks.2 544; in none: 1,002",
        "   tied: blocks.0.second.weight = again.weight is one parameter",
        "   fsdp: works with 2 workers",
        f"   ddp: refused with 2 workers: {REFUSAL}",
        f"first, ddp, spared, 2 workers (1 cell): model 'spared' (my_net:Spared): {DDP}",
    ):
        assert line in check.stdout, check.stdout
    # The plan says the same, and plans the others.
    plan = work.run("plan")
    assert plan.returncode == 0, plan.stdout
    assert (
        f"refused: first, ddp, spared, 2 workers: model 'spared' (my_net:Spared): {DDP}"
        in plan.stdout
    )
    with open(tmp_path / "results/tiny/plan.csv", newline="") as file:
        states = {(r["strategy"], r["model"]): r["state"] for r in csv.DictReader(file)}
    assert states["ddp", "spared"] == "refused"
    assert states["fsdp", "spared"] == states["ddp", "mine"] == "to do"
    assert "first, mine, 2 workers on CPU: the study uses 16 samples a worker" in plan.stdout

    work.write_config(config_with(mine))
    done = work.run()
    assert done.returncode == 0, done.stdout
    assert "mine (first): " in done.stdout
    records = [json.loads(work.record("first", s, "mine", "2gpu").read_text())
               for s in ("ddp", "fsdp", "ps-sync")]  # fmt: skip
    assert len({r["model"]["initial_weights_sha256"] for r in records}) == 1
    own = records[1]["model"]["own"]
    assert own["arguments"] == {"classes": 10, "channels": 1, "image_size": 16}
    assert (own["files"], own["version"]) == (["my_layers.py", "my_net.py"], None)
    assert own["sha256"] == records[1]["settings"]["own_model"]["sha256"]
    # The block with the tied weight stays with the root.
    labels = [group["label"] for group in records[1]["strategy"]["wrap_groups"]]
    assert labels == ["blocks.1", "blocks.2"]
    assert records[0]["model"]["parameters"] == 2090
    # Strategies of equal rules have trained the same network equally.
    losses = [r["score"]["per_epoch"][-1]["test_loss"] for r in records]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3)
    assert "unusable" not in (tmp_path / "results/tiny/audit.csv").read_text()
    assert "mine" in (tmp_path / "results/tiny/report.html").read_text()
    answer = work.run("decide")
    assert answer.returncode == 0, answer.stdout
    assert "mine (first, tiny-images)" in answer.stdout

    # What is changed in a file that the network imports trains its cells again, and no other.
    layers = tmp_path / "my_layers.py"
    layers.write_text(LAYERS.replace("relu()", "tanh()"))
    changed = work.run("-n")
    assert changed.stdout.count("train tiny/first: ") == 3, changed.stdout
    assert "train tiny/second: " not in changed.stdout
    # A folder that has moved trains nothing again.
    layers.write_text(LAYERS)
    (tmp_path / "elsewhere").mkdir()
    for name in ("my_net.py", "my_layers.py"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    work.write_config(config_with(mine) | {"code": ["elsewhere"]})
    assert "train_cell" not in work.jobs()

    # What gives something else than scores, or what was refused, says so at once when it is trained.
    two = {"two": {"call": "my_net:TwoAnswers"}, "spared": spared}
    work.write_config(config_with(two) | {"code": ["elsewhere"]})
    records = [work.record("first", "ddp", name, "2gpu").relative_to(tmp_path) for name in two]
    failed = work.run("--keep-going", *map(str, records))
    assert failed.returncode != 0
    assert SENTENCE in failed.stdout
    assert f"FAILED: ModelError: model 'spared' (my_net:Spared): {DDP}" in failed.stdout
