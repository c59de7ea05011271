"""The order in which Snakemake trains the cells of a study on one machine."""

from __future__ import annotations

import re

import pytest
from tiny_study import Workflow, tiny_config

from stratbench.cell.coordinates import Cell
from stratbench.study.order import compute_job_priority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_snakemake_trains_repeat_after_repeat_in_another_order_each(tmp_path, warm):
    config = tiny_config()
    experiments = config["studies"]["tiny"]["experiments"]
    del experiments["second"]
    experiments["first"]["repeats"] = 2
    workflow = Workflow(tmp_path, config)
    workflow.share_import(warm)
    done = workflow.run("--until", "train_cell")
    assert done.returncode == 0, done.stdout
    begun = re.findall(
        r"train tiny/first: (\S+), (\S+), workers: (\d), repeat (\d); log", done.stdout
    )
    cells = [
        Cell("tiny", "first", strategy, model, "tiny-images", int(gpus), int(repeat))
        for strategy, model, gpus, repeat in begun
    ]
    assert [cell.repeat for cell in cells] == [0, 0, 0, 1, 1, 1]
    assert cells == sorted(cells, key=compute_job_priority, reverse=True)
