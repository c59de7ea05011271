"""A study of strategies and options beside the usual: trained, planned, audited and decided on."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from tiny_study import Workflow, tiny_config

from stratbench.extensions.plan.against_records import predict_recorded_sent_bytes_per_step
from stratbench.extensions.plan.footprint.footprint import make_footprint
from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.study.config.config import load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CELLS = 3 + 2 + 2
GPUS = [1, 2, 4]


def study_config() -> dict:
    common = {
        "dataset": "digits", "gpus": GPUS, "global_batch": 32, "epochs": 1, "lr": 0.02, "device": "cpu",
        "threads": 1, "warmup_steps": 1,
    }  # fmt: skip
    config = tiny_config()
    config["datasets"]["text"] = {
        "source": "markov-text", "train_samples": 640, "test_samples": 32, "vocabulary": 8,
        "sequence": 16,
    }  # fmt: skip
    config["studies"]["tiny"] = {
        "variants": {
            "few": {"strategy": "diloco", "inner_steps": 4},
            "late": {"strategy": "local-sgd", "period": 4, "start": 7},
            "pairs": {"strategy": "fsdp", "shard_group_size": 2},
            "factors": {"strategy": "ddp", "compress": "powersgd", "powersgd_rank": 2,
            "powersgd_start_step": 4},
        },
        "experiments": {
            "digits": common | {"models": ["vgg-compact"], "strategies": ["gossip"]},
            "synchronous": common
            | {"models": ["resnet-compact"], "strategies": ["pairs", "factors"], "gpus": [4],
               "global_batch": 96, "lr": 0.05},
            "text": common
            | {"dataset": "text", "models": ["gpt-compact"], "strategies": ["late", "few"],
               "gpus": [4], "lr": 0.01, "optimizer": "adamw", "max_grad_norm": 1.0},
        },
    }  # fmt: skip
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm: dict[str, str]) -> Workflow:
    workflow = Workflow(tmp_path_factory.mktemp("families"), study_config())
    workflow.share_import(warm)
    done = workflow.run("results/tiny/decision.csv")
    assert done.returncode == 0, done.stdout
    return workflow


def records(workflow: Workflow) -> dict[tuple[str, str, int], dict]:
    found = {}
    for path in (workflow.folder / "results/tiny/cells").rglob("record.json"):
        record = json.loads(path.read_text())
        cell = record["cell"]
        found[cell["experiment"], cell["strategy"], cell["gpus"]] = record
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_strategy_trains_images_and_text_on_four_and_gossip_on_one_and_two(trained):
    found = records(trained)
    assert len(found) == CELLS
    for (experiment, strategy, gpus), record in found.items():
        assert record["status"] == "ok", (experiment, strategy, gpus)
        chance = math.log(record["model"]["classes"])
        assert record["score"]["per_epoch"][-1]["test_loss"] < chance, (experiment, strategy, gpus)
        distances = record["strategy"]["details"].get("consensus_distance", [0.0])
        assert len(distances) == record["settings"]["epochs"]
        # After a last average all workers are one model, but for gossip among more than two.
        assert (distances[-1] > 1e-6) == (strategy == "gossip" and gpus == 4)
    sent = [
        found["digits", "gossip", gpus]["communication"]["sent_bytes_per_step"] for gpus in GPUS
    ]
    assert [bytes_ / sent[1] for bytes_ in sent] == [0, 1, 2]


def test_the_audit_finds_nothing_wrong_with_them(trained):
    found = rows(trained.folder / "results/tiny/audit.csv")
    wrong = [r for r in found if r["severity"] != "note" and r["affects"] != "time"]
    # A study this short: some have hardly learnt anything.
    assert [r for r in wrong if r["rule"] != "score-below-floor"] == []


def test_what_they_hold_and_send_is_what_was_planned(trained):
    config, study = load_config(study_config())
    found = records(trained)
    for cell in study.cells:
        if cell.experiment == "synchronous":
            record = found[cell.experiment, cell.strategy, cell.gpus]
            s = make_cell_to_plan(config, study, cell)
            footprint = make_footprint(s.request)
            assert record["memory"]["model_states"] == footprint.model_states_bytes
            said = record["communication"]["sent_bytes_per_step"]
            assert said == pytest.approx(predict_recorded_sent_bytes_per_step(s, footprint))
