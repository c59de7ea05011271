"""Elastic cells on a SLURM cluster: their worker jobs come, go, and never outlive them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ClusterWorkflow, study

from launching import until
from stratbench.cell.run_folder import RunFolder

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: A cell of two workers that trains until it is stopped, and sleeps most of the time.
ELASTIC = {"strategies": ["ddp"], "gpus": [2], "elastic": True, "warmup_steps": 1}
ENDLESS = ELASTIC | {"epochs": 1000000, "slowdown": {"workers": [0, 1], "factor": 60}}


class Elastic:
    """A workflow with one elastic cell, and its SLURM jobs."""

    def __init__(self, folder: Path, cell: dict[str, Any], cluster: SlurmCluster) -> None:
        config = study({"one": cell}, mem_mib_per_cpu_worker=1500)
        self.workflow = ClusterWorkflow(folder, config, cluster)
        self.cluster = cluster
        self.run = RunFolder(folder / "results/tiny/logs/one/ddp/vgg-compact/2gpu/rep0/run")

    def launcher(self) -> psutil.Process:
        """The launcher in the cell's own job."""
        return until(lambda: self.workflow.launcher("one"))

    def jobs(self, state: str | None = None) -> list[str]:
        """The ids of the worker jobs, ended ones too, or of those in a state."""
        form = "%i|%T|%k|%Z"
        lines = self.cluster.run("squeue", "-h", "-t", "all", "-S", "i", "-o", form).splitlines()
        rows = [line.split("|") for line in lines]
        ours = [r for r in rows if r[3] == str(self.workflow.folder) and r[2].startswith("worker ")]
        return [r[0] for r in ours if state in (None, r[1])]

    def inside(self) -> list[int]:
        """The numbers of the workers that have trained, ended ones too."""
        logs = self.run.phase_logs()
        return [
            int(p.stem.removeprefix("phases"))
            for p in logs
            if '"join", "event": "end"' in p.read_text()
        ]

    def coordinator(self) -> str:
        """The id of the cell's own job."""
        return self.workflow.slurm_jobs("one")[-1]["id"]


@pytest.fixture
def elastic(slurm: SlurmCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Elastic:
    return Elastic(tmp_path / "w", request.param, slurm)


@pytest.mark.parametrize("elastic", [ENDLESS], indirect=True)
def test_a_lost_worker_is_replaced_and_none_outlives_the_cell(elastic: Elastic) -> None:
    run = elastic.workflow.start(*CELLS_ONLY, "--retries", "0")
    try:
        until(lambda: len(elastic.inside()) == 2)
        first = elastic.jobs("RUNNING")
        assert len(first) == 2
        elastic.cluster.run("scancel", first[0])
        until(lambda: len(elastic.inside()) == 3)
        assert len(elastic.jobs("RUNNING")) == 2
        secret = elastic.run.secret.read_text()
        shown = elastic.cluster.run("scontrol", "show", "job", elastic.jobs("RUNNING")[0])
        assert secret not in shown
        elastic.cluster.run("scancel", elastic.coordinator())
        until(lambda: not elastic.jobs("RUNNING") and not elastic.jobs("PENDING"))
        assert len(elastic.jobs()) == 3
    finally:
        output = elastic.workflow.finish(run, 300)
    assert "CANCELLED" in output


@pytest.mark.parametrize(
    "elastic",
    [ELASTIC | {"epochs": 20, "slowdown": {"workers": [0, 1], "factor": 15}}],
    indirect=True,
)
def test_the_job_of_an_elastic_cell_that_is_killed_is_tried_again_and_goes_on(
    elastic: Elastic,
) -> None:
    run = elastic.workflow.start(*CELLS_ONLY, "--retries", "1")
    try:
        until(lambda: len(elastic.inside()) == 2)
        elastic.launcher().kill()
    finally:
        output = elastic.workflow.finish(run, 500)
    found = json.loads(elastic.workflow.cell_record("one").read_text())
    assert found["status"] == "ok", output
    assert found["elastic"]["lives"] == 2
    first, second = (
        next(g for g in found["elastic"]["generations"] if g["life"] == life) for life in (0, 1)
    )
    assert second["from_step"] >= first["from_step"]
    assert found["batch"]["updates_applied"] == 20 * 4
    assert not elastic.jobs("RUNNING")
    assert not elastic.jobs("PENDING")
    assert not list(elastic.run.path.glob("checkpoint*"))
    assert not elastic.run.secret.exists()


def test_all_arms_of_a_small_study_leave_records_that_the_audit_believes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A gang, split synchronous and split asynchronous workers, in one queue."""
    common = {"gpus": [2], "epochs": 2, "warmup_steps": 1}
    arms = {
        "gang": common | {"strategies": ["ddp"]},
        "split": common | {"strategies": ["ddp"], "elastic": True},
        "served": common | {"strategies": ["ps-ormo"], "elastic": True},
    }
    config = study(arms, gpus_per_node=2, mem_mib_per_cpu_worker=1500)
    workflow = ClusterWorkflow(tmp_path / "w", config, slurm)
    done = workflow.run("--until", "audit_records")
    assert done.returncode == 0, done.stdout
    records = {arm: json.loads(workflow.cell_record(arm).read_text()) for arm in arms}
    assert {arm: r["status"] for arm, r in records.items()} == dict.fromkeys(arms, "ok")
    for arm in ("split", "served"):
        told = records[arm]["elastic"]
        assert len(told["jobs"]) >= 2
        assert told["queue_wait_s"] >= 0
        assert 0 < told["first_step_s"] < records[arm]["time"]["total_s"]
        assert 0 < told["idle_s"] < told["allocated_s"]
    assert all(r["time"]["queue_wait_s"] >= 0 for r in records.values())
    with open(workflow.folder / "results/tiny/audit.csv", newline="") as file:
        assert [r for r in csv.DictReader(file) if r["severity"] == "unusable"] == []
