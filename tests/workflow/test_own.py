"""A stranger's network and data, in files: checked, planned, trained, decided on, trained again."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import Any

import pytest
from own_files import CODE, DATASETS, experiments_of, write_files
from own_network import LAYERS, NETWORK
from tiny_study import Workflow, tiny_config

from stratbench.analysis.report.report import read_report_input, write_pages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SENTENCE = (
    "model 'two' (my_net:TwoAnswers): returned a tuple for a batch; return one tensor of scores "
    "[2, 10]"
)
REFUSAL = (
    "spare.weight, spare.bias got no gradient in a step, and DDP waits for one from every parameter; use "
    "it in each forward, remove it, or freeze it with requires_grad_(False)"
)
DDP = f"ddp cannot train it: {REFUSAL}"
MINE = {"mine": {"call": "my_net.MyNet", "wrap_classes": ["Block"]}}
SPARED = {"spared": {"call": "my_net:Spared", "wrap_classes": ["Block"]}}
STRATEGIES = ("ddp", "fsdp", "ps-sync")


def config_with(models: dict[str, dict]) -> dict[str, Any]:
    """An experiment of `models`, one of "spared" if it is among them, and one for each data set."""
    config = tiny_config()
    config["models"] = models
    config["datasets"] |= json.loads(json.dumps(DATASETS))
    experiments = config["studies"]["tiny"]["experiments"]
    experiments |= experiments_of(experiments.pop("second"))
    own = experiments["first"] | {"models": [m for m in models if m != "spared"], "gpus": [2]}
    experiments["first"] = own | {"strategies": list(STRATEGIES)}
    if "spared" in models:
        experiments["spare"] = own | {"models": ["spared"], "strategies": ["ddp", "ps-sync"]}
    return config


def moved_config(models: dict[str, dict]) -> dict[str, Any]:
    """The same, with the code and the pictures in other folders."""
    config = config_with(models) | {"code": ["elsewhere"]}
    config["datasets"]["pictures"]["images"] = "moved"
    return config


@dataclass
class Trained:
    """A study of both, and what its check, its plan and its run have printed."""

    work: Workflow
    check: str
    plan: str
    run: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm: dict[str, str]) -> Trained:
    folder = tmp_path_factory.mktemp("own")
    work = Workflow(folder, config_with(MINE | SPARED))
    work.share_import(warm)
    (folder / "my_net.py").write_text(NETWORK)
    (folder / "my_layers.py").write_text(LAYERS)
    write_files(folder)
    check = work.run("check")
    assert check.returncode != 0, check.stdout
    plan = work.run("plan")
    assert plan.returncode == 0, plan.stdout
    done = work.run(*(f"results/tiny/{name}" for name in ("decision.csv", "tables")))
    assert done.returncode == 0, done.stdout
    return Trained(work, check.stdout, plan.stdout, done.stdout)


def test_the_check_refuses_one_network_for_one_strategy_and_says_what_to_do(trained):
    for line in (
        "mine on tiny-images\n   2,090 parameters; takes images [batch, 1, 16, 16], gives scores for 10",
        "   shard groups, instances of Block: blocks.1 544, blocks.2 544; in none: 1,002",
        "   tied: blocks.0.second.weight = again.weight is one parameter",
        "   fsdp: works with 2 workers",
        f"   ddp: unsupported with 2 workers: {REFUSAL}",
        f"spared with ddp on 2 workers (1 cell of spare): {REFUSAL}",
    ):
        assert " ".join(line.split()) in " ".join(trained.check.split()), trained.check


def test_the_plan_says_the_same_and_plans_the_others(trained):
    refused = f"unsupported: spared with ddp on 2 workers (1 cell of spare): {REFUSAL}"
    assert refused in " ".join(trained.plan.split())  # its lines are broken at 100 columns
    with open(trained.work.folder / "results/tiny/plan.csv", newline="") as file:
        states = {(r["strategy"], r["model"]): r["state"] for r in csv.DictReader(file)}
    assert states["ddp", "spared"] == "unsupported"
    assert states["ps-sync", "spared"] == states["ddp", "mine"] == "to do"
    assert "first, mine, 2 workers on CPU: the study's global batch is 32" in trained.plan
    for name in DATASETS:
        assert f"== {name}: {name}, fp32" in trained.plan


def test_a_network_is_trained_and_decided_on(trained):
    work = trained.work
    # The start takes what `check` has found out.
    assert "models to check" in trained.check
    assert "models to check" not in trained.run
    records = [json.loads(work.record("first", s, "mine", "2gpu").read_text()) for s in STRATEGIES]
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
    assert "unusable" not in (work.folder / "results/tiny/audit.csv").read_text()
    assert "mine (first): " in (work.folder / "results/tiny/logs/make_decision.log").read_text()


def test_a_cell_that_is_refused_stands_in_the_tables_with_its_reason(trained):
    """The run ends well, and does not try it again."""
    work = trained.work
    record = json.loads(work.record("spare", "ddp", "spared", "2gpu").read_text())
    assert (record["status"], record["reason"]) == (
        "unsupported",
        f"model 'spared' (my_net:Spared): {DDP}",
    )
    tables = [p.read_text() for p in (work.folder / "results/tiny/tables").rglob("*.csv")]
    assert any("unsupported" in text for text in tables)
    (work.folder / "results/tiny/plots").mkdir()
    (work.folder / "results/tiny/plots/figures.json").write_text("[]")
    results = work.folder / "results/tiny"
    inputs = read_report_input(results, results, results / "audit.csv")
    [page] = write_pages(inputs, readings=[], partial=False, description="")
    report = page.read_text()
    assert "pictures" in report
    assert "unsupported: the strategy cannot train the network" in report
    assert "DDP waits for one from every parameter" in report
    with open(work.folder / "results/tiny/decision.csv", newline="") as file:
        standings = {(r["strategy"], r["model"]): r["status"] for r in csv.DictReader(file)}
    assert standings["ddp", "spared"] == "unsupported"
    assert "train tiny/" not in work.run("-n", "results/tiny/decision.csv").stdout


def test_data_are_trained_on(trained):
    work = trained.work
    records = {
        name: json.loads(work.record(name, "single", model, "1gpu").read_text())
        for name, model in (
            ("stripes", "vgg-compact"), ("pictures", "vgg-compact"), ("letters", "gpt-compact"),
        )
    }  # fmt: skip
    found = {n: (r["data"]["train_samples"], r["data"]["test_samples"]) for n, r in records.items()}
    # Of 1720 characters the last tenth is the test text, in pieces of 16 with a token that comes next.
    assert found == {"stripes": (64, 32), "pictures": (22, 2), "letters": (96, 10)}
    assert records["stripes"]["data"]["own"]["files"] == ["my_data.py"]
    assert records["stripes"]["data"]["own"]["call"] == "my_data.stripes"
    assert records["pictures"]["data"]["own"]["kind"] == "images"
    assert records["pictures"]["data"]["buffered_batches"] == 2
    for r in records.values():
        assert r["data"]["own"]["sha256"] == r["settings"]["data_spec"]["sha256"]


def test_what_was_changed_trains_its_own_cells_again_and_no_other(trained):
    work = trained.work
    folder = work.folder

    def trained_again() -> dict[str, int]:
        told = work.run("-n", "results/tiny/decision.csv").stdout
        counts = {name: told.count(f"train tiny/{name}: ") for name in ("first", *DATASETS)}
        return {name: count for name, count in counts.items() if count}

    # Folders that have moved, and a file that was only touched, train nothing again.
    (folder / "elsewhere").mkdir()
    for name in ("my_net.py", "my_layers.py", "my_data.py"):
        (folder / name).rename(folder / "elsewhere" / name)
    (folder / "pictures").rename(folder / "moved")
    work.write_config(moved_config(MINE))
    (folder / "letters.txt").touch()
    assert trained_again() == {}
    # A file that the network imports.
    layers = folder / "elsewhere/my_layers.py"
    layers.write_text(LAYERS.replace("relu()", "tanh()"))
    assert trained_again() == {"first": 3}
    layers.write_text(LAYERS)
    # One picture less, and other arrays.
    (folder / "moved/cats/0.png").unlink()
    (folder / "elsewhere/my_data.py").write_text(CODE.replace("+= 100", "+= 90"))
    assert trained_again() == {"pictures": 1, "stripes": 1}


def test_what_gives_no_scores_stops_a_run_before_its_first_cell(trained):
    """Takes the study as the test before left it."""
    work = trained.work
    two = {"two": {"call": "my_net:TwoAnswers"}} | SPARED
    work.write_config(moved_config(two))
    places = {"two": "first", "spared": "spare"}
    records = [work.record(places[name], "ddp", name, "2gpu") for name in two]
    failed = work.run("--keep-going", *(str(path.relative_to(work.folder)) for path in records))
    assert failed.returncode != 0
    assert SENTENCE in failed.stdout
    assert "train tiny/" not in failed.stdout
