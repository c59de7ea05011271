"""A job that SLURM suspends: the cell's time without the pause, and no pause in its figures."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ClusterWorkflow, study

from launching import until
from stratbench.telemetry.pauses import SHORTEST_S

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: Trains for some seconds, most of which its workers sleep.
LONG = {"epochs": 10, "slowdown": {"workers": [0], "factor": 20}, "lr": 1e-4}


def test_a_cell_whose_job_is_suspended_while_it_trains_trains_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """On two nodes; a cell on one machine is stopped in the tests of the core."""
    one = LONG | {"strategies": ["ddp"], "gpus": [2]}
    workflow = ClusterWorkflow(tmp_path / "w", study({"one": one}), slurm)
    run = workflow.start(*CELLS_ONLY, "--retries", "0")
    try:
        until(lambda: workflow.training_worker("one"))
        job = workflow.slurm_jobs("one")[0]["id"]
        slurm.run("scontrol", "suspend", job)
        time.sleep(2 * SHORTEST_S)
        slurm.run("scontrol", "resume", job)
    finally:
        output = workflow.finish(run)
    assert run.returncode == 0, output
    (log,) = (tmp_path / "w/results/tiny/logs/one").rglob("rep0.log")
    assert re.search(
        r"paused for \d+\.\d s \(.*\) while it trained; it trains again", log.read_text()
    )
    record = json.loads(workflow.cell_record("one").read_text())
    assert record["status"] == "ok"
    assert "pauses" not in record
    assert len(workflow.slurm_jobs("one")) == 1
