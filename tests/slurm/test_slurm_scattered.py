"""Scattered cells on a SLURM cluster: workers that lie unequally on nodes, as SLURM finds room."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ENDLESS, ClusterWorkflow, study

from launching import assert_gone, until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: Three workers, of which a node's memory holds two.
SCATTERED = {"strategies": ["ddp"], "gpus": [3], "scattered": True, "global_batch": 48}
NODES = {"gpus_per_node": 4, "mem_mib_per_cpu_worker": 9000}


def test_a_cell_lies_as_slurm_finds_room_and_its_record_says_how(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The nodes are one host, which the audit calls a contradiction, and nothing else."""
    config = study({"one": SCATTERED | {"epochs": 2, "warmup_steps": 1}}, **NODES)
    workflow = ClusterWorkflow(tmp_path / "w", config, slurm)
    done = workflow.run("--until", "audit_records")
    assert done.returncode == 0, done.stdout
    record = json.loads(workflow.cell_record("one").read_text())
    assert record["status"] == "ok"
    assert sorted(record["provenance"]["workers_on_nodes"]) == [1, 2]
    assert [w["rank"] for w in record["workers"]] == [0, 1, 2]
    (job,) = workflow.slurm_jobs("one")
    shown = slurm.run("scontrol", "show", "job", job["id"])
    assert "NumTasks=3" in shown
    assert "NumNodes=2" in shown
    with open(workflow.folder / "results/tiny/audit.csv", newline="") as file:
        found = [r for r in csv.DictReader(file) if r["severity"] == "unusable"]
    assert {r["rule"] for r in found} <= {"contradictory-counts"}, found
    assert all(
        "hosts_of_workers" in r["figures"] or "provenance.nodes" in r["figures"] for r in found
    )


def test_a_killed_worker_ends_a_scattered_cell_on_all_its_nodes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    workflow = ClusterWorkflow(tmp_path / "w", study({"one": SCATTERED | ENDLESS}, **NODES), slurm)
    run = workflow.start(*CELLS_ONLY, "--retries", "0")
    try:
        worker = until(lambda: workflow.training_worker("one"))
        launcher = until(lambda: workflow.launcher("one"))
        processes = [*launcher.children(recursive=True), worker]
        worker.kill()
    finally:
        output = workflow.finish(run, 300)
    assert "rank2: killed by SIGKILL" in output or "rank2" in output
    assert_gone(processes)
    until(lambda: not slurm.run("squeue", "-h", "-t", "running", "-o", "%i").split())
