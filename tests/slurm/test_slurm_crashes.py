"""Crashes on a SLURM cluster, of a node and of the driver: what runs on is kept, what is lost comes again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ENDLESS, ClusterWorkflow, study, wait_for

pytest_plugins = ["cluster_fixtures"]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm-2"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
#: Cells that last as long on every machine, and end with a result.
LONG = ENDLESS | {"time_limit_s": 45}


def test_a_cell_on_a_node_that_dies_is_trained_on_another(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    whole = {"mem_mib_per_cpu_worker": 24000}  # one cell a node
    workflow = ClusterWorkflow(tmp_path, study({"one": LONG, "two": LONG}, **whole), slurm)
    run = workflow.start(*CELLS_ONLY)
    wait_for(lambda: workflow.training_worker("one") and workflow.training_worker("two"))
    lost = workflow.slurm_jobs("one")[0]
    slurm.lose_node(lost["nodes"])
    output = workflow.finish(run, limit_s=400)
    assert run.returncode == 0, output
    assert "node failure" in output
    first, second = workflow.slurm_jobs("one")
    assert first["state"] == "NODE_FAIL"
    assert second["state"] == "COMPLETED"
    assert second["nodes"] != lost["nodes"]
    assert len(workflow.slurm_jobs("two")) == 1
    assert workflow.status("one") == "timeout"


def test_cells_that_outlive_a_killed_driver_are_not_started_twice(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    experiments = {"a": LONG, "b": LONG, "c": {}}
    workflow = ClusterWorkflow(tmp_path, study(experiments), slurm)
    records = [workflow.record(name, "single", "vgg-compact", "1gpu") for name in "ab"]
    run = workflow.start("--", *(str(record.relative_to(tmp_path)) for record in records))
    wait_for(lambda: len(workflow.slurm_jobs()) == 2)
    live = [job["id"] for job in workflow.slurm_jobs()]
    time.sleep(2)  # for its bookkeeping after the submission
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    # Snakemake's own lock comes first, with its own advice.
    locked = workflow.run()
    assert locked.returncode != 0
    assert "--unlock" in locked.stdout
    assert workflow.run("--unlock").returncode == 0
    output = workflow.finish(workflow.start(*CELLS_ONLY), limit_s=300)
    assert "still run, or wait in SLURM's queue" in output
    assert all(f"SLURM job {job}: results/tiny/cells/" in output for job in live)
    assert [workflow.status(name) for name in "abc"] == ["timeout", "timeout", "ok"], output
    jobs = workflow.slurm_jobs()
    assert [job["state"] for job in jobs] == ["COMPLETED"] * 3
    assert len({job["comment"] for job in jobs}) == 3
    assert workflow.jobs(*CELLS_ONLY) == {}
    # By which settings cells finished while nobody looked is known, too.
    changed = {name: values | {"lr": 0.01} for name, values in experiments.items()}
    workflow.write_config(study(changed))
    assert workflow.jobs()["train_cell"] == 3
