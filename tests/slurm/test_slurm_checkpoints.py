"""A cell on two nodes that keeps checkpoints goes on after a worker is lost, and after its job's limit."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import ClusterWorkflow, study

from launching import assert_gone, until
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.checkpoints import attempts

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: Three workers: two on the first node, one on the second.
KEPT = {"strategies": ["ddp"], "gpus": [3], "global_batch": 12, "epochs": 20, "warmup_steps": 1}
#: Slow enough to be lost twice on its way; it sleeps most of the time.
KEPT |= {"checkpoint_every": 7, "slowdown": {"workers": [0], "factor": 8}}
#: With more, some processors' rounding lets so many epochs of small batches diverge.
KEPT |= {"lr": 0.01}


def unusable(workflow: ClusterWorkflow) -> set[str]:
    """The rules by which the audit finds a record unusable."""
    with open(workflow.folder / "results/tiny/audit.csv", newline="") as file:
        return {r["rule"] for r in csv.DictReader(file) if r["severity"] == "unusable"}


def test_a_cell_that_loses_a_worker_ends_on_all_nodes_and_goes_on_when_tried_again(
    slurm: SlurmCluster, tmp_path: Path, warm: dict[str, str]
) -> None:
    """And once more, after its job has reached SLURM's time limit."""
    workflow = ClusterWorkflow(tmp_path / "w", study({"one": KEPT}, gpus_per_node=2), slurm)
    run = workflow.start("--until", "audit_records", "--retries", "2")
    folder = RunFolder(tmp_path / "w/results/tiny/logs/one/ddp/vgg-compact/3gpu/rep0/run")
    try:
        until(lambda: attempts.find_newest_common_checkpoint_step(folder, 3))
        worker = until(lambda: workflow.training_worker("one"))
        launcher = until(lambda: workflow.launcher("one"))
        processes = [*launcher.children(recursive=True), worker]
        worker.kill()
        assert_gone(processes)
        lost_at = attempts.find_newest_common_checkpoint_step(folder, 3)
        until(lambda: (attempts.find_newest_common_checkpoint_step(folder, 3) or 0) > lost_at)
        worker = until(lambda: workflow.training_worker("one"))
        launcher = until(lambda: workflow.launcher("one"))
        processes = [*launcher.children(recursive=True), worker]
        workflow.share_import(warm)  # of the last job, which nothing ends
        worker.suspend()  # or it could end before SLURM looks at limits, every half a minute
        workflow.reach_limit(workflow.slurm_jobs("one")[-1]["id"])
        assert_gone(processes)
    finally:
        output = workflow.finish(run)
    assert run.returncode == 0, output
    record = json.loads(workflow.cell_record("one").read_text())
    assert record["status"] == "ok"
    assert record["restarts"]["count"] == 2
    first, second = record["restarts"]["from_steps"]
    assert 7 <= first < second
    assert record["restarts"]["between_s"] > 0
    assert [j["state"] for j in workflow.slurm_jobs("one")] == ["FAILED", "TIMEOUT", "COMPLETED"]
    assert record["batch"]["updates_applied"] == 20 * record["batch"]["steps_per_epoch"]
    assert not folder.saved_state_dir.exists()
    assert (record["provenance"]["nodes"], record["provenance"]["workers_per_node"]) == (2, 2)
    assert [w["rank"] for w in record["workers"]] == [0, 1, 2]
    for job in workflow.slurm_jobs("one"):
        shown = slurm.run("scontrol", "show", "job", job["id"])
        assert {"NumTasks=2", "NumNodes=2"} <= set(shown.split())
    assert unusable(workflow) == set()
