"""Elastic cells on a SLURM cluster: what their worker jobs do when what started them is lost."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ClusterWorkflow, study
from elastic_cells import SPLIT, two_cells

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_cell_whose_node_may_not_submit_fails_at_once_with_the_remedy(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """SLURM itself refuses: jobs of the workers' partition are submitted from another node alone."""
    slurm.run("scontrol", "create", "PartitionName=closed", "Nodes=node2", "AllocNodes=elsewhere")
    config = study({"split": SPLIT}, mem_mib_per_cpu_worker=1500, worker_partition="closed")
    workflow = ClusterWorkflow(tmp_path / "w", config, slurm)
    try:
        done = workflow.run(*CELLS_ONLY, "--retries", "0")
    finally:
        slurm.cancel_all()
        slurm.run("scontrol", "delete", "PartitionName=closed")
    assert done.returncode != 0
    told = r"no worker job is accepted: sbatch: .*; if this node may not submit jobs"
    assert re.search(told, done.stdout), done.stdout
    assert workflow.cell_record("split") is None


def test_cells_whose_own_jobs_are_lost_finish_with_records_that_the_audit_believes(
    slurm: SlurmCluster, tmp_path: Path, warm: dict[str, str]
) -> None:
    """One is queued again by SLURM, as after the loss of its node; the other's launcher is killed."""
    slow = {"slowdown": {"workers": [0, 1], "factor": 15}}
    workflow, split, served = two_cells(tmp_path / "w", slurm, slow | {"epochs": 20})
    workflow.share_import(warm)
    run = workflow.start("--until", "audit_records", "--retries", "1")
    try:
        split.wait_for_new(set())
        own = split.coordinator()
        slurm.run("scontrol", "update", f"JobId={own}", "Requeue=1")
        slurm.run("scontrol", "requeue", own)
        served.wait_for("score", 1)
        served.launcher().kill()
        until(lambda: slurm.run("squeue", "-h", "-j", own, "-o", "%T") == "PENDING")
        slurm.run(
            "scontrol", "update", f"JobId={own}", "StartTime=now"
        )  # in place of 121 s from now
        served.wait_for("incarnation", 2)
    finally:
        output = workflow.finish(run)
    records = {
        c: json.loads(workflow.cell_record(c.experiment).read_text()) for c in (split, served)
    }
    for cell, found in records.items():
        assert found["status"] == "ok", output
        assert found["batch"]["samples_seen"] == 20 * found["batch"]["steps_per_epoch"] * 32
        assert not cell.jobs("RUNNING", "PENDING")
        assert not cell.run.job_secret_path.exists()
        told = found["elastic"]
        assert len(told["jobs"]) >= 2
        assert told["queue_wait_s"] >= 0
        assert 0 < told["first_step_s"] < found["time"]["total_s"]
        assert 0 < told["idle_s"] < told["allocated_s"]
        assert found["time"]["queue_wait_s"] >= 0
    assert split.coordinator() == own
    told = records[split]["elastic"]
    assert told["incarnations"] == 2
    first, second = (
        next(g for g in told["generations"] if g["incarnation"] == incarnation)
        for incarnation in (0, 1)
    )
    assert second["from_step"] >= first["from_step"]
    assert not list(split.run.path.glob("checkpoint*"))
    told = records[served]["elastic"]["servers"]
    assert len(told["incarnations"]) == 2
    second = told["incarnations"][
        1
    ]  # what an epoch had settled by then was saved, or was done twice
    tickets = 2 * records[served]["batch"]["steps_per_epoch"]
    assert second["tickets_before"] + second["tickets_done_twice"] >= tickets
    assert told["evaluations"] >= 20
    print({k: told[k] for k in ("tickets_done_twice", "returns", "incarnations")})
    with open(workflow.folder / "results/tiny/audit.csv", newline="") as file:
        assert [r for r in csv.DictReader(file) if r["severity"] == "unusable"] == []
