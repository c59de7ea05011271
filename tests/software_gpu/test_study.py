"""A study on the software GPU by the real Snakemake, from plan to partial report, and a verdict's round.

What needs no kernel agrees with the plan exactly; and no figure of it stands anywhere as a measurement.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml
from design import DATASETS, INSTALLED, Planned
from machine import Machine
from tiny_study import Workflow

from stratbench.cell import record, software_gpu
from stratbench.extensions.plan.against_records import make_prediction_rows
from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.schedule import make_plan
from stratbench.strategies import get_strategy_class
from stratbench.study.config.config import load_config

pytestmark = pytest.mark.timeout(1800)


def one_of_each_family() -> list[str]:
    """The first registered strategy of each family that can train the network."""
    found: dict[str, str] = {}
    for name in INSTALLED:
        if Planned(name, "bf16", 1, "vgg-compact", {}).refusal() is not None:
            continue
        found.setdefault(get_strategy_class(name).family, name)
    return list(found.values())


def config() -> dict:
    """Every family on 2 GPUs and `single` on one, in 16 bits, with a network that has no BatchNorm."""
    return {
        "study": "tiny",
        "datasets": DATASETS,
        "cluster": {"gpu": "A100 SXM 80 GB"},
        "studies": {
            "tiny": {
                "experiments": {
                    "first": {
                        "dataset": "images",
                        "strategies": one_of_each_family(),
                        "models": ["vgg-compact"],
                        "gpus": [1, 2],
                        "epochs": 1,
                        "global_batch": 32,
                        "lr": 0.05,
                        "momentum": 0.9,
                        "precision": "bf16",
                        "device": "cuda",
                        "threads": 1,
                    }
                }
            }
        },
    }


@pytest.fixture(scope="module")
def own_machine() -> Iterator[Machine]:
    machine = Machine(Path("/dev/shm", f"software-gpu-test-study-{uuid.uuid4().hex[:12]}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTWARE_GPU_STATE", str(machine.path))
        yield machine
    machine.remove()


@pytest.fixture(scope="module")
def study(own_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A copy of the workflow whose study was planned and trained; its report is partial."""
    workflow = Workflow(tmp_path_factory.mktemp("study"), config())
    planned = workflow.run("plan")
    assert planned.returncode == 0, planned.stdout
    assert "could not be predicted" not in planned.stdout
    done = workflow.run()
    cells = 2 * len(one_of_each_family()) - 1  # single: on one
    assert done.returncode == 1
    assert f"{cells} of {cells} cells have no usable record" in done.stdout
    done = workflow.run("partial")
    assert done.returncode == 0, done.stdout
    return workflow


def test_memory_and_traffic_agree_with_the_plan(study: Workflow) -> None:
    with contextlib.chdir(study.folder):
        read, tiny = load_config(yaml.safe_load(Path("config.yaml").read_text()))
        records = {
            cell: record.read_record(cell.record_path(read["results"])) for cell in tiny.cells
        }
        plan = make_plan(read, check_study(read, tiny), records)
    rows = pd.DataFrame(make_prediction_rows(plan, records))
    assert set(rows["strategy"]) == set(one_of_each_family())
    assert (rows["states_bytes_predicted"] == rows["states_bytes_measured"]).all()
    assert (rows["sent_bytes_predicted"] == rows["sent_bytes_measured"]).all()
    # Nothing of the warm-up is still held when memory is measured, such as DDP's first buckets.
    errors = rows.set_index(["strategy", "gpus"])["peak_error_percent"]
    assert (errors.abs() < 2).all(), errors.to_dict()


def test_records_have_what_only_gpus_tell(study: Workflow) -> None:
    paths = list(study.folder.glob("results/tiny/cells/**/record.json"))
    assert len(paths) == 2 * len(one_of_each_family()) - 1  # single: on one
    for path in paths:
        found = record.read_record(path)
        assert found["status"] == "ok"
        assert software_gpu.was_trained_on_software_gpu(found)
        assert found["energy"]["train_joules"] > 0
        assert 0 < found["compute"]["mfu"] < 1
        for worker in found["workers"]:
            assert worker["memory"]["nvml_used_bytes"] > worker["memory"]["reserved_peak_bytes"]
            assert worker["provenance"]["topology"]


def test_no_figure_of_it_is_in_a_table_an_answer_or_a_page(study: Workflow) -> None:
    folder = study.folder / "results/tiny/partial"
    cells = pd.read_csv(folder / "cells.csv")
    assert set(cells["status"]) == {"error"}
    assert cells["reason"].str.contains(software_gpu.WHY).all()
    for column in (
        "train_time_s",
        "throughput_samples_per_s",
        "score_final",
        "mfu",
        "train_joules",
    ):
        assert cells[column].isna().all()
    assert pd.read_csv(folder / "summary.csv")["value"].isna().all()
    assert len(pd.read_csv(folder / "epochs.csv")) == 0
    assert len(pd.read_csv(folder / "audit.csv")) == 0
    # Those that say of every cell how it ended.
    drawn = {path.stem for path in folder.glob("plots/first/*/*.svg")}
    assert drawn == {"training_time"}
    decided = pd.read_csv(folder / "decision.csv")
    assert decided["rank"].isna().all()
    assert decided["reason"].str.contains("software GPU").all()
    assert software_gpu.WHY in (folder / "report.html").read_text()


def test_it_cannot_be_bundled(study: Workflow) -> None:
    done = study.run("bundle")
    assert done.returncode != 0
    assert "was trained on the software GPU" in done.stdout


def test_a_verdicts_blocks_run_and_decide_nothing(study: Workflow) -> None:
    rules = "workflow/stratbench/extensions/verdict/block_rules.py"
    study.change_code(rules, "MAX_STEPS = 50, 300", "MAX_STEPS = 4, 6")
    study.change_code(rules, "SHARE_DISCARDED = 15, 0.2", "SHARE_DISCARDED = 2, 0.2")
    done = study.run(
        "verdict",
        "--config",
        "studies={tiny: {experiments: {first: {strategies: [ddp, fsdp], gpus: [2]}}}}",
    )
    assert done.returncode == 0, done.stdout
    (path,) = (study.folder / "results/tiny/blocks").rglob("block.json")
    block = json.loads(path.read_text())
    assert block["software_gpu"]
    assert block["gpu_names"]  # blocks on GPUs of other names are not compared
    assert {segment["status"] for segment in block["segments"]} == {"ok"}
    assert all(segment["mean_step_s"] > 0 for segment in block["segments"])
    assert f"was {software_gpu.WHY}" in " ".join(done.stdout.split())  # broken to fit the screen
    told = json.loads((study.folder / "results/tiny/verdict/verdict.json").read_text())
    assert not told["done"]
    assert {comparison["leader"] for comparison in told["comparisons"]} == {None}
