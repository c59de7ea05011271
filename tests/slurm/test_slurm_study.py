"""A study on a SLURM cluster, from submission to its report, and what SLURM adds to a cell's time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cluster import ACCOUNT, SlurmCluster
from cluster_workflow import CELLS_ONLY, ENDLESS, ClusterWorkflow, study, wait_for

pytest_plugins = ["cluster_fixtures"]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm-2"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
STRATEGIES = ("ddp", "fsdp", "ps-async", "two-servers")


@pytest.fixture
def finished(slurm: SlurmCluster, tmp_path: Path) -> ClusterWorkflow:
    """A study with a cell on one node and one on two, for each strategy, after its run."""
    # Nodes that are taken to have one GPU each: the cells of two workers span both.
    experiments = {"spread": {"strategies": list(STRATEGIES), "gpus": [1, 2]}}
    config = study(experiments, mem_mib_per_cpu_worker=6000)
    # Of two servers, each node has one, and workers on both.
    config["studies"]["tiny"]["variants"] = {"two-servers": {"strategy": "ps-async", "servers": 2}}
    workflow = ClusterWorkflow(tmp_path, config, slurm)
    output = workflow.finish(workflow.start(), limit_s=400)
    assert (tmp_path / "results/tiny/report.html").exists(), output
    return workflow


def test_a_study_with_cells_on_one_and_two_nodes_reaches_its_report(
    finished: ClusterWorkflow,
) -> None:
    for strategy in STRATEGIES:
        for gpus in (1, 2):
            path = finished.record("spread", strategy, "vgg-compact", f"{gpus}gpu")
            record = json.loads(path.read_text())
            assert record["status"] == "ok"
            assert record["provenance"]["nodes"] == gpus
            assert record["provenance"]["slurm_job_id"]
            nodes = [w["provenance"]["slurm"]["SLURMD_NODENAME"] for w in record["workers"]]
            assert len(set(nodes)) == gpus, nodes
    jobs = finished.slurm_jobs()
    assert len(jobs) == 2 * len(STRATEGIES)  # one a cell, and nothing but cells
    assert {job["state"] for job in jobs} == {"COMPLETED"}
    spanning = [job["nodes"] for job in jobs if "_2_0" in job["comment"]]
    assert spanning == ["node[1-2]"] * len(STRATEGIES)
    assert finished.jobs() == {}


def birth_s(path: Path) -> float:
    """When a file was made: renaming and touching it, as Snakemake does, do not change that."""
    shown = subprocess.run(["stat", "-c", "%.W", path], capture_output=True, text=True, check=True)
    return float(shown.stdout)


@pytest.mark.alone
def test_slurm_adds_less_than_20_s_to_a_cell(slurm: SlurmCluster, tmp_path: Path) -> None:
    workflow = ClusterWorkflow(tmp_path, study({"alone": {}}), slurm)
    run = workflow.start("--slurm-keep-successful-logs", *CELLS_ONLY)
    output = workflow.finish(run, limit_s=200)
    record = workflow.cell_record("alone")
    assert record is not None, output
    slurm_logs = (
        tmp_path / ".snakemake/slurm_logs/rule_train_cell/tiny_alone_single_vgg-compact_1_0"
    )
    own_s = json.loads(record.read_text())["time"]["total_s"]
    launcher = tmp_path / "results/tiny/logs/alone/single/vgg-compact/1gpu/rep0.log"
    moments = {
        "submitted": birth_s(slurm_logs),
        "started by SLURM": birth_s(next(slurm_logs.glob("*.log"))),
        "launcher started": birth_s(launcher),
        "record written": birth_s(record),
        "seen by snakemake": record.stat().st_mtime,
    }
    overhead_s = moments["record written"] - moments["submitted"] - own_s
    since_s = {what: round(at - moments["submitted"], 2) for what, at in moments.items()}
    print(f"seconds since submission: {since_s}; the cell's own: {own_s:.2f}")
    assert own_s > 0
    assert 0 < overhead_s < 20, since_s


@pytest.mark.timeout(300)
def test_a_cluster_with_accounting_needs_one_line_in_the_profile(
    slurm_accounting: SlurmCluster, tmp_path: Path
) -> None:
    experiments = {"good": {}, "cancelled": ENDLESS}
    workflow = ClusterWorkflow(tmp_path, study(experiments), slurm_accounting)
    workflow.uncomment("  # slurm_account: my_project", f"  slurm_account: {ACCOUNT}")
    run = workflow.start("--retries", "0")
    try:
        wait_for(lambda: workflow.launcher("cancelled"))
        slurm_accounting.run("scancel", workflow.slurm_jobs("cancelled")[0]["id"])
        # sacct's "CANCELLED by 0" would go unnoticed for ever.
        output = workflow.finish(run, limit_s=150)
    finally:
        slurm_accounting.cancel_all()
    assert run.returncode != 0
    assert workflow.status("good") == "ok"
    assert "CANCELLED" in output
    accounts = slurm_accounting.run("sacct", "-nXP", "-o", "Account,Comment").splitlines()
    assert {line.split("|")[0] for line in accounts if "tiny_good" in line} == {ACCOUNT}
