"""Verdicts by the real Snakemake: rounds of blocks, one at a time or until the budget is spent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from tiny_study import Workflow, tiny_config

from launching import LIMIT_S, assert_gone, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMPARISON = Path("results/tiny/blocks/first/vgg-compact/2gpu")


def racing(folder: Path, warm: dict[str, str]) -> Workflow:
    """A study of twice the same strategy: few steps, three blocks, and one full run of each."""
    config = tiny_config()
    experiments = config["studies"]["tiny"]["experiments"]
    del experiments["second"]
    experiments["first"] |= {"strategies": ["ddp", "same"], "gpus": [2], "threads": 1, "lr": 0.01}
    config["studies"]["tiny"]["variants"] = {"same": {"strategy": "ddp"}}
    workflow = Workflow(folder, config)
    rules = "workflow/stratbench/extensions/verdict/block_rules.py"
    workflow.change_code(rules, "MAX_STEPS = 50, 300", "MAX_STEPS = 4, 6")
    workflow.change_code(rules, "SHARE_DISCARDED = 15, 0.2", "SHARE_DISCARDED = 2, 0.2")
    workflow.change_code(rules, "MATRIX_REPEATS = 3", "MATRIX_REPEATS = 1")
    race = "workflow/stratbench/extensions/verdict/paired/judging.py"
    workflow.change_code(race, "LOOKS = (1, 2, 3, 4, 5, 6, 8, 10)", "LOOKS = (1, 2, 3)")
    workflow.share_import(warm)
    workflow.hold()  # for runs with the code of the copy
    return workflow


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory, warm: dict[str, str]) -> Workflow:
    """A study of which one round has run."""
    workflow = racing(tmp_path_factory.mktemp("raced"), warm)
    assert workflow.jobs("verdict") == {"prepare_data": 1, "run_block": 1, "verdict": 1}
    assert not (workflow.folder / "results").exists()  # a dry run writes nothing
    done = workflow.run("verdict")
    assert done.returncode == 0, done.stdout
    assert "Open:" in done.stdout
    assert "Next round: 1 block" in done.stdout
    return workflow


def block(workflow: Workflow, number: int) -> dict:
    return json.loads((workflow.folder / COMPARISON / f"block{number}/block.json").read_text())


def test_a_round_is_shown_run_and_told_and_the_next_one_is_another(raced):
    first = block(raced, 1)
    assert sorted(first["order"]) == ["ddp", "same"]
    assert 4 <= first["settings"]["steps"] <= 6
    assert "block 1 of tiny/first: vgg-compact, workers: 2" not in raced.run("-n", "verdict").stdout
    round_ = json.loads((raced.folder / "results/tiny/verdict/round.json").read_text())
    assert [comparison["block"] for comparison in round_["comparisons"]] == [1]
    assert raced.jobs("verdict")["run_block"] == 1


def test_ctrl_c_ends_a_block_and_leaves_nothing_of_it(raced, warm):
    raced.import_again()
    third = ("02-ddp", "02-same")
    raced.hold(*third)
    run = raced.start("verdict", "--config", "verdict={rounds: all}")
    until(lambda: list((raced.folder / COMPARISON).glob("block2/segments/01-*/record.json")))
    family = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    output, _ = run.communicate(timeout=LIMIT_S)
    raced.release(*third)
    raced.share_import(warm)
    assert run.returncode != 0, output
    assert_gone(family)
    assert not (raced.folder / COMPARISON / "block2/block.json").exists()
    (log,) = raced.folder.glob("results/tiny/logs/blocks/first/vgg-compact/2gpu/block2.log")
    assert "block 2: stopped by SIGINT; all its processes were ended" in log.read_text()


def test_rounds_follow_one_another_to_the_end_of_the_race(raced):
    """The last test: it goes on from what the others left. A round that was cut off comes first."""
    first = (raced.folder / COMPARISON / "block1/block.json").read_bytes()
    given = ("--config", "verdict={rounds: all, margin: 0.001}")
    done = raced.run("verdict", *given)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^Job stats:", done.stdout, re.MULTILINE)) >= 2
    assert "Done: " in done.stdout
    assert "Decided:" not in done.stdout  # two that are the same, at a margin below the noise
    made = sorted(path.parent.name for path in (raced.folder / COMPARISON).glob("*/block.json"))
    assert made == ["block1", "block2", "block3"]
    assert (raced.folder / COMPARISON / "block1/block.json").read_bytes() == first
    assert raced.jobs("verdict", *given) == {"verdict": 1}  # says the same once more
    # Two that are the same are not called equal within less than the noise.
    found = json.loads((raced.folder / "results/tiny/verdict/verdict.json").read_text())
    assert found["margin"] == 0.001 < found["noise"]["ratio"]
    assert found["comparisons"][0]["claim"] != "within"
    # The decision goes by these blocks, and by none of strategies that were trained otherwise. So short a
    # training learns nothing, and is excluded for it: one strategy is left without a record.
    shutil.rmtree(raced.folder / "results/tiny/cells/first/same", ignore_errors=True)
    assert "Measured in paired blocks" in " ".join(raced.run("decide").stdout.split())
    other = "studies={tiny: {experiments: {first: {lr: 0.02}}}}"
    done = raced.run("decide", "--config", other)
    assert done.returncode == 0, done.stdout
    assert "paired blocks" not in done.stdout
